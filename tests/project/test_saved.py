"""What version 0.2 saved is read bit for bit: see `data/saved_by_0.2/make.py`.

`test_transformers_saved.py` reads the models. On a GPU, too, everything runs on the CPU: the sums
are exact there.
"""

import json
from pathlib import Path

import pytest
import torch

import moe_ops
from moe_ops.dispatch import tuned
from moe_ops.dispatch.tuned_file import written

SAVED = Path(__file__).parents[1] / "data/saved_by_0.2"
LAYERS = sorted((SAVED / "layers").iterdir())
KERNELS = {"hopper_packed", "hopper_stream", "hopper_decode_few", "hopper_decode_many", None}
"""Kernels that the tuned files name; None: the portable one."""


def made_like(options):
    """A new layer, with the first placement of its experts."""
    layer = moe_ops.FusedMoE(**options)
    if options.get("enable_eplb"):
        state = moe_ops.EplbState.make(1, options["num_experts"], options["num_redundant_experts"])
        layer.set_eplb_state(0, *state[1:])
    return layer


def bits(x):
    return x.dtype, x.shape, x.contiguous().flatten().view(torch.uint8).tolist()


@torch.no_grad()
def problems_of(saved):
    """What differs from the saved layer in a new one that has loaded its state dict."""
    layer, form = made_like(saved["options"]), saved["form"]
    layer.load_state_dict(saved["state"])
    if bits(layer(*saved["inputs"])) != bits(saved["output"]):
        yield "output"
    if saved["options"].get("enable_eplb"):
        return  # rows lie where the new layer holds their experts
    if form != "plain":
        {"packed": layer.pack_, "fp8": layer.as_fp8_}[form]()
    state = layer.state_dict()
    names = (saved["state"].keys() | state.keys()) - {"_extra_state"}
    for name in names:
        pair = saved["state"].get(name), state.get(name)
        if None in pair or bits(pair[0]) != bits(pair[1]):
            yield name


def test_state_dicts():
    """A new layer has the saved output; in the saved form it has the saved tensors."""
    saved = {path.stem: torch.load(path, weights_only=True) for path in LAYERS}
    wrong = {name: [*problems_of(layer)] for name, layer in saved.items()}
    assert not {name: problems for name, problems in wrong.items() if problems}
    assert len({layer["options"]["scheme"] for layer in saved.values()}) == 8
    assert {layer["form"] for layer in saved.values()} == {"plain", "packed", "fp8"}


def configs_of(layer):
    """For each number of tokens and GEMM the config that was read, as a tuned file says it."""
    for entry in layer.entries:
        for name in ("gemm1", "gemm2"):
            tiles = getattr(entry, name)
            yield str(entry.num_tokens), name, {"BLOCK_M": tiles.block_m, **written(tiles)}


def test_tuned_files(monkeypatch):
    """Each config is what the file says, and a layer of the file's sizes runs on it."""
    found = tuned.look_into(SAVED / "tuned")
    assert not found.problems and len(found.layers) == 2
    monkeypatch.setattr(tuned, "TABLES", tuned.tables(found.layers))
    kernels = set()
    for layer in found.layers:
        said = json.loads((SAVED / "tuned" / layer.file).read_text())
        assert layer.top_k == said.pop("top_k") and len(layer.entries) == len(said)
        for tokens, name, config in configs_of(layer):
            record = {"BLOCK_M": said[tokens]["BLOCK_M"], **said[tokens][name]}
            assert config.items() >= {x for x in record.items() if not x[0].endswith("_us")}
            kernels.add(record.get("kernel"))
        experts, width, hidden = layer.sizes
        config = moe_ops.FusedMoEConfig(
            experts, layer.top_k, hidden, width, experts, "silu", "cpu",
            moe_ops.RoutingMethodType.Default,
        )  # fmt: skip
        costs = moe_ops.explain(config, layer.scheme, num_tokens=[64], device="sm_90").costs
        assert costs[0].tiles_from == (f"tuned ({layer.file})",) * 2
    assert kernels == KERNELS


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch reads programs of older versions")
def test_an_exported_program():
    """It is loaded, and its first run says which version exported it: its operators are gone."""
    saved = torch.load(SAVED / "block.pt", weights_only=True)
    program = torch.export.load(SAVED / "block.pt2").module()
    for run in (program, torch.compile(program)):
        text = "expert_matmul was an operator of moe_ops 0.2; export .* exported by moe_ops 0.2"
        with torch.no_grad(), pytest.raises(NotImplementedError, match=text):
            run(*saved["inputs"])


def test_the_files_are_small():
    """They are in every checkout and source distribution."""
    assert sum(path.stat().st_size for path in SAVED.rglob("*") if path.is_file()) < 2**20

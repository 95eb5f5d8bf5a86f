"""vLLM serves models on the CPU with this library's experts: `make test-vllm`.

One process serves all models with this library's experts, one with vLLM's own, which get weights in
bf16 with the same numbers. The greedy continuations are compared. In float32 all tokens must be
equal. In bfloat16 a continuation may leave the other where one engine finds its two best tokens as
close as the engines' log-probabilities are elsewhere: these near ties are printed (``-s``, which
the make target passes).
"""

import json
from concurrent.futures import ThreadPoolExecutor

import continuations
import pytest
import served_vllm
import torch
from peers import INSIDE, PEERS
from vllm_models import FORMATS, gpt_oss, int8_demo, quantized_demo
from vllm_serve import CPU, TOKENS, served

from moe_ops.bench import problems
from moe_ops.bench.harness import relative_error
from moe_ops.bench.layer import MAX_REL_ERR
from moe_ops.demo import MODEL
from moe_ops.inspect.costs import math_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
EAGER = {"dtype": "bfloat16", "enforce_eager": True}
SCHEMES = {
    "float32": "unquantized",
    "float32, one graph": "unquantized",
    "int8": "int8_w8a16",
    "gpt-oss": "mxfp4_w4a16, swigluoai",
    **{name: format.scheme for name, format in FORMATS.items()},
}
"""What is served -> the scheme that the log names."""


def models(folder):
    """Arguments of ``LLM`` for this library and for vLLM's own experts, by what is served."""
    exact = str(int8_demo(folder / "exact"))
    demo = {"model": str(MODEL), "dtype": "float32"}
    both = {
        "float32": ({**demo, "enforce_eager": True},) * 2,
        "float32, one graph": (demo, demo),
        "int8": ({**EAGER, "model": exact, "quantization": "int8_per_channel_weight_only"},
                 {**EAGER, "model": exact}),
    }  # fmt: skip
    pairs = {"gpt-oss": gpt_oss(folder / "gpt_oss")}
    pairs |= {name: quantized_demo(folder / scheme_folder(name), name) for name in FORMATS}
    return both | {
        name: tuple({**EAGER, "model": str(path)} for path in pair) for name, pair in pairs.items()
    }


def scheme_folder(name):
    return name.replace(" ", "_")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What both engines wrote for each model. They run at the same time."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("VLLM_CACHE_ROOT", str(folder / "cache"))  # both use one: see below
        ours, theirs = zip(*models(folder).values(), strict=True)
        runs = [pool.submit(served, True, *ours), pool.submit(served, False, *theirs)]
        return dict(zip(SCHEMES, zip(*(run.result() for run in runs), strict=True), strict=True))


def compare(name, theirs, ours, *, ties):
    """Compare two engines' continuations, and print where they part."""
    assert {len(one) for one in theirs.tokens} == {TOKENS}
    found = continuations.compare(theirs, ours)
    equal, apart = found.equal, found.apart
    print(f"\n{name}: {equal} tokens before any difference, log-probabilities {apart:.1e} apart")
    for position, first, second, tokens in found.partings:
        print(f"  parted at {position}: vLLM's {first}, ours {second}, of {tokens}")
    assert all(ties and near for near in found.ties())


@pytest.mark.parametrize("name", SCHEMES)
def test_served(written, name):
    """Texts are equal; this library's operators ran, and no others' ran in their place.

    The compiled graphs of both engines are in one cache: neither takes the other's.
    """
    ours, theirs = written[name]
    for one in (ours, theirs):
        assert one.tokens, one.log[-4000:]
    assert f"moe_ops: runs the experts: {SCHEMES[name]}" in ours.log
    assert ours.launches > 0 and theirs.launches == 0 and "moe_ops: " not in theirs.log
    compare(name, theirs, ours, ties="float32" not in name)


def test_benchmark_serves(tmp_path, monkeypatch):
    """`benchmarks/served_vllm.py` with its tiny model: both experts run, and write the same."""
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    where = ["--output", str(tmp_path), "--logs", str(tmp_path)]
    assert served_vllm.main(where) == 0, (tmp_path / "moe_ops.log").read_text()[-4000:]
    rows = json.loads((tmp_path / "cpu/served_vllm.json").read_text())["rows"]
    ours, theirs = ([row for row in rows if row["impl"] == impl] for impl in ("moe_ops", "vllm"))
    assert {row["experts"] for row in ours} == {"MoeOpsExperts"}
    assert all("MoeOps" not in row["experts"] for row in theirs)
    assert [(row["phase"], row["M"]) for row in ours] == [
        (row["phase"], row["M"]) for row in theirs
    ]
    assert all(all(row["compared"]["near_ties"]) for row in ours)


@pytest.mark.parametrize("scheme", PEERS[INSIDE].makers)
def test_modular_kernel(scheme):
    """The layer benchmark's ``moe_ops-in-vllm`` computes the layer."""
    device = torch.device("cpu")
    problem = problems.Problem("small", 8, 2, 256, 128, timed=False)
    experts = problems.make_experts(problem, scheme, device)
    inputs = problems.make_inputs(problem, 7, "uniform", device)
    expected = problems.reference_rows(experts, inputs, torch.arange(7))
    actual = PEERS[INSIDE](experts, inputs)()
    assert relative_error(actual, expected) < MAX_REL_ERR[math_of(experts.scheme)]

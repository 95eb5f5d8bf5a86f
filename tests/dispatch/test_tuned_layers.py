"""Tuned tiles at work: where files are read from, and layers that run on them."""

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from plans import row_tile
from processes import python
from tuned_entries import H200, SIZES, entry, gemm_of, layer, record

import moe_ops
from moe_ops.dispatch import tuned
from moe_ops.dispatch.device import assumed
from moe_ops.dispatch.tuned import DEFAULT
from moe_ops.dispatch.tuned_file import file_name, parse_tuned_layer
from moe_ops.testing import assert_matches_reference
from moe_ops.tuning import files


@pytest.fixture
def installed(monkeypatch):
    def install(*layers):
        monkeypatch.setattr(tuned, "TABLES", tuned.tables(layers))

    return install


def test_the_folder_of_the_environment(tmp_path):
    name = "E=128,N=768,K=2048,device_name=NVIDIA_H200,scheme=fp8_block128.json"
    (tmp_path / name).write_text(json.dumps(record(8, _64=entry(), _512=entry(32))))
    (tmp_path / "README.md").write_text("not a file of tiles")
    run = (
        "from moe_ops.cli import main; run = 'explain --model qwen3-30b --scheme fp8_block128"
        " --device sm_90 --tokens 64,512'.split(); main([*run, '--json']); print('TEXT'); main(run)"
    )
    found, text = python(run, MOE_OPS_TUNED_DIR=str(tmp_path)).stdout.split("TEXT\n")
    small, large = json.loads(found)["costs"]
    assert small["tiles_from"] == [f"tuned ({name})"] * 2
    assert small["gemm1"]["block_m"] == 16 and small["gemm2"]["block_n"] == 32
    # A plan for 512 tokens has tiles of 64 rows.
    assert large["tiles_from"] == [f"{DEFAULT} ({name} has nothing for this load)"] * 2
    assert large["gemm1"]["block_m"] == large["gemm2"]["block_m"] == 64
    assert f"tiles: tuned ({name}): GEMM 1 of 64, GEMM 2 of 64" in text


USE = """
import sys, warnings
import moe_ops
from moe_ops.dispatch import tuned
from moe_ops.inspect.explanation import explain
assert not tuned.TABLES.__dict__.get("_by_gpu"), "read at import"
config = moe_ops.FusedMoEConfig(
    8, 2, 128, 64, 8, "silu", "cpu", moe_ops.RoutingMethodType.Default
)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for device in ("sm_90", "sm_80"):
        found = explain(config, "unquantized", num_tokens=[4], device=device)
        print(found.costs[0].tiles_from[0])
for one in seen:
    print(one.category.__name__, one.message)
"""
"""Plans a layer with and without its own file, and prints what was warned of."""


def test_files_that_cannot_be_used_are_skipped(tmp_path):
    """Neither an import nor a plan raises: one warning names each file and says why."""
    good = file_name(SIZES, "NVIDIA H200", "unquantized")

    def name(sizes):
        return file_name(sizes, "NVIDIA H200", "unquantized")

    (tmp_path / good).write_text(json.dumps(record(2, _4=entry())))
    (tmp_path / name((1, 64, 64))).write_text("{}")
    (tmp_path / name((2, 64, 64))).write_text("")
    (tmp_path / name((3, 64, 64))).write_bytes(b"\xff{}")
    (tmp_path / name((4, 64, 64))).mkdir()
    os.mkfifo(tmp_path / name((5, 64, 64)))
    (tmp_path / name((6, 64, 64))).symlink_to(tmp_path / "nothing")
    (tmp_path / name((7, 64, 64))).symlink_to(tmp_path / name((7, 64, 64)))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (tmp_path / "E=8,N=64,device_name=NVIDIA_H200.json").write_text("{}")
    (tmp_path / f"{good}.lock").write_text("")
    done = python(USE, MOE_OPS_TUNED_DIR=str(tmp_path))
    first, second, *said = done.stdout.splitlines()
    assert (first, second) == (f"tuned ({good})", DEFAULT), done.stderr
    assert len(said) == 9 and all(f"a file in {tmp_path} is not used: " in s for s in said), said
    for count, why in enumerate(
        ("top_k must be", "Expecting value", "must be text in UTF-8", *["a regular file"] * 3), 1
    ):
        assert any(name((count, 64, 64)) in line and why in line for line in said), (count, said)
    for stray in ("config.json", "E=8,N=64,device_name=NVIDIA_H200.json"):
        assert any(f"not used: {stray}: the name must match" in line for line in said), said


@pytest.mark.parametrize("folder", ["none", "file"])
def test_a_folder_that_cannot_be_used(folder, tmp_path):
    (tmp_path / "file").write_text("")
    done = python(USE, MOE_OPS_TUNED_DIR=str(tmp_path / folder))
    *sources, said = done.stdout.splitlines()
    assert sources == [DEFAULT] * 2 and "MOE_OPS_TUNED_DIR must name a folder" in said, done.stderr


def test_what_cannot_be_read(tmp_path, monkeypatch):
    """Permissions do not keep root from reading, so that `open` refuses here."""
    (tmp_path / file_name(SIZES, "NVIDIA H200", "unquantized")).write_text("{}")

    def refuse(*given, **more):
        raise PermissionError(13, "Permission denied")

    for method in ("read_text", "iterdir"):
        monkeypatch.setattr(f"pathlib.Path.{method}", refuse)
        assert tuned.look_into(tmp_path).layers == []
        (problem,) = tuned.look_into(tmp_path).problems
        assert "Permission denied" in problem


def test_one_definition_of_the_folder(monkeypatch, tmp_path):
    """`tune` writes to the user's folder, and continues there what the package has.

    So it does in any other folder, which may become the user's.
    """
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    (known,) = (x for by in tuned.read_all().values() for x in by.values() if x.sizes[1] == 8192
                and x.scheme == "unquantized")  # fmt: skip
    entries = files.read(known, files.default_folder())
    assert list(entries) == [str(entry.num_tokens) for entry in known.entries] and entries
    files.write(known, files.default_folder(), {"3": entries[min(entries)]})
    again = tuned.read_all()[known.device, known.scheme][known.sizes]
    assert {entry.num_tokens for entry in again.entries} == {3, *map(int, entries)}
    assert files.read(known, tmp_path / "other") == entries
    monkeypatch.setattr(tuned, "FOLDER", None)
    with pytest.raises(ValueError, match="MOE_OPS_TUNED_DIR or --output must name a folder"):
        files.default_folder()


FOLDERS = {
    "named": ({"MOE_OPS_TUNED_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
    "cache": ({"MOE_OPS_TUNED_DIR": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/moe_ops/tuned"),
    "home": ({"XDG_CACHE_HOME": "b", "HOME": "/c"}, "/c/.cache/moe_ops/tuned"),
    "no home": ({"HOME": "c"}, None),
}


def test_the_folder_of_a_user():
    """A cache that does not exist is no error; a folder that was named must exist.

    One process imports the module anew for each case.
    """
    code = f"""
import importlib, os
from moe_ops.dispatch import tuned
for variables in {[variables for variables, _ in FOLDERS.values()]}:
    for name in ("MOE_OPS_TUNED_DIR", "XDG_CACHE_HOME", "HOME"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    importlib.reload(tuned)
    print(tuned.FOLDER, len(tuned.folders()))
"""
    expected = [f"{folder} {2 if case == 'named' else 1}" for case, (_, folder) in FOLDERS.items()]
    assert python(code).stdout.splitlines() == expected


TUNE = """
import sys
sys.path[:0] = ["tests", "tests/support"]
from tune_trials import Clock
from moe_ops import cli
from moe_ops.inspect.devices import TARGETS
cli.target_of = lambda device: TARGETS["sm_90"]
cli._gemm_clock = lambda problem, layer, jobs: (Clock(block_n=32), list)
sizes = "--sizes 24,4,2048,640 --scheme fp8_block128 --device h200 --tokens 64 --json"
sys.exit(cli.main(["{command}", *sizes.split()]))
"""


@pytest.mark.parametrize("theirs", [False, True], ids=["cache", "folder"])
def test_what_one_process_tunes_the_next_one_finds(theirs, tmp_path):
    """In the user's cache, and in a folder that the user names."""
    user = tmp_path / "tuned" / "mine"
    expected = user if theirs else tmp_path / "cache" / "moe_ops" / "tuned"

    def run(command):
        folders = {
            "MOE_OPS_TUNED_DIR": str(user) if theirs else "",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        return json.loads(python(TUNE.format(command=command), **folders).stdout)

    path = Path(run("tune")["file"])
    assert path.parent == expected and path.is_file()
    (cost,) = run("explain")["costs"]
    assert cost["tiles_from"] == [f"tuned ({path.name})"] * 2


def test_the_users_files_take_the_place_of_the_packages(monkeypatch, tmp_path):
    theirs, ours = layer(record(_4=entry())), layer(record(_8=entry()))
    monkeypatch.setattr(tuned, "FOLDER", str(tmp_path))
    monkeypatch.setattr(
        tuned, "read_folder", lambda folder: [ours] if folder == tmp_path else [theirs]
    )
    assert dict(tuned.read_all()) == dict(tuned.tables([ours]))


@pytest.fixture
def at_home(installed):
    """A file for the layer of `arguments`."""
    tiles = gemm_of(32, 32, 1, 4, 2)
    installed(layer(record(_4=entry(16, tiles, tiles), _5000=entry(64, tiles, tiles))))


@pytest.fixture
def seen(monkeypatch):
    """The blocks of the GEMMs that are launched from now on."""
    from moe_ops.kernels._runtime.launch import Launch

    launch, blocks = Launch.__call__, []

    def record_constants(self, *given):
        if "GROUP_M" in self.constants:
            blocks.append([self.constants[f"BLOCK_{axis}"] for axis in "MNK"])
        launch(self, *given)

    monkeypatch.setattr(Launch, "__call__", record_constants)
    return blocks


def arguments(tokens, experts=8, width=64, hidden=128, device="cpu", dtype=torch.bfloat16):
    make = torch.Generator().manual_seed(tokens)
    x, w1, w2 = (
        torch.randn(shape, generator=make).to(device, dtype)
        for shape in ((tokens, hidden), (experts, 2 * width, hidden), (experts, hidden, width))
    )
    ids = torch.rand(tokens, experts, generator=make).topk(2).indices.int().to(device)
    return (
        x,
        w1 / hidden**0.5,
        w2 / width**0.5,
        torch.rand(tokens, 2, generator=make).to(device),
        ids,
    )


def test_one_graph_for_all_token_counts(at_home):
    """Neither row tiles nor files are in a graph: the operators look them up."""
    graphs = []

    @torch.compile(
        fullgraph=True, dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph
    )
    def run(*tensors):
        return moe_ops.fused_experts(*tensors)

    torch._dynamo.reset()
    with assumed(H200):
        expected = moe_ops.fused_experts(*arguments(5))
        assert torch.equal(run(*arguments(5)), expected)
        with torch.compiler.set_stance("fail_on_recompile"):
            for tokens in (2, 64, 5000):
                run(*arguments(tokens))
            with row_tile(32):
                run(*arguments(64))
    (graph,) = graphs
    plan = next(node for node in graph.graph.nodes if "plan_slots" in str(node.target))
    assert plan.args[3:5] == ("unquantized", torch.bfloat16)


@pytest.mark.kernel
@pytest.mark.skipif(not (HAS_CUDA or INTERPRETED), reason="no kernel runs")
@pytest.mark.parametrize("tokens", [5, 30])
def test_layers_run_on_what_a_file_says(tokens, at_home, seen, device):
    """The launches have the file's constants, and the result is the one of other tiles."""
    inputs = arguments(tokens, device=device)
    with assumed(H200._replace(name="")):  # nobody knows this device
        expected = moe_ops.fused_experts(*inputs)
    assert [16, 32, 32] not in seen
    seen.clear()
    with assumed(H200):
        actual = moe_ops.fused_experts(*inputs)
    assert seen == [[16, 32, 32]] * 2
    assert_matches_reference(actual, expected.double(), expected)


@pytest.mark.kernel
@pytest.mark.skipif(not (HAS_CUDA or INTERPRETED), reason="no kernel runs")
def test_a_file_does_not_change_a_plan(installed, seen, device):
    """What was timed with another row tile is not used."""
    tiles = gemm_of(32, 32, 1, 4, 2)
    installed(layer(record(_4=entry(32, tiles, tiles))))
    inputs = arguments(5, device=device)
    with assumed(H200):
        moe_ops.fused_experts(*inputs)
    assert [rows for rows, *_ in seen] == [16, 16] and [16, 32, 32] not in seen
    seen.clear()
    with row_tile(32, H200):
        moe_ops.fused_experts(*inputs)
    assert seen == [[32, 32, 32]] * 2


@pytest.mark.gpu
def test_a_gpu_finds_its_files(installed, seen, device):
    """Compiled too."""
    name = torch.cuda.get_device_name()
    content = record(_4=entry(16, gemm_of(32, 32), gemm_of(32, 32)))
    installed(parse_tuned_layer(file_name(SIZES, name, "unquantized"), json.dumps(content)))
    graphs = []

    @torch.compile(
        fullgraph=True, dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph
    )
    def run(*tensors):
        return moe_ops.fused_experts(*tensors)

    torch._dynamo.reset()
    with torch.no_grad():
        for tokens in (5, 9):
            inputs = arguments(tokens, device=device)
            assert torch.equal(run(*inputs), moe_ops.fused_experts(*inputs))
    assert len(graphs) == 1 and seen == [[16, 32, 32]] * 8

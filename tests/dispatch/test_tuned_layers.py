"""Tuned tiles at work: where files are read from, and layers that run on them."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import HAS_CUDA, INTERPRETED
from plans import row_tile
from tuned_entries import H200, SIZES, entry, gemm_of, layer, record

import moe_ops
from moe_ops.bench.harness import CHECKOUT
from moe_ops.dispatch import tuned
from moe_ops.dispatch.device import assumed
from moe_ops.dispatch.tuned import DEFAULT
from moe_ops.dispatch.tuned_file import file_name, parse
from moe_ops.testing import assert_matches_reference


@pytest.fixture
def installed(monkeypatch):
    def install(*layers):
        monkeypatch.setattr(tuned, "TABLES", tuned.tables(layers))

    return install


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, cwd=CHECKOUT, env={**os.environ, **environment},
    )  # fmt: skip


def test_the_folder_of_the_environment(tmp_path):
    name = "E=128,N=768,K=2048,device_name=NVIDIA_H200,scheme=fp8_block128.json"
    (tmp_path / name).write_text(json.dumps(record(8, _64=entry(), _512=entry(32))))
    (tmp_path / "README.md").write_text("not a file of tiles")
    run = (
        "from moe_ops.cli import main; main('explain --model qwen3-30b --scheme fp8_block128"
        " --device sm_90 --tokens 64,512 --json'.split())"
    )
    done = python(run, MOE_OPS_TUNED_DIR=str(tmp_path))
    small, large = json.loads(done.stdout)["costs"]
    assert small["tiles_from"] == [f"tuned ({name})"] * 2
    assert small["gemm1"]["block_m"] == 16 and small["gemm2"]["block_n"] == 32
    # A plan for 512 tokens has tiles of 64 rows.
    assert large["tiles_from"] == [f"{DEFAULT} ({name} has nothing for this load)"] * 2
    assert large["gemm1"]["block_m"] == large["gemm2"]["block_m"] == 64
    text = python(run.replace(" --json", ""), MOE_OPS_TUNED_DIR=str(tmp_path)).stdout
    assert f"tiles: tuned ({name}): GEMM 1 of 64, GEMM 2 of 64" in text
    (tmp_path / name).write_text("{}")
    done = python("import moe_ops", MOE_OPS_TUNED_DIR=str(tmp_path))
    assert f"ValueError: {name}: top_k must be" in done.stderr
    done = python("import moe_ops", MOE_OPS_TUNED_DIR=str(tmp_path / "none"))
    assert "ValueError: MOE_OPS_TUNED_DIR must name a folder" in done.stderr


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
    installed(parse(file_name(SIZES, name, "unquantized"), json.dumps(content)))
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

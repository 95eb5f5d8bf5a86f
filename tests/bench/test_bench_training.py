"""Forward and backward of a layer: what is timed, counted, compared and recorded."""

import json
import sys
from types import ModuleType, SimpleNamespace

import bench_training as bench
import pytest
import torch
import training_report as report
from peers import installed, trained

from moe_ops.bench import problems
from moe_ops.bench.peers import Peer

TINY = ["--model", "tiny", "--tokens", "3", "--rank", "4", "--modes", "eager"]


def case_of(device, trained="all", scheme="bf16", tokens=3, problem=problems.TINY):
    device = torch.device(device)
    experts = problems.make_experts(problem, scheme, device).loaded
    inputs = problems.make_inputs(problem, tokens, "uniform", device)
    return bench.make_case(
        bench.Case(scheme, problem, experts, inputs, "uniform", trained, inputs.x, {}), 4
    )


def test_the_record(capsys, tmp_path):
    pytest.importorskip("transformers")
    assert bench.main([*TINY, "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/training.json")
    record = json.loads(path.read_text())
    assert record["commit"] and record["command"] and record["torch"]
    rows = record["rows"]
    assert [(r["scheme"], r["trained"], r["impl"]) for r in rows] == [
        ("bf16", "adapters", "hf-grouped_mm"),
        ("bf16", "all", "hf-grouped_mm"),
        ("bf16", "frozen", "hf-grouped_mm"),
        ("bf16", "adapters", "moe_ops"),
        ("bf16", "all", "moe_ops"),
        ("bf16", "frozen", "moe_ops"),
        ("mxfp4_w4a16", "adapters", "moe_ops"),
        ("mxfp4_w4a16", "frozen", "moe_ops"),
    ]
    for row in rows:
        assert row["shape"] == "tiny" and row["M"] == 3 and row["mode"] == "eager"
        assert row["tflop_per_s"] == pytest.approx(row["config"]["flops"] / row["time_us"] / 1e6)
        assert 0 < row["saved_bytes"] < row["peak_bytes"]
        assert row["rel_err"] == max(row["config"]["errors"].values()) < bench.MAX_REL_ERR
        names = {"out", *bench.TRAINED[row["trained"]]}
        assert row["config"]["errors"].keys() == names
    said = capsys.readouterr()
    assert "tflop_per_s" in said.out
    steps = [line for line in said.err.splitlines() if line.startswith("moe-ops: ")]
    assert len(steps) == len(rows), "what takes no row is not announced"
    assert steps[0] == "moe-ops: moe_ops, all of tiny in bf16 with 3 tokens"


def test_main_gradients(tmp_path):
    """Both ways are timed, of all weights alone, and what one call adds is compared."""
    what = ["--impls", "moe_ops", "--scheme", "bf16", "--main-grads", "--output", str(tmp_path)]
    assert bench.main([*TINY, *what]) == 0
    (path,) = tmp_path.glob("*/training.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(r["trained"], r["impl"]) for r in rows] == [
        ("adapters", "moe_ops"), ("all", "moe_ops"), ("frozen", "moe_ops"),
        ("all", "moe_ops-added"), ("all", "moe_ops-main"),
    ]  # fmt: skip
    assert len({tuple(r["config"]["errors"]) for r in rows if r["trained"] == "all"}) == 1
    case = case_of("cpu", tokens=40)
    fused, added = (bench.IMPLS[impl](case) for impl in bench.MAIN_GRADS)
    assert (*fused.leaves, *fused.mains) == tuple(added.leaves)
    for layer in (fused, added):
        first = {n: x.clone() for n, x in layer.step(case.grad).items()}
        second = layer.step(case.grad)
        for name in layer.mains:
            assert torch.equal(second[name], 2 * first[name])


@pytest.mark.parametrize("scheme", ["bf16", "mxfp4_w4a16"])
@pytest.mark.parametrize("wrong", bench.TRAINED["adapters"])
def test_a_wrong_gradient_is_no_row(device, scheme, wrong):
    case = case_of(device, "adapters", scheme)
    found = bench.moe_ops_trained(case).step(case.grad)
    assert bench.errors_of(case, found).keys() == {"out", *bench.TRAINED["adapters"]}
    with pytest.raises(ArithmeticError, match=f"of {wrong} must be below"):
        bench.errors_of(case, {**found, wrong: found[wrong] * 1.05})
    found[wrong].view(-1)[-1] = torch.nan
    with pytest.raises(ArithmeticError, match=f"{wrong} must be finite"):
        bench.errors_of(case, found)


def test_flops():
    """As they are written in the docstring, of qwen3-30b with 4096 tokens."""
    problem = problems.load_problems()["qwen3-30b"]
    x = torch.empty(4096, 2048, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(4096, 8, dtype=torch.int32, device="meta")
    inputs = problems.Inputs(x, ids, ids, 128)
    full = bench.Case("bf16", problem, None, inputs, "uniform", "all", x, {})
    assert full.flops == 6 * 4096 * 8 * 3 * 2048 * 768
    assert full.formula_bytes == 2 * 4096 * 2048 + 4 * 4096 * 8 * 768
    frozen = full._replace(trained="frozen")
    assert frozen.flops == 4 * 4096 * 8 * 3 * 2048 * 768
    lora = full._replace(trained="adapters", factors={"a1": torch.empty(1, 128, 16, 2048)})
    low = 6 * 4096 * 8 * 16 * (2 * 2048 + 3 * 768)
    assert lora.flops == frozen.flops + low


def test_what_is_kept_for_backward(device):
    """Beside tokens and the product of the first GEMM: router weights, ids and the plan."""
    case = case_of(device, tokens=1000)
    kept = bench.saved_bytes(bench.moe_ops_trained(case), case)
    slots = 1000 * 2
    assert case.formula_bytes + 8 * slots <= kept < 1.1 * case.formula_bytes + 8 * slots
    lora = case_of(device, "adapters", tokens=1000)
    more = bench.saved_bytes(bench.moe_ops_trained(lora), lora) - kept
    scaled = sum(lora.factors[name].nbytes for name in ("b1", "b2"))
    assert scaled <= more < scaled + 0.1 * case.formula_bytes + 4 * slots


@pytest.mark.parametrize("trained", bench.TRAINED)
def test_the_peer(trained, device):
    """Weights are not copied, but PEFT's sums of weights and adapters are kept for backward."""
    pytest.importorskip("transformers")
    case = case_of(device, trained, tokens=40)
    layer = bench.grouped_mm_trained(case)
    bench.errors_of(case, layer.step(case.grad))
    assert set(layer.leaves) == set(bench.TRAINED[trained])
    assert not any(t.requires_grad for t in (case.experts.w1, case.inputs.x))
    weights = case.experts.w1.nbytes + case.experts.w2.nbytes
    assert (bench.saved_bytes(layer, case) >= weights) == (trained == "adapters")
    if trained == "all":
        assert layer.leaves["w1"].data_ptr() == case.experts.w1.data_ptr()


class _LigerFunction:
    """Liger's function in words."""

    @staticmethod
    def apply(x, w1, w2, ids, weights):
        assert ids.dtype == torch.int32 and weights.dtype == x.dtype
        return _layer(x, w1, w2, ids, weights)


def _layer(x, w1, w2, ids, weights):
    gate, up = torch.einsum("th,tknh->tkn", x, w1[ids.long()]).chunk(2, dim=-1)
    y = torch.einsum("tki,tkhi->tkh", torch.nn.functional.silu(gate) * up, w2[ids.long()])
    return (y * weights[..., None].to(x.dtype)).sum(1)


def _sonic(x, scores, tokens, ids, w1, b1, w2, b2, count, stream, activation, concat_layout):
    """SonicMoE's ``moe_general_routing_inputs`` in words."""
    assert (w1.stride(1), w2.stride(1), activation) == (1, 1, "swiglu") and concat_layout
    assert b1 is None and b2 is None and scores.dtype == torch.float32 and count == w1.shape[2]
    assert bool((tokens.diff() >= 0).all()) and tokens.dtype == ids.dtype == torch.int32
    by_token = (len(x), -1)
    given = (w1.permute(2, 0, 1), w2.permute(2, 0, 1), ids.view(by_token), scores.view(by_token))
    return _layer(x, *given), ids.bincount(minlength=count)


@pytest.fixture
def peers_of_training(monkeypatch):
    """Stand-ins for Liger and SonicMoE with QuACK; returns QuACK's tuner."""
    config = {"tile_m": 128, "tile_n": 192, "pingpong": True, "cluster_m": 2, "swap_ab": False,
              "device_capacity": 9}  # fmt: skip
    changes = ({}, {"swap_ab": True}, {"cluster_m": 1}, {"tile_n": 208}, {"device_capacity": 10})
    configs = [SimpleNamespace(kwargs={"config": SimpleNamespace(**{**config, **change})})
               for change in changes]  # fmt: skip
    tuner = SimpleNamespace(configs=configs)
    kinds = SimpleNamespace(SWIGLU="swiglu")
    members = {
        "liger_kernel.ops.fused_moe": {"LigerFusedMoEFunction": _LigerFunction},
        "sonicmoe.functional": {"moe_general_routing_inputs": _sonic},
        "sonicmoe.enums": {"ActivationType": kinds},
        "quack.gemm_interface": {"gemm_tuned": tuner, "other": SimpleNamespace()},
    }
    for name, found in members.items():
        module = ModuleType(name)
        vars(module).update(found)
        monkeypatch.setitem(sys.modules, name, module)
        for outer in (name.partition(".")[0], name.rpartition(".")[0]):
            monkeypatch.setitem(sys.modules, outer, ModuleType(outer))
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return tuner


def test_liger_and_sonicmoe(peers_of_training):
    """Gradients are of the stored weights; SonicMoE's tuner has few tiles left for sm_90."""
    case = case_of("cpu", tokens=40)
    for impl in trained.TRAINED_PEERS:
        layer = bench.IMPLS[impl](case)
        bench.errors_of(case, layer.step(case.grad))
        assert set(layer.leaves) == set(bench.TRAINED["all"]), impl
        assert layer.leaves["w1"].data_ptr() == case.experts.w1.data_ptr(), impl
        assert not case.experts.w1.requires_grad
    kept = [vars(made.kwargs["config"]) for made in peers_of_training.configs]
    assert [(c["tile_n"], c["device_capacity"]) for c in kept] == [(192, 9), (192, 10)]


def test_what_training_peers_lack(monkeypatch):
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    installed.lacks.cache_clear()
    assert bench.missing("liger") == "the package liger_kernel"
    assert bench.missing("sonicmoe") == "the package sonicmoe"
    assert bench.missing("moe_ops") is None
    monkeypatch.setattr(installed, "find_spec", lambda name: True)
    lacks = installed.lacks("no_such_package", "no_such_package.part")
    assert lacks == "ModuleNotFoundError: No module named 'no_such_package'"
    installed.lacks.cache_clear()


def test_what_runs(device):
    full, adapters = case_of(device), case_of(device, "adapters")
    assert bench.runs("hf-grouped_mm", "eager", full)
    for peer in ("hf-grouped_mm", *trained.TRAINED_PEERS):
        assert bench.runs(peer, "eager", full) and not bench.runs(peer, "captured", full)
    for peer in trained.TRAINED_PEERS:
        assert not bench.runs(peer, "eager", adapters), "their backward is of all weights"
    assert bench.runs("moe_ops", "captured", full) == full.inputs.x.is_cuda
    assert bench.runs("moe_ops", "eager", adapters)
    assert bench.runs("hf-grouped_mm", "eager", adapters)
    assert not bench.runs("hf-grouped_mm", "eager", adapters._replace(scheme="mxfp4_w4a16"))


def test_a_failure_costs_no_other_row(capsys, monkeypatch, tmp_path):
    def broken(case):
        raise RuntimeError("broken on purpose")

    monkeypatch.setitem(bench.IMPLS, "hf-grouped_mm", broken)
    monkeypatch.setitem(bench.PEERS, "hf-grouped_mm", Peer(lambda: None, {}))
    what = ["--impls", "hf-grouped_mm,moe_ops", "--trained", "all"]
    assert bench.main([*TINY, *what, "--output", str(tmp_path)]) == 1
    assert "failed: hf-grouped_mm bf16 all 3" in capsys.readouterr().err
    (path,) = tmp_path.glob("*/training.json")
    assert {row["impl"] for row in json.loads(path.read_text())["rows"]} == {"moe_ops"}


def test_options(capsys, tmp_path):
    assert bench.main([*TINY, "--time-budget-s", "0", "--output", str(tmp_path)]) == 0
    assert "0 rows" in capsys.readouterr().out and not list(tmp_path.rglob("*"))
    for wrong in (["--trained", "nothing"], ["--modes", "nothing"], ["--rank", "0"]):
        with pytest.raises(SystemExit):
            bench.options(wrong)
        assert wrong[1] in capsys.readouterr().err


def test_report():
    header = {"gpu": "G", "driver": "1", "torch": "2", "triton": "3", "date": "2026-01-02T03:04"}
    row = {
        "scheme": "bf16", "shape": "a", "M": 64, "impl": "moe_ops", "routing": "uniform",
        "trained": "all", "mode": "eager", "time_us": 3000.0, "tflop_per_s": 300.0,
        "peak_bytes": 4e9, "saved_bytes": 118e6, "formula_bytes": 117e6,
    }  # fmt: skip
    changes = (
        {"scheme": "mxfp4_w4a16", "trained": "adapters"},
        {"impl": "hf-grouped_mm", "time_us": 6000.0, "tflop_per_s": 150.0},
        {},
        {"mode": "captured", "time_us": 2500.0, "tflop_per_s": 360.0},
        {"routing": "zipf", "time_us": 1.0},
    )
    rows = [{**row, **change} for change in changes]
    text = report.report([{**header, "commit": "0123456789", "rows": rows}])
    assert "G, driver 1, torch 2, Triton 3; commit 0123456; 2026-01-02." in text
    assert text.endswith(
        "| a | all weights | `bf16` | 64 | moe_ops | 3.00 (2.50) | 360 | 4000 | 118 (117) |\n"
        "| a | all weights | `bf16` | 64 | hf-grouped_mm | 6.00 | 150 | 4000 | 118 (117) |\n"
        "| a | adapters | `mxfp4_w4a16` | 64 | moe_ops | 3.00 | 300 | 4000 | 118 (117) |"
    )

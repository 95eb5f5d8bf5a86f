"""The benchmarks: what they compute from times, record, report and plot."""

import json
import re
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import compare
import pytest
import report
import stages
import torch

import moe_ops
from moe_ops import ops
from moe_ops.bench import harness, problems, stage_profile
from moe_ops.bench import layer as bench_layer
from moe_ops.dispatch.device import assumed
from moe_ops.inspect.devices import TARGETS
from moe_ops.scheme import UNQUANTIZED, QTensor, packs

ROOT = Path(__file__).parents[2]


def row(shape="qwen3-30b", m=8, impl="moe_ops", time_us=100.0, **rest):
    values = {"scheme": "bf16", "routing": "uniform", "p10_us": 1.0, "p90_us": 2.0, "runs": 40,
              "rel_err": 0.001, "floor_us": 50.0, "config": {"active_experts": 8}}  # fmt: skip
    return harness.Row(
        **{**values, "shape": shape, "M": m, "impl": impl, "time_us": time_us, **rest}
    )


@pytest.mark.parametrize(
    "shape, tokens, active, expected",
    [
        # 8 experts of 3 * 2048 * 768 weights, a row in, a row out: 75505664 bytes at 4.67 TB/s.
        ("qwen3-30b", 1, 8, 16.168236),
        # 218 experts of 3 * 7168 * 2048 weights, 64 rows in and out: 19203358720 bytes.
        ("deepseek-v3", 64, 218, 4112.068248),
        # 4096 * 2 slots of 3 * 4096 * 14336 multiplications and additions at 758 TFLOP/s.
        ("mixtral", 4096, 8, 3807.675492),
    ],
)
def test_floor(monkeypatch, shape, tokens, active, expected):
    monkeypatch.setattr(harness, "gpu_name", lambda: "NVIDIA H200")
    problem = problems.load_problems()[shape]
    e, h, i = problem.num_experts, problem.hidden_size, problem.intermediate_size
    make = {"dtype": torch.bfloat16, "device": "meta"}
    w1, w2 = torch.empty((e, 2 * i, h), **make), torch.empty((e, h, i), **make)
    experts = problems.Experts.of(UNQUANTIZED, QTensor(w1), QTensor(w2), "silu")
    ids = torch.empty((tokens, problem.top_k), dtype=torch.int32, device="meta")
    inputs = problems.Inputs(torch.empty((tokens, h), **make), ids.float(), ids, active)
    floor = bench_layer.layer_floor_us(problem, experts, inputs)
    assert floor == pytest.approx(expected, rel=1e-6)
    monkeypatch.setattr(harness, "gpu_name", lambda: "another GPU")
    assert bench_layer.layer_floor_us(problem, experts, inputs) is None


@pytest.mark.parametrize(
    "estimate, runs", [(1.0, 100), (5_000.0, 100), (20_000.0, 50), (60_000.0, 20)]
)
def test_median_and_deciles(monkeypatch, estimate, runs):
    def times(count):
        return [estimate] * count if count < 20 else [float(i) for i in reversed(range(count))]

    monkeypatch.setattr(harness, "_eager", lambda call, device: (times, "output"))
    timing = harness.measure(lambda: None, torch.device("cpu"))
    last = runs - 1
    assert timing == (
        last / 2,
        pytest.approx(0.1 * last),
        pytest.approx(0.9 * last),
        runs,
        "output",
    )


def test_records_merge_by_key(monkeypatch, tmp_path):
    path = tmp_path / "gpu" / "layer.json"

    def run(commit, date, rows):
        header = {"gpu": "G", "commit": commit, "date": date, "command": "c"}
        monkeypatch.setattr(harness, "run_header", lambda: header)
        harness.write_rows(path, rows)
        return json.loads(path.read_text())

    run("one", "day 1", [row(m=8, time_us=3.0), row(m=1, time_us=1.0)])
    record = run("two", "day 2", [row(m=8, time_us=2.0), row(m=8, routing="zipf")])
    found = [(r["M"], r["routing"], r["time_us"], r["commit"]) for r in record["rows"]]
    assert found == [
        (1, "uniform", 1.0, "one"), (8, "uniform", 2.0, "two"), (8, "zipf", 100.0, "two"),
    ]  # fmt: skip
    assert record["commit"] == "two"
    assert [part["commit"] for part in record["parts"]] == ["one", "two"]
    assert len(run("two", "day 2", [row(m=64)])["parts"]) == 2, "one entry a run"


@pytest.mark.parametrize(
    "program, typed",
    [
        ("/a/moe_ops/__main__.py", "-m moe_ops"),
        ("/a/bin/moe-ops", "-m moe_ops"),
        ("/a/benchmarks/x.py", "benchmarks/x.py"),
    ],
)
def test_command_has_no_path_of_the_machine(monkeypatch, program, typed):
    monkeypatch.setattr(sys, "argv", [program, "--tokens", "1"])
    assert harness._command() == f"python {typed} --tokens 1"


def test_names_of_models():
    known = problems.known_names()
    assert all(problems.find_problem(name).name == key for name, key in known.items())
    for name in ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b", "QWEN3_30B"):
        assert problems.find_problem(name).name == "qwen3-30b"
    shapes = json.loads((ROOT / "moe_ops/bench/shapes.json").read_text())
    aliases = [alias for shape in shapes.values() for alias in shape["aliases"]]
    assert len({*aliases, *shapes}) == len(aliases) + len(shapes), "a name has one meaning"
    with pytest.raises(ValueError, match="mixtral-8x7b"):
        problems.find_problem("Mixtral-9x7B")


def test_routings():
    problem, cpu = problems.load_problems()["qwen3-30b"], torch.device("cpu")
    uniform, zipf = (problems.make_inputs(problem, 8, r, cpu) for r in problems.ROUTINGS)
    assert uniform.num_active == problems.ACTIVE_EXPERTS["qwen3-30b"][8] > zipf.num_active
    for inputs in (uniform, zipf):
        assert inputs.topk_ids.unique().numel() == inputs.num_active
        torch.testing.assert_close(inputs.topk_weights.sum(-1), torch.ones(8))


# Profiles


def test_profile_names_the_stages(device):
    before = dict(vars(ops))
    layer_device = torch.device(device)
    experts = problems.make_experts(problems.TINY, "bf16", layer_device)
    inputs = problems.make_inputs(problems.TINY, 4, "uniform", layer_device)
    with torch.no_grad():
        parts = stage_profile.profile_call(bench_layer.moe_ops_layer(experts, inputs), layer_device)
    assert vars(ops) == before, "the operators are unwrapped again"
    named = {f"{part.stage}/{part.operator}" for part in parts if part.stage != "other"}
    assert {part.stage for part in parts} >= {"align", "expert_product", "weight_and_reduce"}
    assert named <= {f"{stage}/{name}" for name, stage in ops.STAGES.items()}
    assert all(part.time_us > 0 and part.kernels >= (device == "cuda") for part in parts)
    assert sum(part.share for part in parts) == pytest.approx(1)


def test_an_operator_that_fails_is_unwrapped_too():
    before = dict(vars(ops))
    with pytest.raises(RuntimeError, match="mine"), stage_profile.named_stages():
        assert ops.activation is not before["activation"]
        raise RuntimeError("mine")
    assert vars(ops) == before


def trace_of(calls):
    """A trace as kineto writes it; a call is a list of (range, launch API, kernel's time)."""
    events, clock, number = [], 0.0, 0

    def add(category, name, ts, dur, **arguments):
        event = {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": arguments}
        events.append(event)

    for call in calls:
        add("cuda_runtime", "cudaLaunchKernel", clock, 1, correlation=-1 - number)
        add("kernel", "evict", clock + 500, 100, correlation=-1 - number)
        add("user_annotation", stage_profile.LAYER, clock + 10, 10 * len(call))
        for position, (name, api, time) in enumerate(call):
            start, number = clock + 10 + 10 * position, number + 1
            if name:
                add("user_annotation", name, start + 1, 8)
            if api == "cpu_op":  # the launch itself was not recorded
                add(api, "aten::op", start + 2, 5, **{"External id": number})
            elif api:
                add(api, "launch", start + 3, 2, correlation=number)
            add("kernel", "k", clock + 700, time, **{"correlation": number, "External id": number})
        clock += 1000
    return {"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}


def test_kernels_belong_to_the_range_that_launches_them():
    def call(slower):
        return [
            ("align/moe_align_block_size", "cuda_driver", 2.0 + slower),
            ("expert_product/expert_product", "cuda_runtime", 10.0 + slower),
            ("expert_product/expert_product", "cpu_op", 20.0),
            ("not a stage", "cuda_driver", 8.0),
        ]

    parts = stage_profile.trace_parts(trace_of([call(50.0), call(0.0), call(0.0)]), on_gpu=True)
    assert [tuple(vars(part).values()) for part in parts] == [
        ("align", "moe_align_block_size", 1, 2.0, pytest.approx(0.05)),
        ("expert_product", "expert_product", 2, 30.0, pytest.approx(0.75)),
        ("other", "-", 1, 8.0, pytest.approx(0.2)),
    ]


def test_a_profile_without_the_gpu_is_an_error():
    with pytest.raises(RuntimeError, match="CUPTI"):
        stage_profile.trace_parts(trace_of([[]]), on_gpu=True)
    with pytest.raises(RuntimeError, match="no launch of k"):
        stage_profile.trace_parts(trace_of([[("align/x", None, 1.0)]]), on_gpu=True)


# Reports


def record_of(*rows):
    header = {"gpu": "G", "driver": "1", "torch": "2", "triton": "3", "date": "2026-01-02T03:04"}
    return {**header, "commit": "0123456789", "rows": [vars(r) for r in rows]}


def test_report():
    record = record_of(
        row(m=1, time_us=20.04, floor_us=10.0), row(m=1, impl="peer", time_us=40.0, floor_us=10.0),
        row(m=8, time_us=300.0, floor_us=None), row(m=8, impl="peer", time_us=150.0, floor_us=None),
        row(m=64, time_us=7.0, floor_us=7.0), row(m=5), row(m=1, routing="zipf", time_us=1.0),
    )  # fmt: skip
    text = report.report([record])
    assert "G, driver 1, torch 2, Triton 3; commit 0123456; 2026-01-02." in text
    assert text.endswith(
        "| shape | tokens: | 1 | 8 | 64 |\n| --- | --- | --: | --: | --: |\n"
        "| qwen3-30b | moe_ops | **20.0** | 300 | **7.0** |\n"
        "|  | estimate | 10.0 (2.00) | - | 7.0 (1.00) |\n"
        "|  | peer | 40.0 (0.50) | **150** (2.00) | - |"
    )
    assert "### G\n" in text and "#### G: bf16\n" in text
    record["rows"][0]["commit"] = "9876543210-dirty"
    assert "commits 0123456, 9876543-dirty;" in report.report([record])


def test_report_is_written_between_the_markers(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for _ in range(2):
        report.write_report(path, "new")
        assert path.read_text() == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"
    for text in ("none", report.BEGIN, f"{report.END}{report.BEGIN}"):
        path.write_text(text)
        with pytest.raises(SystemExit, match="must have"):
            report.write_report(path, "new")
        assert path.read_text() == text


def test_readme_shows_the_records():
    shown = report.between_markers((ROOT / "README.md").read_text())
    made = report.readme(report.RESULTS)
    assert shown == made, "run: python benchmarks/report.py --write README.md"


def test_headline():
    rows = [
        row("a", 1, time_us=10.0, floor_us=5.0), row("b", 1, time_us=40.0, floor_us=20.0),
        row("a", 1, "hf-grouped_mm", time_us=20.0), row("b", 1, "hf-grouped_mm", time_us=320.0),
        row("a", 1, time_us=5.0, floor_us=1.0, scheme="fp8_block128"),
    ]  # fmt: skip
    text = report.headline([record_of(*rows)])
    ratios = [line.split(" | ")[1] for line in text.splitlines()[2:5]]
    assert ratios == ["4.00", "2.00", "2.00"], "without compiled peers and MXFP4"
    assert "| `bf16` (2 layers) | 0.25 hf-grouped_mm |" in text
    assert "No peer is faster in any of the 2 cells." in text
    assert "Peers: hf-grouped_mm." in text
    assert "torch.compile" not in text and "mxfp4" not in text
    assert "over 2 models' layers (a, b)" in text


def test_compare(capsys):
    key = {"scheme": "bf16", "shape": "qwen3-30b"}
    cells = [
        {**key, "M": 8, "goal_us": 80.0, "best_peer_us": 125.0, "peers_us": {"vllm-triton": 200.0}},
        {**key, "M": 64, "goal_us": 1.0},
    ]
    record = record_of(row(), row(impl="peer", time_us=1.0), row(m=64, routing="zipf"))
    with pytest.raises(SystemExit, match="2"):
        compare.main(["absent.json", "--record", __file__])
    assert "no such file: absent.json" in capsys.readouterr().err
    for targets in (cells, {"cells": cells}):
        (cell,) = compare.compared(record, targets)
        ratios = [cell[name] for name in compare.RATIOS]
        assert ratios == [None, 0.5, 0.8, 1.25]
        assert "x goal: 1.250 on average; at most 1 in 0 of 1" in compare.summary([cell])


def test_plot(tmp_path):
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(SystemExit, match="matplotlib"):
            import_module("plot")
        return
    plot = import_module("plot")
    with pytest.raises(SystemExit, match="no layer.json"):
        plot.main(["--output", str(tmp_path)])
    (tmp_path / "g").mkdir()
    shapes = ("deepseek-v3", "mixtral", "qwen3-30b", "qwen3-next")
    rows = [row(shape, m) for shape in shapes for m in (1, 8)]
    rows += [row("mixtral", 1, "peer"), row("mixtral", 1, routing="zipf", floor_us=None)]
    (tmp_path / "g" / "layer.json").write_text(json.dumps(record_of(*rows)))
    plot.main(["--output", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.glob("g/*.png")) == [
        "layer-bf16-zipf.png", "layer-bf16.png", "roofline-bf16-zipf.png", "roofline-bf16.png",
    ]  # fmt: skip
    _, axis = plot.plt.subplots()
    panel = [row(m=1, time_us=10.0, floor_us=8.0), row(m=1, impl="peer", time_us=25.0),
             row(m=8, impl="peer", time_us=3.0)]  # fmt: skip
    plot._panel(axis, list(map(vars, panel)), ["moe_ops", "peer"])
    drawn = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
    assert drawn["moe_ops"] == [1.0] and drawn["peer"] == [2.5], "ratios to this library's time"


BENCHES = {path.stem.removeprefix("bench_"): path for path in ROOT.glob("benchmarks/bench_*.py")}


def test_every_stage_is_timed():
    """Each stage has a file of its own, which `make bench-stages` finds."""
    others = {"layer", "models", "host_models", "overheads", "training", "training_ranks", "cpu"}
    stages_timed = set(BENCHES) - others
    assert stages_timed == set(ops.STAGES.values())
    run = ["make", "--dry-run", "--no-print-directory", "bench-stages"]
    printed = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    (looped,) = re.findall(r"for stage in (.*?);", printed)
    assert set(looped.split()) == stages_timed


@pytest.mark.parametrize("stage", sorted(set(ops.STAGES.values())))
def test_every_operator_of_a_stage_is_timed(stage, monkeypatch, tmp_path, capsys):
    """The benchmark runs on a tiny problem, and its record has a row for each operator."""

    def once(call, device, budget_s):
        return harness.Timing(1.0, 1.0, 1.0, 1, call())

    monkeypatch.setattr(stages, "measure", once)
    command = [str(BENCHES[stage]), "--output", str(tmp_path), "--model", "tiny"]
    monkeypatch.setattr(sys, "argv", [*command, "--tokens", "1,64"])
    runpy.run_path(str(BENCHES[stage]), run_name="__main__")
    (path,) = tmp_path.glob("*/stages.json")
    rows = json.loads(path.read_text())["rows"]
    timed = {r["impl"].partition(":")[0] for r in rows}
    assert timed >= {name for name, of in ops.STAGES.items() if of == stage}
    assert len(rows) == len(capsys.readouterr().out.splitlines()) - 1, "a head, and no row twice"


def test_gemms_are_timed_with_the_plans_of_the_layer(monkeypatch):
    """As on an H200: what a row says is what `explain` says of a layer with these sizes."""
    h200, problem = TARGETS["sm_90"], problems.find_problem("qwen3-30b")
    layer = moe_ops.FusedMoEConfig(
        problem.num_experts, problem.top_k, problem.hidden_size, problem.intermediate_size,
        problem.num_experts, "silu", "cuda", moe_ops.RoutingMethodType.Renormalize,
    )  # fmt: skip
    for name in import_module("bench_expert_product").SCHEMES:
        experts = meta_experts(problem, name)
        packed = packs(experts.scheme, 1536, 2048)
        monkeypatch.setattr(problems, "reads_packed", lambda *_, packed=packed, **__: packed)
        monkeypatch.setattr(stages, "_experts", lambda *_, experts=experts: experts)
        told = moe_ops.explain(layer, experts.scheme, num_tokens=(1, 64, 4096), device="sm_90")
        for cost in told.costs:
            inputs = meta_inputs(problem, cost.num_tokens)
            with assumed(h200.facts):
                cases = list(stages.Layer(problem, name, inputs).cases("expert_product"))
            plans = [stages.plan_of(case, h200.facts) for case in cases]
            both = [(cost.gemm1, cost.tiles_from[0]), (cost.gemm2, cost.tiles_from[1])]
            assert [(plan.config, plan.source) for plan in plans] == both


def meta_experts(problem, name):
    """`problems.make_experts` without data."""
    meta = {"dtype": torch.bfloat16, "device": "meta"}
    experts, hidden, inner = problem.num_experts, problem.hidden_size, problem.intermediate_size
    dense = (
        torch.empty(experts, 2 * inner, hidden, **meta), torch.empty(experts, hidden, inner, **meta)
    )  # fmt: skip
    scheme = problems.read_scheme(name)
    w1, w2 = (moe_ops.quantize_weight(w, scheme) for w in dense)
    return problems.Experts.of(scheme, w1, w2, "silu")


def meta_inputs(problem, tokens):
    x = torch.empty(tokens, problem.hidden_size, dtype=torch.bfloat16, device="meta")
    weights = torch.empty(tokens, problem.top_k, device="meta")
    return problems.Inputs(x, weights, weights.int(), problem.num_experts)


def test_weights_that_a_layer_holds_as_fp8(monkeypatch):
    problem = problems.Problem("small", 4, 2, 128, 64, timed=False)
    device = torch.device("cpu")
    for name in ("mxfp4_w4a8_token", "mxfp4_w4a8"):
        experts = problems.make_experts(problem, name, device)
        inputs = problems.make_inputs(problem, 5, "uniform", device)
        assert experts.loaded is experts  # on a CPU
        monkeypatch.setattr(problems, "gains_by_fp8", lambda *_, **__: True)
        del experts.__dict__["loaded"]
        loaded = experts.loaded
        assert loaded.w1.dtype == loaded.w2.dtype == torch.float8_e4m3fn
        assert torch.equal(loaded.dense(1)[0], experts.dense(1)[0])
        case = bench_layer.Case({"scheme": name}, problem, experts, inputs)
        monkeypatch.setattr(bench_layer, "Row", lambda **facts: facts)
        held, plain = (bench_layer.time_case(case, impl) for impl in ("moe_ops", bench_layer.PLAIN))
        assert held["rel_err"] == pytest.approx(plain["rel_err"], rel=0.02)
        monkeypatch.undo()


def test_rows_in_four_bits_are_recorded(tmp_path):
    """Their errors are larger than those of rows in eight, which are limited as before."""
    options = ["--sizes", "4,2,256,128", "--tokens", "8", "--scheme", "nvfp4,mxfp4,fp8_channel"]
    assert bench_layer.main([*options, "--impls", "moe_ops", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/layer.json")
    errors = {row["scheme"]: row["rel_err"] for row in json.loads(path.read_text())["rows"]}
    assert errors["fp8_channel"] < 0.1 < errors["mxfp4"] < 0.3 and len(errors) == 3


def test_weights_as_a_layer_keeps_them(monkeypatch):
    """They are those of the plain case: same bytes, same result, same sampled reference."""
    problem = problems.Problem("small", 4, 2, 128, 64, timed=False)
    device = torch.device("cpu")
    experts = problems.make_experts(problem, "mxfp4_w4a16", device)
    inputs = problems.make_inputs(problem, 5, "uniform", device)
    assert experts.loaded is experts  # no kernel reads the packed form on a CPU
    monkeypatch.setattr(problems, "reads_packed", lambda *_, **__: True)
    del experts.__dict__["loaded"]
    loaded = experts.loaded
    assert loaded.w1.dtype == loaded.w2.dtype == torch.int32
    assert loaded.bytes_per_expert == experts.bytes_per_expert
    assert torch.equal(loaded.dense(1)[0], experts.dense(1)[0])
    names = ("moe_ops", bench_layer.PLAIN)
    packed, plain = (bench_layer.IMPLS[name](experts, inputs)() for name in names)
    assert torch.equal(packed, plain)
    monkeypatch.undo()
    unquantized = problems.make_experts(problem, "bf16", device)
    assert unquantized.loaded is unquantized

"""What a layer costs beside GPU time: how it is measured, recorded and reported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import bench_overheads as bench
import pytest
import report
import torch

import moe_ops
from moe_ops.bench import command, harness, problems

WARM = ["--model", "tiny", "--tokens", "1,3", "--measures", "warm"]


@pytest.fixture
def case(device):
    device = torch.device(device)
    experts = problems.make_experts(problems.TINY, "bf16", device)
    inputs = problems.make_inputs(problems.TINY, 3, "uniform", device)
    return bench.Case(problems.TINY, experts, inputs, "uniform")


def test_a_tiny_problem(capsys, tmp_path):
    assert bench.main([*WARM, "--impls", "moe_ops", "--output", str(tmp_path)]) == 0
    assert "peak_bytes" in capsys.readouterr().out
    (path,) = tmp_path.glob("*/overheads.json")
    record = json.loads(path.read_text())
    assert record["commit"] and record["command"]
    keys = [tuple(row[name] for name in bench.OVERHEAD_KEY) for row in record["rows"]]
    assert keys == [
        ("bf16", "tiny", m, "moe_ops", "uniform", measure)
        for m in (1, 3)
        for measure in ("host_us", "peak_bytes")
    ]
    for row in record["rows"]:
        if row["measure"] == "host_us":
            assert 0 < row["p10"] <= row["value"] <= row["p90"] and row["runs"] == 800
        else:
            assert row["value"] > 0


def test_quantized_layers(tmp_path):
    """This library only, each scheme with a row of its own in the record and in the report."""
    schemes = ["--scheme", "bf16,fp8_channel", "--output", str(tmp_path)]
    assert bench.main([*WARM, "--impls", "moe_ops", "--tokens", "2", *schemes]) == 0
    (path,) = tmp_path.glob("*/overheads.json")
    written = json.loads(path.read_text())
    rows = [row for row in written["rows"] if row["measure"] == "host_us"]
    assert [row["scheme"] for row in rows] == ["bf16", "fp8_channel"]
    text = report.overheads_report([written])
    assert "| tiny, fp8_channel | host time of a call (us) | 2 |" in text
    args = bench.options(["--scheme", "fp8_channel", "--model", "tiny", "--tokens", "1"])
    assert {measure for _, _, measure in bench.planned(args)} == {bench.warm_rows}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU writes")
def test_nothing_is_written_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args = bench.options([])
    assert args.output is None and [p.name for p in args.problems] == ["tiny"]
    monkeypatch.setattr(command, "write_rows", lambda *_: pytest.fail("written"))
    assert bench.main([*WARM, "--impls", "moe_ops"]) == 0


@pytest.mark.parametrize("option", ["--impls", "--model", "--measures"])
def test_unknown_names(capsys, option):
    with pytest.raises(SystemExit) as error:
        bench.main([option, "nothing"])
    assert error.value.code == 2 and "nothing" in capsys.readouterr().err


def test_memory_is_what_was_told(case):
    call = bench.MAKERS["moe_ops"](case.experts, case.inputs)
    call()
    row = bench.peak_memory(case, "moe_ops", call)
    told = moe_ops.workspace_nbytes(3, 64, 32, 8, 2, torch.bfloat16)
    assert row.config == {"workspace_nbytes": told}
    assert 3 * 64 * 2 <= row.value <= told
    kept = []
    row = bench.peak_memory(case, "peer", lambda: kept.append(case.inputs.x.new_empty(1 << 16)))
    assert row.value == 2 << 16 and row.config == {}


def test_host_times_are_of_calls_in_batches(case, monkeypatch):
    """Each call by itself, the wait for what it has enqueued not included."""
    clock, waits = [0.0], []

    def wait(_):
        clock[0] += 1000.0
        waits.append(len(calls))

    calls = []

    def call():
        calls.append(None)
        clock[0] += 1e-6 * (1 + (len(calls) - 1) % 10)

    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(bench, "_synchronize", wait)
    row = bench.host_time(case, "moe_ops", call)
    assert len(calls) == row.runs == bench.CALLS * bench.BATCHES
    assert waits == [bench.CALLS * n for n in range(bench.BATCHES + 1)]
    # The clock is at 1000s of seconds: a float64 there resolves tenths of microseconds.
    assert (row.value, row.p10, row.p90) == pytest.approx((5.5, 1.9, 9.1), abs=0.11)


@pytest.mark.slow
def test_a_cold_start(case, monkeypatch):
    """In a process of its own, whose caches are empty and gone afterwards."""
    seen = []
    run = subprocess.run

    def spy(command, env, **rest):
        seen.extend(Path(env[name]) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"))
        assert not any(path.exists() for path in seen)
        return run(command, env=env, **rest)

    monkeypatch.setattr(bench.subprocess, "run", spy)
    rows = list(bench.cold_rows(case, "moe_ops"))
    assert [row.measure for row in rows] == ["import_s", "first_call_s", "compile_s"]
    assert all((row.M, row.shape, row.impl) == (3, "tiny", "moe_ops") for row in rows)
    assert all(0 < row.value < bench.COLD_TIMEOUT_S for row in rows)
    assert len(seen) == 2 and not any(path.exists() for path in seen)


def test_cold_processes_find_the_peers():
    """In this process other modules have added them."""
    lost = "from cold_start import *; print(*MODULES.keys() - implementations())"
    paths = os.pathsep.join(
        str(Path(path).parent) for path in (bench.__file__, moe_ops.__path__[0])
    )
    done = subprocess.run(
        [sys.executable, "-c", lost],
        env={**os.environ, "PYTHONPATH": paths},
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    assert done.stdout.split() == []


def test_a_failure_costs_no_other_row(capsys, monkeypatch, tmp_path):
    def broken(experts, inputs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setitem(bench.MAKERS, "moe_ops-compiled", broken)
    impls = ["--impls", "moe_ops-compiled,moe_ops", "--tokens", "1"]
    assert bench.main([*WARM, *impls, "--output", str(tmp_path)]) == 1
    assert "failed: moe_ops-compiled tiny 1 warm_rows" in capsys.readouterr().err
    (path,) = tmp_path.glob("*/overheads.json")
    assert {row["impl"] for row in json.loads(path.read_text())["rows"]} == {"moe_ops"}


def test_the_time_budget(capsys, tmp_path):
    assert bench.main([*WARM, "--time-budget-s", "0", "--output", str(tmp_path)]) == 0
    assert "0 rows" in capsys.readouterr().out and not list(tmp_path.rglob("*"))


def overhead(measure, value, m=1, impl="moe_ops", shape="a", **rest):
    return bench.Overhead("bf16", shape, m, impl, "uniform", measure, value, **rest)


def test_records_merge_by_measure(monkeypatch, tmp_path):
    path = tmp_path / "overheads.json"
    for commit, row in (("1", ("host_us", 5.0)), ("1", ("import_s", 1.0)), ("2", ("host_us", 4.0))):
        header = {"gpu": "G", "commit": commit, "date": f"day {commit}", "command": "c"}
        monkeypatch.setattr(harness, "run_header", lambda header=header: header)
        harness.write_rows(path, [overhead(*row)], bench.OVERHEAD_KEY)
    record = json.loads(path.read_text())
    found = [(row["measure"], row["value"], row["commit"]) for row in record["rows"]]
    assert found == [("host_us", 4.0, "2"), ("import_s", 1.0, "1")]
    assert [part["commit"] for part in record["parts"]] == ["1", "2"]


HEADER = {"gpu": "G", "driver": "1", "torch": "2", "triton": "3", "date": "2026-01-02T03:04",
          "commit": "0123456789"}  # fmt: skip


def record():
    rows = [
        overhead("host_us", 41.26, p10=40.0, p90=123.4), overhead("host_us", 1.0, m=64),
        overhead("host_us", 250.0, impl="peer", p10=240.0, p90=260.0),
        overhead("peak_bytes", 3 << 20, m=64, config={"workspace_nbytes": 7 << 19}),
        overhead("peak_bytes", 9 << 19, m=64, impl="peer"), overhead("peak_bytes", 512),
        overhead("compile_s", 2.345), overhead("import_s", 0.5, impl="peer"),
        overhead("first_call_s", 1.0, shape="b", impl="moe_ops-compiled"),
    ]  # fmt: skip
    return {**HEADER, "rows": [vars(row) for row in rows]}


def test_report():
    text = report.overheads_report([record()])
    assert "G, driver 1, torch 2, Triton 3; commit 0123456; 2026-01-02." in text
    assert text.endswith(
        "| shape |  | tokens | moe_ops | moe_ops-compiled | peer |\n"
        "| --- | --- | --: | --: | --: | --: |\n"
        "| a | host time of a call (us) | 1 | 41.3 (40.0-123) | - | 250 (240-260) |\n"
        "|  | peak memory (MiB) | 64 | 3.00 | - | 4.50 |\n"
        "|  | `workspace_nbytes` (MiB) | 64 | 3.50 | - | - |\n"
        "|  | import (s) | 1 | - | - | 0.50 |\n"
        "|  | torch.compile (s) | 1 | 2.35 | - | - |\n"
        "| b | first call (s) | 1 | - | 1.00 | - |"
    )


def test_the_report_prints_every_table(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--results", str(tmp_path)])
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "layer.json").write_text(json.dumps({**HEADER, "rows": []}))
    (tmp_path / "g" / "overheads.json").write_text(json.dumps(record()))
    report.main()
    assert report.overheads_report([record()]) in capsys.readouterr().out


def test_cost_of_batch_invariance():
    def row(impl, m, time_us, scheme="bf16"):
        key = {"scheme": scheme, "shape": "a", "M": m, "routing": "uniform", "impl": impl}
        return {**key, "time_us": time_us, "floor_us": None}

    default = [row("moe_ops", m, 100.0) for m in (1, 8)] + [row("peer", 8, 50.0)]
    without = report.report([{**HEADER, "rows": default}])
    assert "batch invariance" not in without
    extra = [row(report.INVARIANT, 8, 40.0), row(report.INVARIANT, 64, 7.0, "fp8_channel")]
    text = report.report([{**HEADER, "rows": [*default, *extra]}])
    assert text.startswith(without), "it is no peer"
    assert text.endswith(
        "| scheme | shape | 8 | 64 |\n| --- | --- | --: | --: |\n"
        "| `bf16` | a | 40.0 (0.40) | - |\n| `fp8_channel` | a | - | 7.0 |"
    )

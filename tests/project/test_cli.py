"""The command line: exit codes, names, and output that programs can read."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command_line import exit_code

import moe_ops
from moe_ops import cli
from moe_ops.dispatch import tuned

ROOT = Path(__file__).parents[2]
TINY = ["bench", "--model", "tiny", "--impls", "moe_ops"]


def test_module_runs_and_help_lists_what_there_is():
    run = subprocess.run(
        [sys.executable, "-m", "moe_ops", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    listed = re.findall(r"^    (\w+) ", run.stdout, re.MULTILINE)
    assert listed == list(cli.COMMANDS) and "bench" in listed


@pytest.mark.parametrize("arguments", [[], ["train"], ["--json"]])
def test_no_such_command(arguments, capsys):
    assert exit_code(arguments) == 2
    error = capsys.readouterr().err
    assert arguments != ["train"] or all(f"'{name}'" in error for name in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    assert exit_code([command, "--help"]) == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option, value, known",
    [
        ("--model", "qwen4-1b", ["tiny", "mixtral", "qwen3-30b-a3b", "kimi-k2"]),
        ("--model", "tiny,qwen4-1b", ["qwen4-1b", "deepseek-r1"]),
        ("--scheme", "fp7", ["bf16", "unquantized"]),
        ("--impls", "mine", ["moe_ops", "hf-grouped_mm", "vllm-triton"]),
        ("--routing", "even", ["uniform", "zipf"]),
        ("--device", "sm_10", ["choose from"]),
        ("--tokens", "1,many", ["positive integer"]),
        ("--tokens", "0", ["positive integer"]),
        ("--tokens", "", ["nothing given"]),
    ],
)
def test_unknown_values(option, value, known, capsys):
    assert exit_code(["bench", option, value]) == 2
    error = capsys.readouterr().err
    assert option in error
    for name in known:
        assert name in error


@pytest.mark.parametrize(
    "option, value, known",
    [
        ("--model", "qwen4-1b", ["tiny", "mixtral", "qwen3-30b-a3b", "kimi-k2"]),
        ("--scheme", "fp7", ["unquantized", "fp8_block128", "int4_w4a16_g128"]),
        ("--device", "sm_10", ["cpu", "sm_80", "sm_90", "sm_120"]),
        ("--tokens", "1,many", ["positive integer"]),
        ("--tokens", "0", ["positive integer"]),
        ("--format", "sparse", ["standard", "batched"]),
        ("--format", "batched", ["--max-num-tokens"]),
        ("--max-num-tokens", "8", ["--format batched"]),
        ("--max-num-tokens", "0", ["positive integer"]),
        ("--activation", "selu", ["silu", "relu2_no_mul"]),
        ("--activation", "situ", ["needs beta"]),
        ("--ranks", "0", ["positive integer"]),
        ("--ranks", "9", ["at most the 8 experts, got 9"]),
        ("--backend", "pplx", ["allgather_reducescatter", "fixed_capacity", "alltoall"]),
        ("--link", "nvlink9", ["nvlink4", "ndr400"]),
        ("--link-gbps", "-1", ["positive number"]),
        ("--link-gbps", "fast", ["positive number"]),
    ],
)
def test_explain_unknown_values(option, value, known, capsys):
    assert exit_code(["explain", "--model", "tiny", option, value]) == 2
    error = capsys.readouterr().err
    assert option in error
    for name in known:
        assert name in error


def test_explain_prints_a_table(capsys, monkeypatch):
    monkeypatch.setattr(tuned, "TABLES", tuned.tables([]))
    arguments = "--model qwen3-30b-a3b --scheme fp8_block128 --device sm_90 --tokens 1,64"
    assert exit_code(["explain", *arguments.split()]) == 0
    printed = capsys.readouterr().out
    for part in ("TritonExperts", "chosen", "MoEPrepareAndFinalizeNoEP", "analytic default"):
        assert part in printed
    lines = [line.split() for line in printed.splitlines()]
    assert [line[0] for line in lines if line and line[0] in ("1", "64")] == ["1", "64"]


def test_explain_json(capsys):
    arguments = "--model nemotron-3-nano --scheme bf16 --device sm_100 --tokens 8 --json"
    batched = "--format batched --max-num-tokens 256 --activation relu2_no_mul"
    assert exit_code(["explain", *arguments.split(), *batched.split()]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["scheme"], record["device"]) == ("unquantized", "sm_100")
    assert record["choice"] == "BatchedTritonExperts"
    assert record["config"]["max_num_tokens"] == 256 and not record["config"]["is_act_and_mul"]
    (cost,) = record["costs"]
    assert cost["num_tokens"] == 8 and cost["gemm1"]["block_m"] == 128


def test_explain_many_ranks(capsys):
    arguments = "--model qwen3-30b-a3b --device sm_90 --ranks 8 --tokens 64 --json"
    ways = []
    for more in ("--backend fixed_capacity", "--link-gbps 23.5", "--link ndr400 --link-gbps 23.5"):
        assert exit_code(["explain", *arguments.split(), *more.split()]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["config"]["num_local_experts"] == 16
        ways.append(record["exchanges"][0]["ways"])
        exchange = record["prepare_finalize"]
        assert exchange.startswith("Fixed" if "backend" in more else "AllGather")
    sent = ways[0][0]["dispatch_bytes"] + ways[0][0]["combine_bytes"]
    times = [way[0]["time_us"] for way in ways]
    assert times == pytest.approx([26.1 + sent / 235e3, 26.1 + sent / 23.5e3, sent / 23.5e3])
    assert [way[3]["time_us"] is None for way in ways] == [False, False, True]
    assert record["link"]["name"] == "ndr400 at 23.5 GB/s"


def test_explain_of_batch_invariant_mode(capsys):
    arguments = "--model tiny --device sm_90 --tokens 1,4096 --batch-invariant"
    assert exit_code(["explain", *arguments.split()]) == 0
    printed = capsys.readouterr().out
    assert "bfloat16, batch-invariant" in printed and printed.count("64x128x64 /8 /4") == 2
    assert exit_code(["explain", *arguments.split(), "--scheme", "int8_tensor"]) == 1
    assert "one scale for all tokens" in capsys.readouterr().out


def test_explain_where_nothing_serves(capsys):
    arguments = "--model tiny --scheme fp8_channel --device sm_80"
    assert exit_code(["explain", *arguments.split()]) == 1
    printed = capsys.readouterr().out
    assert "no implementation serves this" in printed
    assert "TritonExperts" in printed and "current device sm_80" in printed


def test_explain_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None; from moe_ops.cli import main;"
        "sys.exit(main('explain --model tiny --scheme mxfp4_w4a16 --device sm_90'.split()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert "mxfp4_w4a16 on sm_90" in run.stdout


def test_json(capsys, tmp_path):
    arguments = ["--tokens", "1,3", "--scheme", "unquantized", "--json", "--output", str(tmp_path)]
    assert exit_code([*TINY, *arguments]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    keys = [(r["scheme"], r["shape"], r["M"], r["impl"], r["routing"]) for r in record["rows"]]
    assert keys == [("bf16", "tiny", m, "moe_ops", "uniform") for m in (1, 3)]
    assert all(0 < r["p10_us"] <= r["time_us"] <= r["p90_us"] for r in record["rows"])
    assert "time_us" in captured.err, "the table goes to stderr"
    (written,) = tmp_path.glob("*/layer.json")
    assert [row["M"] for row in json.loads(written.read_text())["rows"]] == [1, 3]


def test_profile_json(capsys, tmp_path):
    arguments = ["--tokens", "2", "--profile", "--json", "--output", str(tmp_path)]
    assert exit_code([*TINY, *arguments]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert {"align", "expert_gemm", "weight_and_reduce"} <= {s["stage"] for s in row["stages"]}
    assert [path.name for path in tmp_path.glob("*/*.json")] == ["profile.json"]


def test_bench_of_batch_invariant_mode(capsys, tmp_path):
    """Beside the default, by name only; a scheme that cannot be so fails."""
    both = [*TINY, "--tokens", "2", "--json", "--impls", "moe_ops,moe_ops-invariant"]
    both += ["--output", str(tmp_path)]  # on a GPU, records would be written to otherwise
    assert exit_code([*both, "--scheme", "fp8_channel"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["impl"] for row in rows] == ["moe_ops", "moe_ops-invariant"]
    assert rows[0]["rel_err"] > 0 and rows[1]["rel_err"] > 0
    assert exit_code([*both, "--scheme", "fp8_tensor"]) == 1
    assert "failed: moe_ops-invariant fp8_tensor tiny 2" in capsys.readouterr().err


def test_a_wrong_result_fails_and_is_not_recorded(capsys, monkeypatch, tmp_path):
    exit_code(["bench", "--help"])  # its modules can be imported from here on
    layer = sys.modules["moe_ops.bench.layer"]
    wrong = {"moe_ops": lambda experts, inputs: lambda: inputs.x + 1}
    monkeypatch.setattr(layer, "IMPLS", wrong)
    assert exit_code([*TINY, "--tokens", "2", "--output", str(tmp_path)]) == 1
    assert "failed: moe_ops bf16 tiny 2 uniform" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


def test_the_demo_needs_the_repository(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    assert exit_code(["demo"]) == 2
    assert "clone of the moe_ops repository" in capsys.readouterr().err
    assert exit_code(["demo", "--help"]) == 0
    assert "clone of the moe_ops repository" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, meant",
    [
        ("explain --model qwen3-30", "qwen3-30b"),
        ("bench --model mixtrall", "mixtral"),
        ("tune --model deepseek_v33", "deepseek-v3"),
        ("explain --model tiny --device sm_9", None),
        ("tune --model tiny --device sm_91", "sm_90"),
        ("bench --scheme fp8_chanel", "fp8_channel"),
    ],
)
def test_did_you_mean(arguments, meant, capsys):
    assert exit_code(arguments.split()) == 2
    error = capsys.readouterr().err
    assert meant is None or f"did you mean '{meant}'?" in error


def test_version(capsys):
    assert exit_code(["--version"]) == 0
    assert capsys.readouterr().out == f"moe_ops {moe_ops.__version__}\n"


IN_A_WHEEL = """
import contextlib, io, json, sys
import moe_ops
from moe_ops.cli import main

said = {"file": moe_ops.__file__}
for line in sys.stdin.read().splitlines():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(line.split())
        except SystemExit as left:
            code = left.code
    said[line] = (code, out.getvalue(), err.getvalue())
print(json.dumps(said))
"""
INSTALLED = {
    "--version": 0,
    "--help": 0,
    **{f"{name} --help": 0 for name in cli.COMMANDS},
    "explain --model Qwen/Qwen3-30B-A3B --scheme fp8_block128 --device sm_90 --json": 0,
    "explain --model qwen4-1b": 2,
    "tune --model qwen3-30b --scheme fp8_channel --device sm_90 --tokens 1 --dry-run": 0,
    "bench --model tiny --tokens 1 --impls moe_ops": 0,
    "demo": 2,
}


def test_an_installed_package_runs_every_command(tmp_path):
    """From a wheel, in a folder that is no checkout."""
    source, wheel, away = tmp_path / "source", tmp_path / "wheel", tmp_path / "away"
    away.mkdir()
    shutil.copytree(ROOT / "moe_ops", source / "moe_ops", ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = (
        "import os, sys; from setuptools import build_meta;"
        "os.chdir(sys.argv[1]); os.makedirs(sys.argv[2]); build_meta.build_wheel(sys.argv[2])"
    )
    command = [sys.executable, "-c", build, str(source), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    (archive,) = wheel.glob("*.whl")
    zipfile.ZipFile(archive).extractall(wheel)
    environment = {**os.environ, "PYTHONPATH": str(wheel), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-c", IN_A_WHEEL],
        input="\n".join(INSTALLED),
        capture_output=True,
        text=True,
        cwd=away,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert said.pop("file") == str(wheel / "moe_ops" / "__init__.py")
    assert {line: code for line, (code, *_) in said.items()} == INSTALLED, said
    assert not list(away.iterdir()), "nothing is written"


def test_demo_wants_a_folder_that_it_can_read(capsys, tmp_path):
    pytest.importorskip("transformers")
    assert exit_code(["demo", "--model", str(tmp_path)]) == 2
    assert "--model must be a folder with config.json, got" in capsys.readouterr().err


def test_demo_gets_its_arguments_and_gives_its_exit_status(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "examples").mkdir()
    script = tmp_path / "examples" / "demo.py"
    script.write_text("import sys\nsys.exit(len(sys.argv))\n")
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    before = sys.argv
    assert exit_code(["demo", "--prompt", "x"]) == 3
    assert sys.argv is before

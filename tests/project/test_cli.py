"""The command line: exit codes, names, and output that programs can read."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import exit_code
from processes import python

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


def test_ctrl_c_is_told_in_a_line(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "tune", cli.COMMANDS["tune"]._replace(run=interrupted))
    assert cli.main(["tune", "--dry-run"]) == 130
    assert capsys.readouterr().err == "python -m moe_ops tune: interrupted\n"


def test_a_closed_pipe_is_told_in_a_line():
    """Also if the output is so short that it is written when the command has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "moe_ops", "explain", "--model", "tiny", "--tokens", "1"]
    buffered = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    run = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=buffered
    )
    os.close(writer)
    assert run.returncode == 141
    assert run.stderr == "python -m moe_ops explain: [Errno 32] Broken pipe\n"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    assert exit_code([command, "--help"]) == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option, value, known",
    [
        ("--model", "qwen4-1b", ["tiny", "mixtral", "qwen3-30b-a3b", "kimi-k2"]),
        ("--model", "tiny,qwen4-1b", ["qwen4-1b", "deepseek-r1"]),
        ("--scheme", "fp7", ["fp8_channel", "unquantized"]),
        ("--impls", "mine", ["moe_ops", "moe_ops-invariant"]),
        ("--routing", "even", ["uniform", "zipf"]),
        ("--device", "sm_10", ["sm_90", "h100"]),
        ("--device", "b200", ["device must be that of this machine", "got 'b200'"]),
        ("--time-budget-s", "-1", ["at least 0, got '-1'"]),
        ("--time-budget-s", "nan", ["at least 0, got 'nan'"]),
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
        ("--tokens", "9999999999", ["at most 2147483647, got 9999999999"]),
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


def test_explain_reads_every_option_or_refuses_it(capsys):
    for options, why in {
        "--link-gbps 23.5": "--link-gbps must come with --ranks",
        "--backend=symmetric": "--backend must come with --ranks",
        "--host-gbps 9": "--host-gbps must come with --resident",
        "--resident 2 --ranks 2": "--resident must come without --ranks",
    }.items():
        assert exit_code(["explain", "--model", "tiny", *options.split()]) == 2
        assert why in capsys.readouterr().err


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
    names = {"--backend symmetric": "Symmetric", "--backend fixed_capacity": "Fixed"}
    ways = []
    for more in (*names, "--link-gbps 23.5", "--link ndr400 --link-gbps 23.5"):
        assert exit_code(["explain", *arguments.split(), *more.split()]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["config"]["num_local_experts"] == 16
        ways.append(record["exchanges"][0]["ways"])
        exchange = record["prepare_finalize"]
        assert exchange.startswith(names.get(more, "AllGather"))
    same, *ways = ways
    assert same == ways[0], "prices of all ways, whatever the layer's is"
    sent = ways[0][0]["dispatch_bytes"] + ways[0][0]["combine_bytes"]
    times = [way[0]["time_us"] for way in ways]
    assert times == pytest.approx([26.1 + sent / 235e3, 26.1 + sent / 23.5e3, sent / 23.5e3])
    assert [way[3]["time_us"] is None for way in ways] == [False, False, True]
    assert record["link"]["name"] == "ndr400 at 23.5 GB/s"


def test_explain_of_batch_invariant_mode(capsys):
    arguments = "--model qwen3-30b --device sm_90 --tokens 1,4096 --batch-invariant"
    assert exit_code(["explain", *arguments.split()]) == 0
    printed = capsys.readouterr().out
    assert "bfloat16, batch-invariant" in printed and "hopper_fetch" in printed
    assert "hopper_token_sum: the GEMM must not be batch-invariant" in printed
    assert exit_code(["explain", *arguments.split(), "--scheme", "int8_tensor"]) == 1
    assert "one scale for all tokens" in capsys.readouterr().out


def test_explain_where_nothing_serves(capsys):
    arguments = "--model tiny --scheme fp8_channel --device sm_80"
    assert exit_code(["explain", *arguments.split()]) == 1
    printed = capsys.readouterr().out
    assert "no implementation serves this" in printed
    assert "TritonExperts" in printed and "current device sm_80" in printed


def test_explain_names_gpus(capsys):
    """A GPU has a short and a full name; an architecture stands for one of its GPUs."""
    found = {}
    for name in ("h100", "H200", "NVIDIA H200", "sm_90", "b200"):
        assert exit_code(["explain", "--model", "tiny", "--device", name, "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        found[name] = (record["device"], record["gpu"])
    h200 = ("sm_90", "NVIDIA H200")
    assert found == {
        "h100": ("sm_90", "NVIDIA H100 80GB HBM3"), "H200": h200, "NVIDIA H200": h200,
        "sm_90": h200, "b200": ("sm_100", "NVIDIA B200"),
    }  # fmt: skip


def test_explain_says_that_references_run_on_a_cpu(capsys):
    assert exit_code(["explain", "--model", "tiny", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("no kernel runs on a CPU: the references run") and "h100" in lines[1]


def test_help_lists_schemes_and_has_examples(capsys):
    wrong = []
    for command in cli.COMMANDS:
        assert exit_code([command, "--help"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        wrong += [] if "examples:" in text else [command]
        if command in ("bench", "explain", "tune"):
            wrong += [(command, name) for name in moe_ops.SCHEMES if name not in text]
        if command == "bench":  # what other modules do, whose help this is not
            wrong += [name for name in ("--ranks 2", "--resident 0.5") if name not in text]
    assert not wrong


def test_explain_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None; from moe_ops.cli import main;"
        "sys.exit(main('explain --model tiny --scheme mxfp4_w4a16 --device sm_90'.split()))"
    )
    run = python(code)
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
    assert {"align", "expert_product", "weight_and_reduce"} <= {s["stage"] for s in row["stages"]}
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


def test_the_demo_needs_transformers(capsys, monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert exit_code(["demo"]) == 2
    assert "pip install 'torch-moe-ops[transformers]'" in capsys.readouterr().err
    assert exit_code(["demo", "--help"]) == 0
    assert "torch-moe-ops[transformers]" in capsys.readouterr().out


SIZES = "--sizes 16,4,128,96"


@pytest.mark.parametrize("given", ["", "--model tiny --sizes 8,2,64,32", "--model tiny --config x"])
@pytest.mark.parametrize("command", ["explain", "tune"])
def test_one_layer_is_asked_for(command, given, capsys):
    assert exit_code([command, *given.split()]) == 2
    error = capsys.readouterr().err
    assert "--config" in error and (
        "required" in error or "must be" in error or "not allowed" in error
    )


@pytest.mark.parametrize(
    "given, says",
    [
        ("--sizes 8,2,64", "four positive integers E,k,H,I, got '8,2,64'"),
        ("--sizes 8,0,64,32", "four positive integers"),
        ("--sizes 8,2,64,-1", "four positive integers"),
        ("--sizes 8,9,64,32", "at most the 8 experts, got 9"),
        ("--sizes 8,2,64,9999999999", "intermediate_size must be at most 2147483647"),
        ("--sizes 8,2,9999999999,64", "hidden_size must be at most 2147483647"),
        ("--sizes 9999,2,64,64", "num_experts must be in 1..4096, got 9999"),
        ("--config nowhere.json", "got 'nowhere.json'"),
    ],
)
@pytest.mark.parametrize("command", ["explain", "tune", "bench"])
def test_layers_that_cannot_be(command, given, says, capsys):
    assert exit_code([command, *given.split()]) == 2
    error = capsys.readouterr().err
    assert given.split()[0] in error and says in error


@pytest.fixture
def quantized_model(tmp_path):
    """The folder of a model without a gate whose configuration says int4."""
    config = {
        "num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 128,
        "moe_intermediate_size": 96, "mlp_hidden_act": "relu2",
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_explain_of_sizes_and_of_a_configuration(capsys, quantized_model):
    def explained(*arguments):
        assert exit_code(["explain", "--json", "--device", "sm_90", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    sizes, config = explained(*SIZES.split()), explained("--config", quantized_model)
    names = ("num_experts", "experts_per_token", "hidden_dim", "intermediate_size")
    for record in (sizes, config):
        assert [record["config"][name] for name in names] == [16, 4, 128, 96]
    assert sizes["scheme"] == "unquantized" and sizes["config"]["activation"] == "silu"
    assert len(sizes["costs"][0]["kernels"]) == 2
    assert config["scheme"] == "int4_w4a16_g32"
    assert config["config"]["activation"] == "relu2_no_mul"
    assert not config["config"]["is_act_and_mul"]
    given = ("--scheme", "bf16", "--activation", "gelu")
    other = explained("--config", quantized_model, *given)
    assert (other["scheme"], other["config"]["activation"]) == ("unquantized", "gelu")


def test_tune_of_sizes_and_of_a_configuration(capsys, quantized_model):
    command = ["tune", "--device", "sm_90", "--tokens", "2", "--dry-run"]
    assert exit_code([*command, *SIZES.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert exit_code([*command, "--config", quantized_model]) == 2
    assert "must have a gate, got relu2_no_mul" in capsys.readouterr().err


def test_bench_of_sizes_and_of_a_configuration(capsys, quantized_model, tmp_path):
    command = ["bench", "--tokens", "2", "--impls", "moe_ops", "--json", "--output"]
    command.append(str(tmp_path / "out"))  # on a GPU, records would be written to otherwise
    assert exit_code([*command, *SIZES.split()]) == 0
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out)["rows"]
    assert (row["shape"], row["scheme"]) == ("E16-k4-H128-I96", "bf16")
    assert "making the weights of E16-k4-H128-I96" in captured.err
    assert exit_code([*command, "--config", quantized_model]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["shape"] == Path(quantized_model).name and row["scheme"] == "int4_w4a16_g32"


def test_bench_of_many_ranks_needs_the_gpus(capsys):
    assert exit_code(["bench", "--ranks", "99", "--scheme", "fp7"]) == 2
    assert "scheme must be one of" in capsys.readouterr().err
    assert exit_code(["bench", "--ranks", "99", *SIZES.split()]) == 2
    assert "--ranks 99 needs as many GPUs" in capsys.readouterr().err


def test_bench_checks_its_folder_before_the_first_case(capsys):
    command = ["bench", *SIZES.split(), "--output", "/dev/null/records"]
    assert exit_code(command) == 2
    assert "--output: the folder must be writable, got /dev/null" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, meant",
    [
        ("explain --model qwen3-30", "qwen3-30b"),
        ("bench --model mixtrall", "mixtral"),
        ("tune --model deepseek_v33", "deepseek-v3"),
        ("explain --model tiny --device sm_9", None),
        ("tune --model tiny --device sm_91", "sm_90"),
        ("bench --scheme fp8_chanel", "fp8_channel"),
        ("bench --scheme fp8", "fp8_channel"),
        ("explain --model tiny --scheme fp8", "fp8_channel"),
        ("explain --model tiny --scheme int8", "int8_channel"),
        ("explain --model tiny --scheme fp16", "unquantized"),
        ("explain --model tiny --scheme nvf", "nvfp4"),
        ("explain --model tiny --activation swiglu", "silu"),
        ("explain --model tiny --activation geglu", "gelu"),
        ("explain --model tiny --device h10", "h100"),
        ("explain --model deepseek", "deepseek-v3"),
    ],
)
def test_did_you_mean(arguments, meant, capsys):
    assert exit_code(arguments.split()) == 2
    error = capsys.readouterr().err
    assert meant is None or f"did you mean '{meant}'?" in error


def test_version(capsys):
    assert exit_code(["--version"]) == 0
    assert capsys.readouterr().out == f"moe_ops {moe_ops.__version__}\n"


def test_demo_wants_a_folder_that_it_can_read(capsys, tmp_path):
    pytest.importorskip("transformers")
    assert exit_code(["demo", "--model", str(tmp_path)]) == 2
    assert "--model must be a folder with config.json, got" in capsys.readouterr().err


def test_demo_gets_its_arguments(capsys):
    pytest.importorskip("transformers")
    before = sys.argv
    assert exit_code(["demo", "--help"]) == 0
    assert f"usage: {cli.PROGRAM} demo" in capsys.readouterr().out
    assert sys.argv is before

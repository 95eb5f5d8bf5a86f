"""The benchmark of served models: checkpoints, comparisons, engines in processes, the report."""

import json
import math
import sys
from importlib import import_module

import pytest
import served_report as report
import torch
from continuations import Written, compare
from table_items import every_row

import moe_ops

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
models = import_module("served_models")
served = import_module("served_vllm")

HIDDEN, INNER, EXPERTS = 256, 128, 8
SMALL = {
    "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 4,
    "num_key_value_heads": 4, "moe_intermediate_size": INNER, "n_group": 1, "topk_group": 1,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS,
}  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """Models with few and narrow experts."""
    for name, spec in models.MODELS.items():
        sizes = {key: SMALL.get(key, size) for key, size in spec.sizes.items()}
        monkeypatch.setitem(models.MODELS, name, spec._replace(sizes=sizes))


# Checkpoints


def checkpoint(folder, case):
    """Write a checkpoint of two layers, and return its configuration."""
    built = models.shell(case.model, 2)
    made = {name: x.contiguous() for name, x in models.tensors(built, case.scheme)}
    safetensors.save_file(made, folder / "model.safetensors")
    config = models.described(built, case.scheme)
    (folder / "config.json").write_text(json.dumps(config))
    return config


def dense(layer, name):
    """A weight of a layer as numbers."""
    fields = ("weight", "weight_scale", "weight_zero_point", "weight_scale_2")
    held = [getattr(layer, f"{name}_{field}") for field in fields]
    if layer.scheme is None or layer.scheme.name == "unquantized":
        return held[0].float()
    return moe_ops.dequantize_weight(moe_ops.QTensor(*held), layer.scheme).float()


@every_row("case", served.CASES)
def test_checkpoints_load(small, tmp_path_factory, case):
    """This library reads every checkpoint by the names and formats that publishers use."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = checkpoint(folder, case)
    gpt_oss = case.model == "gpt-oss-120b"
    layer = moe_ops.FusedMoE(
        EXPERTS, 2, HIDDEN, INNER, activation="swigluoai" if gpt_oss else "silu", has_bias=gpt_oss,
        scheme=None if case.scheme == "bf16" else case.scheme,
    )  # fmt: skip
    block, _ = models.PROJECTIONS.get(config["model_type"], ("mlp", ()))
    prefix = f"model.layers.1.{block}.experts"
    moe_ops.load_checkpoint(layer, folder, prefix=prefix, progress=False)
    for name, columns in (("w13", HIDDEN), ("w2", INNER)):
        weight = dense(layer, name)
        assert weight.shape[2] == columns
        spread = weight.std() * math.sqrt(columns)
        if gpt_oss and name == "w2":
            spread *= models.CALM
        assert 0.65 < spread < 1.5, f"about 1 / sqrt(columns), got {spread} times that"
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "static"}}))  # fmt: skip
    with pytest.raises(ValueError):
        moe_ops.load_checkpoint(layer, folder, prefix=prefix, progress=False)


@every_row("case", served.CASES)
def test_what_is_quantized(small, case):
    """Experts alone: the configuration names all other linear layers; equal calls, equal bits."""
    built = models.shell(case.model, 2)
    first, again = (dict(models.tensors(built, case.scheme)) for _ in range(2))
    assert all(torch.equal(first[name].float(), again[name].float()) for name in first)
    assert list(first) == list(again)
    config = models.described(built, case.scheme)
    quantized = config.get("quantization_config", {})
    biased = any("e_score_correction_bias" in name for name in first)
    assert biased == (config.get("topk_method") == "noaux_tc"), "vLLM reads the bias with it alone"
    left_out = quantized.get("ignore") or quantized.get("modules_to_not_convert") or ()
    plain = {name.removesuffix(".weight") for name in first
             if "_proj.weight" in name and ".experts." not in name}  # fmt: skip
    if case.scheme not in ("bf16", "mxfp4_w4a16"):
        assert plain | {"lm_head", "model.layers.1.mlp.gate"} <= set(left_out)
    assert all(first[f"{name}.weight"].dtype == torch.bfloat16 for name in plain)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-120b"])
def test_adapters_fit_the_matrices(small, model):
    """Each matrix of a checkpoint's experts has both factors, which differ between adapters."""
    built = models.shell(model, 2)
    if model == "gpt-oss-120b":
        with pytest.raises(ValueError, match="adapters are made for .*got 'gpt_oss'"):
            models.adapter(built, 1)
        return
    first, second = (models.adapter(built, number) for number in (1, 2))
    weights = {name: x for name, x in models.tensors(built, "bf16") if ".experts." in name}
    assert len(first) == 2 * len(weights)
    for name, weight in weights.items():
        place = "base_model.model." + name.removesuffix(".weight")
        a, b = (first[f"{place}.lora_{which}.weight"] for which in "AB")
        assert (b @ a).shape == weight.shape and a.shape[0] == models.RANK
        assert not torch.equal(a, second[f"{place}.lora_A.weight"])


# Comparisons


def written(tokens, *best):
    return Written([tokens], [list(best)])


def test_continuations_are_compared():
    """Up to where they part; a near tie is no further apart than the engines are elsewhere."""
    first, shifted = {1: -0.5, 2: -1.0}, {1: -0.6, 2: -1.05}
    theirs = written([1, 2, 3], first, {2: -0.30, 7: -0.35}, {3: 0.0, 4: -9.0})
    ours = written([1, 7, 9], shifted, {7: -0.31, 2: -0.42}, {9: 0.0, 4: -9.0})
    found = compare(theirs, ours)
    assert found.equal == 1 and found.apart == pytest.approx(0.1)
    (parting,) = found.partings
    assert parting.position == 1 and parting.tokens == (2, 7)
    assert parting.gap == pytest.approx(0.05) and found.ties() == [True]
    kept = found.as_json()
    assert kept["near_ties"] == [True] and kept["partings"][0]["gap"] == pytest.approx(0.05)
    clear = compare(
        written([1, 2], first, {2: -0.1, 7: -0.4}), written([1, 7], shifted, {7: -0.1, 2: -0.3})
    )
    assert clear.ties() == [False] and clear.partings[0].gap == pytest.approx(0.2)
    # Both tokens are among the best of no engine, or of one alone.
    neither, both = ({2: -0.1, 3: -0.1}, {7: -0.1, 4: -0.1}), {2: -0.1, 7: -0.1}
    for first, second in (neither, (both, neither[1]), (neither[0], both)):
        unlisted = compare(written([2], first), written([7], second))
        assert unlisted.ties() == [False] and unlisted.as_json()["partings"][0]["gap"] is None
    assert compare(ours, ours).as_json() == {
        "equal": 3, "apart": 0.0, "near_ties": [], "partings": [],
    }  # fmt: skip


# Engines

STAND_IN = """
import json, os, sys
ours = os.environ["MOE_OPS_VLLM"] == "1"
print("a line of the log")
spent = iter([9.0, 1.0, 4.0, 2.0, 5.0, 9.0] * 9)
for line in sys.stdin:
    verb, arguments = json.loads(line)
    reply = None
    if verb == "start":
        if arguments["case"]["model"] == "mixtral-8x7b" and not ours:
            print('REPLY {"error": "ValueError: no"}', flush=True)
            continue
        if arguments["case"]["model"] == "deepseek-v3":
            sys.exit(3)
        assert arguments["adapters"] in (0, 2) and arguments["options"]["max_num_seqs"] == 64
        reply = {"start_s": 1.5, "experts": ["Ours" if ours else "Theirs"], "vllm": "0.33.0"}
    elif verb == "write":
        reply = {"tokens": [[1, 2]], "best": [[{"1": -0.5}, {"2": -0.5}]]}
    elif verb == "time":
        slow = not ours or os.environ.get("VLLM_DP_RANK") == "1"
        reply = next(spent) * (1 + slow)
    elif verb == "busy":
        reply = (0.5 + arguments["new"] / 64) * (1 if ours else 2)
    print("REPLY " + json.dumps({"reply": reply}), flush=True)
"""


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Engines without vLLM."""
    script, run = tmp_path / "engine.py", served.subprocess.Popen
    script.write_text(STAND_IN)
    monkeypatch.setattr(
        served.subprocess, "Popen", lambda command, **more: run([sys.executable, script], **more)
    )
    return tmp_path


def record(folder, *arguments):
    where = ("--output", str(folder), "--logs", str(folder / "logs"))
    status = served.main([*where, "--new", "4", "--batches", "2", "--prefill", "1024", *arguments])
    found = [*folder.glob("*/served_vllm.json")]
    return status, json.loads(found[0].read_text())["rows"] if found else []


def test_engines_take_turns(stand_in):
    status, rows = record(stand_in, "--cases", "qwen3-30b-a3b:bf16", "--layers", "3",
                          "--adapters", "2")  # fmt: skip
    assert status == 0
    speeds = {(row["phase"], row["M"], row["impl"]): row["tokens_per_s"] for row in rows}
    assert speeds == {
        ("decode", 2, "moe_ops"): 2.0, ("decode", 2, "vllm"): 1.0,
        ("prefill", 1024, "moe_ops"): 256.0, ("prefill", 1024, "vllm"): 128.0,
    }  # fmt: skip
    assert {(row["layers"], row["gpus"], row["adapters"]) for row in rows} == {(3, 1, 2)}
    steps = {(row["phase"], row["impl"]): row["step_s"] for row in rows}
    assert steps == {
        ("decode", "moe_ops"): 1 / 64, ("decode", "vllm"): 1 / 32,
        ("prefill", "moe_ops"): 33 / 64, ("prefill", "vllm"): 33 / 32,
    }  # fmt: skip
    assert [row["compared"] and row["compared"]["equal"] for row in rows] == [2, None, 2, None]
    for impl in ("moe_ops", "vllm"):
        assert (stand_in / "logs" / f"{impl}.log").read_text() == "a line of the log\n"


def test_ranks_have_sequences_of_their_own(stand_in):
    """All ranks are asked; the slowest one's time counts, and the tokens of all."""
    data = ("--gpus", "2", "--parallel", "data", "--impls", "moe_ops")
    status, rows = record(stand_in, "--cases", "qwen3-30b-a3b:bf16", *data)
    assert status == 0
    speeds = {row["phase"]: row["tokens_per_s"] for row in rows}
    assert speeds == {"decode": 2 * 2 * 4 / 8, "prefill": 2 * 1024 / 8}
    assert {(row["gpus"], row["parallel"], row["compared"]) for row in rows} == {(2, "data", None)}
    assert (stand_in / "logs/moe_ops.log").read_text() == 2 * "a line of the log\n"
    for wrong in (("--parallel", "data"), ("--adapters", "-1")):
        with pytest.raises(SystemExit):
            served.options(wrong)


def test_ranks_that_fail_answer_the_next_question(stand_in):
    data = ("--gpus", "2", "--parallel", "data", "--impls", "vllm")
    status, rows = record(stand_in, "--cases", "mixtral-8x7b:bf16,qwen3-30b-a3b:bf16", *data)
    assert status == 1
    assert [(row["model"], row["phase"]) for row in rows] == [
        ("qwen3-30b-a3b", "decode"), ("qwen3-30b-a3b", "prefill"),
    ]  # fmt: skip


def test_engines_that_fail(stand_in, capfd):
    """What serves has its rows; an engine that ended is an error and no wait."""
    cases = "mixtral-8x7b:bf16,deepseek-v3:fp8_block128,qwen3-30b-a3b:bf16"
    status, rows = record(stand_in, "--cases", cases)
    assert status == 1
    assert {(row["model"], row["impl"], row["compared"] is None) for row in rows} == {
        ("mixtral-8x7b", "moe_ops", True)
    }
    told = capfd.readouterr().err
    assert "mixtral-8x7b bf16 vllm: ValueError: no" in told
    assert told.count("the engine ended with status 3") == 4
    assert record(stand_in, "--cases", cases, "--time-budget-s", "0")[0] == 0


# Report


def test_report_of_served_models(stand_in):
    assert "No model has been served" in report.report([])
    _, rows = record(stand_in, "--cases", "qwen3-30b-a3b:bf16")
    header = {"gpu": "G", "driver": "1", "torch": "2", "triton": "3", "date": "2026-01-02T03:04"}
    text = report.report([{**header, "commit": "0123456789", "rows": rows}])
    assert "vLLM 0.33.0 on G, driver 1" in text
    assert [line for line in text.splitlines() if line.startswith("| ")] == [
        "| model | weights | experts | decode 2 | prefill 1024 |",
        "| --- | --- | --- | --: | --: |",
        "| qwen3-30b-a3b, 48 layers | `bf16` | moe_ops | 2 | 256 |",
        "|  |  | `Theirs` | 1 (2.00) | 128 (2.00) |",
        "| model | weights | experts | decode 2 | prefill 1024 |",
        "| --- | --- | --- | --: | --: |",
        "| qwen3-30b-a3b, 48 layers | `bf16` | moe_ops | 15.6 | 516 |",
        "|  |  | `Theirs` | 31.2 (2.00) | 1,031 (2.00) |",
        "| model | weights | equal tokens | apart | parted |",
        "| --- | --- | --: | --: | --: |",
        "| qwen3-30b-a3b, 48 layers | `bf16` | 2 | 0.000 | 0, near ties: 0 |",
    ]

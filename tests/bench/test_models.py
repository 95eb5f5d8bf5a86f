"""The benchmark of whole models: what is built, what a step computes, rows, skips and reports."""

import copy
import json
from importlib import import_module
from types import SimpleNamespace

import models_report
import pytest
import report
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ops.bench import command, harness

transformers = pytest.importorskip("transformers")

bench = import_module("bench_models")
whole = import_module("whole_models")

CPU = torch.device("cpu")
TINY = ("tiny-qwen3", "tiny-gpt-oss")
PLAIN = ("hf-grouped_mm", "hf-batched_mm", "moe_ops")
CONTEXT = 20


def built(name, scheme="bf16", dtype=torch.float32, layers=None):
    return whole.filled(whole.shell(whole.SPECS[name], layers, dtype, scheme), CPU)


def steps(model):
    return [whole.decode(model, 3, CONTEXT), whole.prefill(model, 40)]


# Models


@pytest.mark.parametrize(
    "name, billions, active", [("qwen3-30b-a3b", 30.5, 3.3), ("gpt-oss-120b", 116.8, 5.1)]
)
def test_real_sizes(name, billions, active):
    """The parameters that the models' cards name, in all and for one token."""
    spec = whole.SPECS[name]
    model = whole.shell(spec, None, torch.bfloat16, "bf16")
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e9 == pytest.approx(billions, abs=0.05)
    assert whole.size_of(model) == pytest.approx(2 * count, rel=1e-4)
    config = model.config
    experts = sum(
        p.numel() for block in whole.moe_blocks(model) for p in block.experts.parameters()
    )
    used = count - experts * (1 - config.num_experts_per_tok / config.num_local_experts)
    embedding = model.get_input_embeddings().weight.numel() if name == "gpt-oss-120b" else 0
    assert (used - embedding) / 1e9 == pytest.approx(active, abs=0.1)
    assert len(whole.moe_blocks(whole.shell(spec, 2, torch.bfloat16, "bf16"))) == 2


def test_stored_mxfp4_takes_its_bytes():
    spec = whole.SPECS["gpt-oss-120b"]
    model = whole.shell(spec, None, torch.bfloat16, whole.MXFP4)
    assert whole.size_of(model) / 1e9 == pytest.approx(65.3, abs=0.5)


@pytest.mark.parametrize("name", TINY)
def test_weights_are_those_of_a_model_made_directly(name):
    """Nothing of a model that comes from ``meta`` is left unset, positions included."""
    model = built(name)
    direct = transformers.AutoModelForCausalLM.from_config(whole.SPECS[name].config(None))
    for (key, ours), (other, theirs) in zip(
        (*model.named_parameters(), *model.named_buffers()),
        (*direct.named_parameters(), *direct.named_buffers()),
        strict=True,
    ):
        assert key == other and ours.shape == theirs.shape and ours.isfinite().all()
        if theirs.std() == 0 or key.endswith("inv_freq"):
            torch.testing.assert_close(ours, theirs.to(ours.dtype))
        elif ours.numel() >= 256:
            assert float(ours.std()) == pytest.approx(0.02, rel=0.25)
    again = built(name)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_random_mxfp4_weights_are_as_large_as_others():
    model = built("tiny-gpt-oss", whole.MXFP4)
    experts = whole.moe_blocks(model)[0].experts
    scales = experts.gate_up_proj_scales
    blocks = experts.gate_up_proj.view(*scales.shape, 16)
    weight = whole.mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert 0.01 < float(weight.std()) < 0.04


# Steps


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_every_implementation_computes_the_same_logits(name):
    """Each is about as far from float64 as transformers' eager experts in float32 are."""
    model = built(name)
    exact = copy.deepcopy(model).double()
    for number in range(2):
        for m in (model, exact):
            m.set_experts_implementation("eager")
        step = steps(exact)[number]
        for ours, theirs in zip(caches(step), caches(steps(model)[number]), strict=True):
            ours.copy_(theirs)
        oracle = step.call()
        budget = 4 * (steps(model)[number].call() - oracle).abs().max()
        assert 0 < budget < 1e-3 * oracle.abs().max()
        for impl in PLAIN:
            whole.prepare(model, whole.IMPLS[impl], "bf16", whole.SPECS[name].stored)
            actual = steps(model)[number].call()
            assert (actual - oracle).abs().max() <= budget, impl


def caches(step):
    """The keys and values that a step reads and writes."""
    (cache,) = [c.cell_contents for c in step.call.__closure__ if hasattr(c.cell_contents, "layers")
                and not isinstance(c.cell_contents, torch.nn.Module)]  # fmt: skip
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_a_step_is_what_a_model_computes(name):
    """Prefill equals a plain forward; decode its next token, with the prompt's keys and values."""
    model = built(name)
    model.set_experts_implementation("grouped_mm")
    ids = whole._ids(model, 1, 40)
    plain = transformers.DynamicCache(config=model.config)
    with torch.random.fork_rng():
        expected = model(ids, past_key_values=plain, use_cache=True).logits[:, -1]
    prompt = whole.prefill(model, 40)
    torch.testing.assert_close(prompt.call(), expected, rtol=1e-4, atol=1e-5)

    step = whole.decode(model, 1, 40)
    for new, old in zip(caches(step), caches(prompt), strict=True):
        kept = new.shape[2] - 1
        new[:, :, :kept] = old[:, :, 40 - kept :]
    expected = model(whole._ids(model, 1, 1), past_key_values=plain, use_cache=True).logits[:, -1]
    first = step.call()
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(step.call(), first), "the position does not move"


class _Capturable(TorchDispatchMode):
    """Fails where a CUDA graph could not be captured: numbers that the host reads or makes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "lift_fresh", "is_nonzero"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scheme", ["bf16", "int8_w8a16", whole.MXFP4])
@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_steps_can_be_captured(name, scheme):
    model = built(name, scheme, torch.bfloat16)
    for impl in PLAIN if scheme == "bf16" else PLAIN[2:]:
        whole.prepare(model, whole.IMPLS[impl], scheme, whole.SPECS[name].stored)
        for step in steps(model):
            step.call()
            with _Capturable():
                logits = step.call()
            assert logits.isfinite().all()


@torch.no_grad()
def test_transformers_own_mxfp4(monkeypatch):
    """Blocks of the model route and multiply with the kernels, on weights laid out by them."""
    seen = []

    def wrapped(t, dtype=None):
        return SimpleNamespace(data=t, shape=t.shape, dtype=dtype)

    def matmul(x, w, bias, routing, gather_indx=None, scatter_indx=None, precision_config=None,
               gammas=None, fused_activation=None):  # fmt: skip
        seen.append((w, precision_config.weight_scale))
        assert w.shape[2] == bias.shape[1] and bias.dtype == torch.float32
        width = w.shape[2] // (2 if fused_activation else 1)
        return torch.zeros(len(x) * 2 if scatter_indx is None else len(x) // 2, width)

    def routed(logits, top_k):
        return SimpleNamespace(gate_scal=None), "gather", "scatter"

    ogs = SimpleNamespace(
        PrecisionConfig=SimpleNamespace, FlexCtx=SimpleNamespace, InFlexData=SimpleNamespace,
        FnSpecs=lambda *a: a, FusedActivation=lambda *a: a, matmul_ogs=matmul,
    )  # fmt: skip
    layouts = SimpleNamespace(
        StridedLayout=None, make_default_matmul_mxfp4_w_layout=lambda mx_axis: (None, {})
    )
    kernels = SimpleNamespace(
        matmul_ogs=ogs, swiglu=SimpleNamespace(swiglu_fn=None),
        routing=SimpleNamespace(routing=routed), tensor_details=SimpleNamespace(layout=layouts),
        tensor=SimpleNamespace(
            FP4="fp4", convert_layout=lambda t, layout, **how: t, wrap_torch_tensor=wrapped
        ),
    )  # fmt: skip
    monkeypatch.setattr(whole, "get_kernel", lambda *_, **__: kernels)
    # Weights on the CPU stay there; a build with CUDA names a GPU also where none is.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)
    model = built("tiny-gpt-oss", whole.MXFP4)
    stored = [p.clone() for p in whole.moe_blocks(model)[0].experts.parameters()]
    whole.prepare(model, whole.HF_MXFP4, whole.MXFP4, whole.MXFP4)
    with whole.routed(model) as active:
        assert whole.decode(model, 3, CONTEXT).call().isfinite().all()
    assert len(seen) == 4 and active == []
    weight, scale = seen[0]
    assert weight.dtype == "fp4" and tuple(weight.shape) == (8, 64, 192)
    assert any(p.numel() == weight.data.numel() for p in stored)
    assert tuple(scale.data.shape) == (8, 2, 192)


@torch.no_grad()
def test_a_step_compiles_as_one_graph():
    model = built("tiny-gpt-oss", whole.MXFP4)
    whole.prepare(model, whole.OURS, whole.MXFP4, whole.MXFP4)
    step = whole.decode(model, 2, CONTEXT)
    torch.compiler.reset()
    call = torch.compile(step.call, dynamic=False, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(), step.call())


# The command


def run(tmp_path, *arguments):
    code = bench.main(["--output", str(tmp_path), "--batches", "2", "--modes", "eager", *arguments])
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*/models.json")]
    return code, [row for record in records for row in record["rows"]]


@pytest.fixture
def quick(monkeypatch):
    """Timings without the calls."""
    calls = []

    def once(call, device, captured):
        calls.append(captured)
        return harness.Timing(2e6, 1e6, 3e6, 40, call())

    monkeypatch.setattr(bench, "measure", once)
    return calls


def test_rows(quick, tmp_path, capsys):
    """Parts of the list merge into one record; a second run of what is missing adds the rest."""
    what = ["--model", "tiny-qwen3", "--prefill", "12"]
    code, rows = run(tmp_path, *what, "--scheme", "bf16", "--impls", "moe_ops")
    assert code == 0 and [(r["phase"], r["M"]) for r in rows] == [("decode", 2), ("prefill", 12)]
    assert [r["tokens_per_s"] for r in rows] == [1.0, 6.0]
    assert all(0 < r["rel_diff"] < 0.05 and 2 <= r["active_experts"] <= 8 for r in rows)
    assert rows[0]["config"]["published_layers"] == rows[0]["layers"] == 2
    before = len(quick)
    code, rows = run(tmp_path, *what, "--scheme", "bf16,fp8_block128", "--missing")
    assert code == 0 and len(quick) == before + 5
    assert {(r["scheme"], r["impl"]) for r in rows} == {
        ("bf16", "hf-batched_mm"), ("bf16", "hf-grouped_mm"), ("bf16", "moe_ops"),
        ("fp8_block128", "moe_ops"),
    }  # fmt: skip
    skipped = [r for r in rows if r["skipped"]]
    assert [(r["impl"], r["phase"]) for r in skipped] == [("hf-batched_mm", "prefill")]
    assert skipped[0]["skipped"] == whole.COPIES and skipped[0]["time_us"] is None
    code, rows = run(tmp_path, *what, "--scheme", "bf16", "--layers", "1", "--impls", "moe_ops")
    assert {r["layers"] for r in rows} == {1, 2}, "fewer layers are rows of their own"
    assert "tiny-qwen3" in capsys.readouterr().out


def test_what_cannot_run_is_recorded_with_its_reason(quick, tmp_path, monkeypatch):
    what = ["--model", "tiny-gpt-oss", "--no-prefill"]
    code, rows = run(tmp_path, *what, "--scheme", "fp8_block128,mxfp4_w4a16")
    reasons = {(r["scheme"], r["impl"]): r["skipped"] for r in rows}
    assert code == 0 and reasons["mxfp4_w4a16", "moe_ops"] is None
    assert "gate and up rows alternate" in reasons["fp8_block128", "moe_ops"]
    assert "kernels" in reasons["mxfp4_w4a16", "hf-mxfp4"]

    def too_large(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(bench, "measure", too_large)
    code, rows = run(tmp_path, *what, "--scheme", "int8_w8a16")
    (row,) = [r for r in rows if r["scheme"] == "int8_w8a16"]
    assert code == 0 and row["skipped"] == "CUDA out of memory"


def test_failures_are_named_and_not_recorded(quick, tmp_path, monkeypatch, capsys):
    def wrong(call, device, captured):
        return harness.Timing(1.0, 1.0, 1.0, 1, call() * torch.nan)

    monkeypatch.setattr(bench, "measure", wrong)
    what = ["--model", "tiny-qwen3", "--scheme", "bf16", "--impls", "moe_ops", "--no-prefill"]
    assert run(tmp_path, *what) == (1, [])
    assert "failed: tiny-qwen3 moe_ops bf16 decode 2 eager" in capsys.readouterr().err


def test_no_case_starts_after_the_budget(quick, tmp_path, capsys):
    assert run(tmp_path, "--model", "tiny-qwen3", "--time-budget-s", "0") == (0, [])
    assert "no time left for tiny-qwen3" in capsys.readouterr().out and not quick


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_without_a_gpu(quick, tmp_path, monkeypatch):
    assert sorted(bench.options([]).models) == sorted(TINY)
    monkeypatch.setattr(command, "write_rows", lambda *_: pytest.fail("written"))
    what = ["--model", "tiny-qwen3", "--scheme", "bf16", "--impls", "moe_ops", "--batches", "1"]
    assert bench.main([*what, "--modes", "eager", "--no-prefill"]) == 0
    code, rows = run(tmp_path / "none", *what, "--modes", "captured", "--time-budget-s", "0")
    assert rows == []


@pytest.mark.parametrize("option", ["--model", "--scheme", "--impls", "--modes", "--batches"])
def test_unknown_names(capsys, option):
    with pytest.raises(SystemExit) as error:
        bench.main([option, "nothing"])
    assert error.value.code == 2 and "nothing" in capsys.readouterr().err


# Reports


def record_of(*changes):
    rows = []
    for change in changes:
        key = {"model": "tiny-qwen3", "layers": 2, "phase": "decode", "M": 8, "scheme": "bf16",
               "impl": "moe_ops", "mode": "captured"}  # fmt: skip
        facts = {"tokens_per_s": 100.0, "peak_bytes": 3 * 10**9, "config": {"published_layers": 2}}
        rows.append(vars(bench.ModelRow(**{**key, **facts, **change})))
    header = {"gpu": "G", "driver": "1", "torch": "2", "triton": "3", "date": "2026-01-02T03:04"}
    return {**header, "commit": "0123456789", "rows": rows}


def test_report():
    assert "No whole model has been timed" in models_report.report([])
    record = record_of(
        {}, {"impl": "hf-grouped_mm", "tokens_per_s": 40.0}, {"M": 64, "tokens_per_s": 1234.5},
        {"scheme": "fp8_block128", "tokens_per_s": 150.0, "peak_bytes": 2 * 10**9},
        {"layers": 1}, {"impl": "hf-batched_mm", "tokens_per_s": None, "skipped": "too | large"},
    )  # fmt: skip
    text = models_report.report([record])
    assert "## G\n" in text and "### G: tiny-qwen3\n" in text
    assert "### G: tiny-qwen3, 1 of 2 layers\n" in text
    table = (
        "| scheme |  | decode 8 | decode 64 | peak memory, GB |\n| --- | --- | --: | --: | --: |\n"
        "| `bf16` | moe_ops | 100 | 1,234 | 3.0 |\n"
        "| `bf16` | hf-grouped_mm | 40 (2.50) | - | 3.0 |\n"
        "| `fp8_block128` | moe_ops | 150 | - | 2.0 |"
    )
    assert table in text
    assert "| tiny-qwen3 | `bf16` | hf-batched_mm | too \\| large |" in text
    assert "Eager" not in text


def test_headline():
    """Captured steps of ours and of peers, in schemes that a peer was timed in."""
    record = record_of(
        {"impl": "hf-grouped_mm", "tokens_per_s": 40.4}, {"tokens_per_s": 1234.6},
        {"phase": "prefill", "M": 4096, "tokens_per_s": 9e4}, {"mode": "eager", "M": 1},
        {"scheme": "int8_w8a16"},
        {"impl": "hf-batched_mm", "M": 64, "tokens_per_s": None, "skipped": "too large"},
    )  # fmt: skip
    table, told = report.models_headline([record]).split("\n\n")
    assert table.splitlines()[0] == "| model | weights | experts | decode 8 | prefill 4096 |"
    assert table.splitlines()[2:] == [
        "| tiny-qwen3 | `bf16` | moe_ops | 1,235 | 90,000 |",
        "| tiny-qwen3 | `bf16` | hf-grouped_mm | 40 | - |",
    ]
    assert "one step replayed from a CUDA graph" in told


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    plot = import_module("plot")
    record = record_of({}, {"impl": "hf-grouped_mm"}, {"phase": "prefill", "M": 40})
    plot.plot_models(record, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["models-tiny-qwen3-2.png"]


# On the CPU


def test_cpu_rows(tmp_path):
    """Both models take turns, and their logits agree; the record is written."""
    cpu = import_module("bench_cpu")
    options = "--layers 1 --rounds 3 --seconds 0 --mode eager --step decode,prefill-128 --output"
    assert cpu.main([*options.split(), str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert {(row["step"], row["dtype"]) for row in rows} == {
        (step, dtype) for step in ("decode", "prefill-128") for dtype in ("fp32", "bf16")
    }
    for row in rows:
        assert row["rounds"] == 3 and row["p25"] <= row["ratio"] <= row["p75"]
        assert row["rel_err"] < (1e-5 if row["dtype"] == "fp32" else 0.05)

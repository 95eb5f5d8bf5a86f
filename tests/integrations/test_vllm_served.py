"""vLLM serves models on the CPU with this library's experts: `make test-vllm`.

Every model is served twice, in processes of their own, and the greedy continuations are compared.
In float32 all tokens must be equal. In bfloat16 a continuation may leave the other where one engine
finds its two best tokens as close as the engines' log-probabilities are elsewhere: these near ties
are printed (``-s``, which the make target passes).
"""

import dataclasses
import importlib
import inspect
import json
import shutil

import pytest
import torch
import vllm_stand_ins
from vllm_serve import TOKENS, Written, served

from moe_ops import dequantize_weight, quantize_weight
from moe_ops.bench import problems
from moe_ops.bench import vllm as bench_vllm
from moe_ops.bench.harness import relative_error
from moe_ops.bench.layer import MAX_REL_ERR, math_of
from moe_ops.bench.peers import INSIDE, PEERS
from moe_ops.demo import MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def compare(name: str, theirs: Written, ours: Written, *, ties: bool) -> None:
    """Compare two engines' continuations, and print where they part."""
    assert "moe_ops: runs the experts" in ours.log and "moe_ops: " not in theirs.log
    equal, parted, apart = 0, [], 0.0
    for a, b, p, q in zip(theirs.tokens, ours.tokens, theirs.best, ours.best, strict=True):
        assert len(a) == len(b) == TOKENS
        same = next((i for i in range(TOKENS) if a[i] != b[i]), TOKENS)
        equal += same
        for i in range(same):
            apart = max(apart, *(abs(p[i][token] - q[i][token]) for token in set(p[i]) & set(q[i])))
        if same < TOKENS:
            parted.append((same, p[same], q[same], {a[same], b[same]}))
    print(f"\n{name}: {equal} tokens before any difference, log-probabilities {apart:.1e} apart")
    for position, p, q, tokens in parted:
        gap = min(max(best.values()) - min(best.values()) for best in (p, q))
        print(f"  parted at {position}: vLLM's {p}, ours {q}, a gap of {gap:.1e}")
        assert ties and gap <= apart and tokens <= set(p) & set(q)


def test_stand_ins_have_vllms_interface():
    """What the other tests run on has the parameters and fields that vLLM has."""
    for module, values in vllm_stand_ins.SIGNATURES.items():
        real = importlib.import_module(module)
        for value in values:
            theirs = getattr(real, value.__name__)
            if inspect.isclass(value):
                for name, function in vars(value).items():
                    if callable(getattr(function, "__func__", function)) and name[:2] != "__":
                        assert parameters(getattr(theirs, name)) == parameters(
                            getattr(value, name)
                        ), name
            else:
                assert parameters(theirs)[: len(parameters(value))] == parameters(value)
    for module, values in vllm_stand_ins.FIELDS.items():
        for value in values:
            theirs = getattr(importlib.import_module(module), value.__name__)
            names = getattr(value, "_fields", None) or [f.name for f in dataclasses.fields(value)]
            known = {field.name for field in dataclasses.fields(theirs)} | set(vars(theirs))
            assert set(names) <= known, set(names) - known
    for name, (enum, members) in vllm_stand_ins.BACKENDS.items():
        backends = getattr(importlib.import_module(f"{vllm_stand_ins.LAYERS}.oracle.{name}"), enum)
        assert set(members) <= {backend.value for backend in backends}


def parameters(function):
    return tuple(inspect.signature(function).parameters)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A folder of its own for vLLM's compiled graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def plain():
    """The demo's model in float32 with vLLM's own experts."""
    return served(False, model=str(MODEL), dtype="float32", enforce_eager=True)


def test_float32(plain):
    ours = served(True, model=str(MODEL), dtype="float32", enforce_eager=True)
    compare("float32", plain, ours, ties=False)


def test_full_graph(plain):
    """Compiled, too; and vLLM does not take our graph from its cache when ours do not run."""
    how = {"model": str(MODEL), "dtype": "float32"}
    ours = served(True, **how)
    compare("float32, one graph", plain, ours, ties=False)
    compare("float32, one graph of each", served(False, **how), ours, ties=False)


def test_bfloat16():
    how = {"model": str(MODEL), "dtype": "bfloat16", "enforce_eager": True}
    compare("bfloat16", served(False, **how), served(True, **how), ties=True)


def test_int8(tmp_path):
    """vLLM quantizes weights that are exact in int8; its own experts serve them in bfloat16."""
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(MODEL / "model.safetensors")
    for name, weight in weights.items():
        if ".mlp.experts." in name:
            weights[name] = exact_in_int8(weight)
    config = json.loads((MODEL / "config.json").read_text())
    folder = checkpoint(tmp_path / "exact", weights, config)
    how = {"model": str(folder), "dtype": "bfloat16", "enforce_eager": True}
    ours = served(True, quantization="int8_per_channel_weight_only", **how)
    assert "int8_w8a16" in ours.log
    compare("int8_w8a16", served(False, **how), ours, ties=True)


def exact_in_int8(weight):
    """A weight near the given one, whose scales per row are powers of two."""
    rows = weight.float()
    largest = rows.abs().amax(1, keepdim=True)
    step = (largest / 127).log2().ceil().exp2()
    codes = (rows / step).round()
    codes = torch.where(rows.abs() == largest, 127 * rows.sign(), codes)
    return (codes * step).to(weight.dtype)


def test_mxfp4_with_biases(tmp_path):
    """A small gpt-oss: vLLM's own experts serve the dequantized weights, exact in bfloat16."""
    packed, plain = gpt_oss(tmp_path)
    how = {"dtype": "bfloat16", "enforce_eager": True}
    ours = served(True, model=str(packed), **how)
    assert "mxfp4_w4a16, swigluoai" in ours.log
    compare("mxfp4_w4a16", served(False, model=str(plain), **how), ours, ties=True)


def checkpoint(folder, weights, config):
    """Write a checkpoint with the demo's tokenizer."""
    from safetensors.torch import save_file

    folder.mkdir()
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    return folder


def gpt_oss(folder):
    """Checkpoints of a random gpt-oss: with MXFP4 experts, and with the same numbers in bf16."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=96, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, num_local_experts=8,
        num_experts_per_tok=4, max_position_embeddings=1024, eos_token_id=0, bos_token_id=0,
        pad_token_id=0, dtype="bfloat16",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": 512, "truncate": False,
        },
    )  # fmt: skip
    weights = GptOssForCausalLM(config).to(torch.bfloat16).state_dict()
    for name, weight in weights.items():
        if "norm" not in name:
            weight.normal_(std=1.0 if "embed" in name else 0.3)
    packed, plain = {}, {}
    for name, weight in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = plain[name] = weight
            continue
        q = quantize_weight(weight.transpose(1, 2).contiguous(), "mxfp4_w4a16")
        packed[f"{name}_blocks"] = q.data.unflatten(2, (-1, 16))
        packed[f"{name}_scales"] = q.scale
        exact = dequantize_weight(q, "mxfp4_w4a16").to(torch.bfloat16)
        plain[name] = exact.transpose(1, 2)
    described = {**config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    quantized = {**described, "quantization_config": {"quant_method": "mxfp4"}}
    return (
        checkpoint(folder / "packed", packed, quantized),
        checkpoint(folder / "plain", plain, described),
    )


@pytest.mark.parametrize("scheme", bench_vllm.SERVED)
def test_modular_kernel(scheme):
    """The layer benchmark's ``moe_ops-in-vllm`` computes the layer."""
    device = torch.device("cpu")
    problem = problems.Problem("small", 8, 2, 256, 128, timed=False)
    experts = problems.make_experts(problem, scheme, device)
    inputs = problems.make_inputs(problem, 7, "uniform", device)
    expected = problems.reference_rows(experts, inputs, torch.arange(7))
    actual = PEERS[INSIDE](experts, inputs)()
    assert relative_error(actual, expected) < MAX_REL_ERR[math_of(experts.scheme)]

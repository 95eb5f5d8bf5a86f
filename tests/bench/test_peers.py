"""Other implementations in the layer benchmark: where they run, what they take and are given."""

import json
import sys
from types import ModuleType, SimpleNamespace

import peers
import pytest
import torch
from peers import PEERS, installed, vllm

import moe_ops
from moe_ops.bench import layer, problems
from moe_ops.bench.peers import Peer, available

CPU = torch.device("cpu")
SMALL = problems.Problem("small", 8, 2, 256, 128, timed=False)
QWEN = problems.load_problems()["qwen3-30b"]


def case(scheme, tokens=7, problem=SMALL):
    return (
        problems.make_experts(problem, scheme, CPU),
        problems.make_inputs(problem, tokens, "uniform", CPU),
    )


def error_of(out, experts, inputs):
    expected = problems.reference_rows(experts, inputs, torch.arange(len(inputs.x)))
    return float((out - expected).norm() / expected.norm())


@pytest.fixture
def modules(monkeypatch):
    """Puts stand-ins for modules into ``sys.modules``, and forgets what was found missing."""
    probes = (peers.hub_kernel, installed.lacks)
    for probe in probes:
        probe.cache_clear()
    monkeypatch.setattr(installed, "find_spec", lambda name: True)

    def put(name, **members):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            outer = ".".join(parts[:i])
            if outer not in sys.modules:
                module = ModuleType(outer)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, outer, module)
        vars(sys.modules[name]).update(members)

    yield put
    for probe in probes:
        probe.cache_clear()


# What is there, and what it takes


def test_schemes():
    schemes = {"bf16", *moe_ops.SCHEMES} - {"unquantized"}
    for name, peer in PEERS.items():
        assert peer.makers.keys() <= schemes, name
        assert not peer.takes("mxfp8", QWEN, 8)


def test_what_is_declined():
    mixtral, own = problems.load_problems()["mixtral"], problems.Problem
    gelu = own("gelu", 8, 2, 64, 32, timed=False, activation="gelu")
    assert all(not peer.takes("bf16", gelu, 1) for peer in PEERS.values())
    batched = PEERS["hf-batched_mm"]
    assert batched.takes("bf16", QWEN, 64) and not batched.takes("bf16", QWEN, 4096)
    assert batched.takes("bf16", mixtral, 8) and not batched.takes("bf16", mixtral, 64)
    assert not batched.takes("fp8_block128", QWEN, 1)
    odd = own("odd", 16, 10, 64, 32, timed=False)
    kernels = PEERS["triton_kernels"]
    assert kernels.takes("mxfp4_w4a16", QWEN, 4096) and not kernels.takes("bf16", odd, 1)
    marlin, gpt_oss = PEERS["vllm-marlin"], problems.load_problems()["gpt-oss-120b"]
    taken = {"int4_w4a16_g128", "int8_w8a16", "mxfp4_w4a16"}
    assert {scheme for scheme in moe_ops.SCHEMES if marlin.takes(scheme, QWEN, 1)} == taken
    assert not any(marlin.takes(scheme, gpt_oss, 1) for scheme in taken), "2880 = 22.5 * 128"
    blocks = {"fp8_block128", "int4_w4a16_g128"}
    narrow = own("narrow", 8, 2, 256, 192, timed=False)
    assert not any(PEERS["humming"].takes(scheme, narrow, 1) for scheme in blocks)
    for name in ("vllm-triton", "vllm-modular", "vllm-deepgemm", "humming"):
        refused = {s for s in PEERS[name].makers if not PEERS[name].takes(s, gpt_oss, 1)}
        assert refused == blocks & PEERS[name].makers.keys(), name


def test_what_is_missing_is_said(monkeypatch, modules, capsys):
    modules("triton_kernels.matmul_ogs")
    assert "No module named 'triton_kernels.routing'" in PEERS["triton_kernels"].missing()
    modules(f"{vllm.LAYERS}.fused_moe")
    missing = PEERS["vllm-triton"].missing()
    assert missing == f"compiled operators of vllm: {', '.join(vllm.TRITON[1])}"
    assert PEERS["humming"].missing() == "ModuleNotFoundError: No module named 'humming'"
    modules("humming.forward")
    installed.lacks.cache_clear()
    assert PEERS["humming"].missing() == missing, "vLLM's operators run around its GEMMs"
    modules("vllm.utils.deep_gemm", is_deep_gemm_supported=lambda: False)
    monkeypatch.setattr(vllm, "missing", lambda *what: None)
    assert PEERS["vllm-deepgemm"].missing() == "a GPU and a build of vllm that have DeepGEMM"
    monkeypatch.undo()
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    installed.lacks.cache_clear()
    peers.hub_kernel.cache_clear()
    assert PEERS["vllm-triton"].missing() == "the package vllm"
    assert PEERS["vllm-deepgemm"].missing() == "the package vllm"
    assert PEERS["humming"].missing() == "the package humming (humming-kernels)"
    assert PEERS["hf-sonicmoe"].missing() == "the package transformers"
    assert available() == []
    with pytest.raises(SystemExit):
        layer.main(["--impls", "vllm-triton", "--model", "tiny"])
    assert "--impls vllm-triton needs the package vllm" in capsys.readouterr().err


def test_kernels_of_the_hub():
    """Where their packages are not installed, the reason is that of transformers or the package."""
    pytest.importorskip("transformers")
    for name in ("hf-deepgemm", "hf-sonicmoe"):
        missing = PEERS[name].missing()
        assert missing is None or "kernels" in missing or "CUDA" in missing


# What they compute


@pytest.mark.parametrize("name", ["hf-grouped_mm", "hf-batched_mm"])
@torch.no_grad()
def test_transformers(name):
    pytest.importorskip("transformers")
    experts, inputs = case("bf16")
    assert error_of(PEERS[name](experts, inputs)(), experts, inputs) < 0.02


def test_vllm_is_given_the_scales(modules):
    """The configuration is vLLM's own, made of the weights' scales."""
    calls = []

    def make(**given):
        return given

    def run(x, w1, w2, weights, ids, **how):
        calls.append(how)
        return x

    functions = {name for name, _ in vllm.CONFIGS.values()}
    modules(f"{vllm.LAYERS}.config", **dict.fromkeys(functions, make))
    modules(f"{vllm.LAYERS}.fused_moe", fused_experts=run)
    for scheme in PEERS["vllm-triton"].makers:
        experts, inputs = case(scheme)
        PEERS["vllm-triton"](experts, inputs)()
        if scheme == "bf16":
            assert calls.pop() == {}
            continue
        config = calls.pop()["quant_config"]
        assert config["w1_scale"] is experts.stored[0].scale
        assert config["w2_scale"] is experts.stored[1].scale
        assert experts.w1.dtype in (torch.float8_e4m3fn, torch.int8), "as vLLM reads them"


def _unpacked(words, bits):
    """The codes of int32 words along the last dimension, the first one lowest."""
    mask = 2**bits - 1
    return torch.stack([words >> bits * i & mask for i in range(32 // bits)], -1).flatten(-2)


def _values(codes, element):
    """The numbers that codes stand for, as Marlin and Humming name their elements."""
    if element in ("float4_e2m1f", "float4e2m1"):
        magnitudes = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
        return torch.cat((magnitudes, -magnitudes))[codes]
    if element == "float8e4m3":
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    return (codes - {"uint4": 8, "uint4b8": 8, "uint8": 128, "uint8b128": 128}[element]).float()


def test_codes_in_the_layout_of_gptq():
    for scheme, element in vllm.MARLIN_ELEMENTS.items():
        experts, _ = case(scheme)
        for weight in experts.stored:
            words, scales = vllm.gptq_layout(weight)
            assert scales.dtype == torch.bfloat16
            codes = _unpacked(words.transpose(1, 2), 8 if scheme == "int8_w8a16" else 4)
            groups = codes.shape[2] // scales.shape[1]
            by_column = scales.float().transpose(1, 2).repeat_interleave(groups, dim=2)
            expected = moe_ops.dequantize_weight(weight, experts.scheme, torch.float32)
            found = _values(codes, element) * by_column
            torch.testing.assert_close(found, expected, rtol=0.005, atol=0, msg=scheme)


@pytest.mark.parametrize("order", [False, True])
def test_marlin_is_given_its_layout(modules, order):
    """The repacking of vLLM 0.25 takes an order of columns; there is none."""
    seen = []

    def repack(words, size_k, size_n, num_bits):
        assert words.shape[1:] == (size_k * num_bits // 32, size_n)
        seen.append(num_bits)
        return words

    def repack_in_order(b_q_weight, perm, size_k, size_n, num_bits):
        assert perm.shape == (len(b_q_weight), 0)
        return repack(b_q_weight, size_k, size_n, num_bits)

    def permuted(scales, size_k, size_n, group):
        assert scales.shape[1:] == (size_k // group, size_n)
        return scales

    def run(x, w1, w2, bias1, bias2, scale1, scale2, weights, ids, element):
        assert bias1 is None and bias2 is None and scale1.shape[2] == w1.shape[2]
        seen.append(element)
        return x

    types = {name: SimpleNamespace(id=name) for name in vllm.MARLIN_ELEMENTS.values()}
    modules("vllm._custom_ops", gptq_marlin_moe_repack=repack_in_order if order else repack)
    modules("vllm.scalar_type", scalar_types=SimpleNamespace(**types))
    modules(f"{vllm.UTILS}.marlin_utils", marlin_moe_permute_scales=permuted)
    modules(f"{vllm.UTILS}.marlin_utils_fp4",
            mxfp4_marlin_process_scales=lambda scales: scales.to(torch.float8_e8m0fnu))  # fmt: skip
    modules(f"{vllm.LAYERS}.experts.marlin_moe", fused_marlin_moe=run)
    for scheme, element in vllm.MARLIN_ELEMENTS.items():
        experts, inputs = case(scheme)
        PEERS["vllm-marlin"](experts, inputs)()
        bits = 8 if scheme == "int8_w8a16" else 4
        assert seen == [bits, bits, element], scheme
        seen.clear()


class _Humming:
    """Humming and vLLM's operators around it, in words."""

    def __init__(self, module):
        module("humming.schema", HummingWeightSchema=SimpleNamespace,
               HummingInputSchema=SimpleNamespace)  # fmt: skip
        module("humming.transform", prepare_and_transform_humming_tensors=self.prepare)
        module("humming.tune", get_heuristics_config=self.choose)
        module("humming.forward", may_process_input=self.process, humming_forward=self.forward)
        module(f"{vllm.LAYERS}.moe_align_block_size", moe_align_block_size=self.align)
        module(f"{vllm.LAYERS}.moe_fused_mul_sum", moe_fused_mul_sum=self.add)

    @staticmethod
    def prepare(tensors, shape_n, shape_k, weight_schema, input_schema, num_experts, torch_dtype,
                pad_n_to_multiple, pad_k_to_multiple):  # fmt: skip
        assert tensors["weight"].dtype == torch.int32 and torch_dtype == torch.bfloat16
        layer = SimpleNamespace(n=shape_n, k=shape_k, of_weight=weight_schema, of_x=input_schema)
        assert tensors["weight"].shape[:2] == (num_experts, shape_n)
        return layer, tensors

    @staticmethod
    def choose(layer, shape_m, **compute):
        assert compute["gemm_type"] == "indexed"
        return {"block_shape": (16 if layer.k == 256 else 8, 64, 64)}  # other tiles for GEMM 2

    @staticmethod
    def process(layer, inputs, activation_type="none", activation_impl=None):
        rows = inputs
        if activation_type == "binary_split":
            assert activation_impl == "a / (1.f + expf(-a)) * b"
            a, b = inputs.chunk(2, dim=-1)
            rows = a / (1 + (-a).exp()) * b
        if layer.of_x.input_quant_mode == "none":
            return rows, None, None
        assert layer.of_x.a_dtype in ("float8e4m3", "int8")
        scale = torch.full((len(rows), 1), 2.0)
        grouped = layer.of_x.input_quant_mode == "dynamic_group"
        return rows / 2, scale if grouped else None, None if grouped else scale

    @staticmethod
    def forward(layer, inputs, weight, weight_scale, input_scale, sorted_ids, expert_ids,
                num_tokens_padded, locks, top_k, valid_shape_m, compute_config,
                tuning_config):  # fmt: skip
        block_m = json.loads(tuning_config)["block_shape"][0]
        assert json.loads(compute_config)["gemm_type"] == "indexed" and not locks.any()
        of_weight = layer.of_weight
        codes = _unpacked(weight, 8 if of_weight.b_dtype in ("uint8", "float8e4m3") else 4)
        scale = weight_scale.float()
        for dim, size in enumerate(codes.shape):
            scale = scale.repeat_interleave(size // scale.shape[dim], dim=dim)
        w = _values(codes, of_weight.b_dtype) * scale
        rows = inputs.float() if input_scale is None else inputs.float() * input_scale
        out = torch.full((valid_shape_m, layer.n), torch.nan)
        for place, slot in enumerate(sorted_ids[: int(num_tokens_padded)].tolist()):
            if slot < valid_shape_m:
                out[slot] = rows[slot // top_k] @ w[expert_ids[place // block_m]].t()
        return out

    @staticmethod
    def align(ids, block_m, count, ignore_invalid_experts):
        slots, experts = [], []
        for expert in range(count):
            mine = (ids.flatten() == expert).nonzero().flatten().tolist()
            tiles = -(-len(mine) // block_m)
            slots += mine + [ids.numel()] * (tiles * block_m - len(mine))
            experts += [expert] * tiles
        return torch.tensor(slots), torch.tensor(experts), torch.tensor([len(slots)])

    @staticmethod
    def add(rows, weights):
        return (rows * weights[..., None]).sum(1)


@torch.no_grad()
def test_humming(modules):
    """Codes, scales, the plan of each GEMM and the activation are as Humming names them."""
    _Humming(modules)
    for scheme in PEERS["humming"].makers:
        experts, inputs = case(scheme)
        assert error_of(PEERS["humming"](experts, inputs)(), experts, inputs) < 0.005, scheme


class _Ogs:
    """``matmul_ogs`` of triton_kernels in words: gather, product, bias, activation, scatter."""

    def __init__(self, module):
        module("triton_kernels.matmul_ogs", FnSpecs=lambda *a: a, PrecisionConfig=SimpleNamespace,
               FusedActivation=lambda *a: a, matmul_ogs=self.matmul)  # fmt: skip
        module("triton_kernels.routing", routing=self.routing)
        module("triton_kernels.swiglu", swiglu_fn=self.swiglu)
        module("triton_kernels.tensor", FP4="fp4", convert_layout=lambda t, layout, **how: t,
               wrap_torch_tensor=self.wrapped)  # fmt: skip
        module("triton_kernels.tensor_details.layout", StridedLayout=None,
               make_default_matmul_mxfp4_w_layout=lambda mx_axis: (None, {}))  # fmt: skip

    @staticmethod
    def routing(logits, top_k, expt_indx):
        assert expt_indx.dtype == torch.int32, "int16 loses experts in its bit masks"
        ids = expt_indx.long()
        weights = logits.gather(1, ids).softmax(-1)
        order = ids.flatten().argsort(stable=True)
        told = SimpleNamespace(experts=ids.flatten()[order], gate_scal=weights.flatten()[order])
        return told, order // top_k, order // top_k

    @staticmethod
    def swiglu(h, alpha, limit):
        gate, up = h[..., ::2].clamp(max=limit), h[..., 1::2].clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    @staticmethod
    def wrapped(t, dtype=None):
        return t

    @staticmethod
    def matmul(x, w, bias, told, gather_indx=None, scatter_indx=None, precision_config=None,
               gammas=None, fused_activation=None):  # fmt: skip
        rows = x if gather_indx is None else x[gather_indx]
        scale = getattr(precision_config, "weight_scale", None)
        if scale is not None:  # (E, K / 2, N) bytes and (E, K / 32, N) scales
            weight = moe_ops.scheme.QTensor(w.transpose(1, 2), scale.transpose(1, 2))
            weight = weight._replace(data=weight.data.contiguous(), scale=weight.scale.contiguous())
            w = moe_ops.dequantize_weight(weight, "mxfp4_w4a16", torch.float32).transpose(1, 2)
        out = torch.stack(
            [r @ w[e].float() for r, e in zip(rows.float(), told.experts, strict=True)]
        )
        if bias is not None:
            out = out + bias[told.experts]
        if fused_activation is not None:
            (_, function, _), arguments, reduction = fused_activation
            assert reduction == 2
            out = function(out, *arguments)
        if scatter_indx is None:
            return out
        total = torch.zeros(int(scatter_indx.max()) + 1, out.shape[1])
        return total.index_add_(0, scatter_indx, out * gammas[:, None])


@pytest.mark.parametrize("scheme", ["bf16", "mxfp4_w4a16"])
@torch.no_grad()
def test_triton_kernels(modules, scheme):
    """The gate on rows in turns with a bias of -1 is gated SiLU; the weights are those given."""
    _Ogs(modules)
    experts, inputs = case(scheme)
    assert PEERS["triton_kernels"].missing() is None
    assert error_of(PEERS["triton_kernels"](experts, inputs)(), experts, inputs) < 1e-4


# The benchmark


def test_cases_that_a_peer_takes(monkeypatch, tmp_path, capsys):
    seen = []

    def make(experts, inputs):
        seen.append((experts.scheme.name, len(inputs.x)))
        return layer.moe_ops_layer(experts, inputs)

    few = Peer(lambda: None, {"fp8_channel": make}, lambda scheme, problem, tokens: tokens < 4)
    monkeypatch.setitem(PEERS, "hf-grouped_mm", few)
    monkeypatch.setitem(layer.IMPLS, "hf-grouped_mm", few)
    what = ["--model", "tiny", "--tokens", "2,5", "--scheme", "bf16,fp8_channel"]
    impls = ["--impls", "moe_ops,hf-grouped_mm", "--output", str(tmp_path)]
    assert layer.main([*what, *impls]) == 0
    assert seen == [("fp8_channel", 2)]
    (path,) = tmp_path.glob("*/layer.json")
    rows = json.loads(path.read_text())["rows"]
    found = [(r["scheme"], r["M"]) for r in rows if r["impl"] == "hf-grouped_mm"]
    assert found == [("fp8_channel", 2)] and len(rows) == 5

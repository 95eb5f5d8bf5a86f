"""Plain checkpoints into quantized layers, and W4A8 checkpoints with scales in floats."""

import pytest
import torch
from checkpoints import CHANNEL, Experts, expected, fused, held, numbers, per_expert

import moe_ops
from moe_ops.scheme import SCHEMES, get_scheme
from moe_ops.tensors import QTensor

E, K, H, I = 2, 2, 128, 256  # noqa: E741
RANKS = [{}, {"tp_size": 2, "tp_rank": 1}, {"ep_size": 2, "ep_rank": 1}]
QUANTIZED = [name for name in SCHEMES if name != "unquantized"]


def make(scheme, **options):
    return moe_ops.FusedMoE(E, K, H, I, scheme=scheme, **options)


def load(layer, source, **how):
    how = {"quantize": True, "progress": False, **how}
    assert moe_ops.load_checkpoint(layer, source, **how).is_complete
    return layer


def state(layer):
    return {n: x.data.contiguous().view(torch.uint8) for n, x in layer.named_parameters()}


def same(layer, other):
    mine, others = state(layer), state(other)
    return mine.keys() == others.keys() and all(torch.equal(mine[n], others[n]) for n in mine)


def test_a_rank_of_padding_is_silent(recwarn):
    """All of its scales are zeros, as in a layer into which nothing was loaded."""
    layer = moe_ops.FusedMoE(E, K, 64, 64, scheme="int4_w4a16_g32", tp_size=3, tp_rank=2)
    load(layer, per_expert(Experts.random(E, 64, 64)))
    assert not layer(torch.ones(1, 64), torch.ones(1, E)).any()
    assert not layer.w2_weight_scale.any() and not recwarn.list


def input_scale(scheme):
    activation = SCHEMES[scheme].activation
    needed = activation is not None and (activation.static or activation.global_scale)
    return 0.5 if needed else None


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_every_scheme_on_every_rank(scheme):
    """Bit by bit what is loaded from a checkpoint that was quantized expert by expert before."""
    experts = Experts.random(E, H, I, torch.bfloat16)
    scale = input_scale(scheme)
    plain = per_expert(experts, input_scale=scale)
    quantized = experts.quantized(scheme)
    stored = per_expert(quantized, input_scale=scale)
    for rank in RANKS:
        options = {"params_dtype": torch.bfloat16, **rank}
        layer = load(make(scheme, **options), plain)
        assert same(layer, load(make(scheme, **options), stored, quantize=False))
        wanted = expected(quantized, scheme, layer, held(layer))
        assert all(map(torch.equal, numbers(layer), wanted))


@pytest.mark.parametrize(
    "scheme", ["fp8_block128", "int4_w4a16_g128_zp", "fp8_tensor", "nvfp4_w4a16"]
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tensors_of_all_experts(scheme, transposed, interleaved):
    experts = Experts.random(E, H, I)
    source = fused(experts, transposed=transposed, interleaved=interleaved)
    layout = moe_ops.loading.CheckpointLayout(interleaved=interleaved)
    rank = RANKS[1 + transposed]
    layer = load(make(scheme, **rank), source, layout=layout)
    assert same(layer, load(make(scheme, **rank), per_expert(experts)))


@pytest.mark.parametrize(
    "scheme", ["fp8_tensor", "nvfp4_w4a16", "int4_w4a16_g32", "int4_w4a16_g32_zp"]
)
def test_rows_that_alternate(scheme):
    """One scale of a tensor is that of gate and up together; zero points share bytes."""
    experts = Experts.random(E, H, I)
    both, _ = fused(experts, interleaved=True).values()
    layer = load(make(scheme, activation="swigluoai"), fused(experts, interleaved=True))
    wanted = moe_ops.dequantize_weight(moe_ops.quantize_weight(both, scheme), scheme)
    assert torch.equal(numbers(layer)[0], wanted)
    if scheme.startswith("int4"):
        assert same(layer, load(make(scheme, activation="swigluoai"), per_expert(experts)))
        return
    with pytest.raises(ValueError, match="scales of w1 and w3 must be equal where their rows"):
        load(make(scheme, activation="swigluoai"), per_expert(experts))


def test_widths_that_no_block_divides():
    """Blocks are those of the checkpoint's scheme, refined for ranks without another rounding."""
    experts = Experts.random(3, 64, 704)
    for rank in range(2):
        options = {"quant_config": "fp8_block128", "tp_size": 2, "tp_rank": rank}
        layer = load(moe_ops.FusedMoE(3, 1, 64, 704, **options), per_expert(experts))
        assert layer.scheme.name == "fp8_block32"
        quantized = experts.quantized("fp8_block128")
        wanted = expected(quantized, "fp8_block128", layer, slice(None))
        assert all(map(torch.equal, numbers(layer), wanted))


def test_weights_are_rounded_to_the_layers_dtype_first():
    """As an unquantized layer would hold them; scales are of that dtype, and divided by."""
    experts = Experts.random(E, H, I)
    layer = load(make("int4_w4a16_g32", params_dtype=torch.bfloat16), per_expert(experts))
    rounded = Experts(*(w.bfloat16() for w in experts)).quantized("int4_w4a16_g32")
    assert layer.w13_weight_scale.dtype == torch.bfloat16
    wanted = expected(rounded, "int4_w4a16_g32", layer, slice(None))
    assert all(map(torch.equal, numbers(layer), wanted))


def test_shared_experts_and_biases():
    experts, shared = Experts.random(E, H, I), Experts.random(1, H, 2 * I, seed=1)
    source = per_expert(experts)
    for field, name in zip(shared, ("gate_proj", "up_proj", "down_proj"), strict=True):
        source[f"shared_experts.{name}.weight"] = field[0]
    parts = Experts(
        *(torch.cat((w, *s.chunk(2, axis)))
          for w, s, axis in zip(experts, shared, (1, 1, 2), strict=True))
    )  # fmt: skip
    for scheme in ("fp8_tensor", "int4_w4a16_g128_zp"):
        layer = load(make(scheme, n_shared_experts=2), source)
        wanted = expected(parts.quantized(scheme), scheme, layer, slice(None))
        assert all(map(torch.equal, numbers(layer), wanted))
    for name, width in (("gate_proj", I), ("up_proj", I), ("down_proj", H)):
        source |= {f"experts.{e}.{name}.bias": torch.full((width,), 0.5 + e) for e in range(E)}
    source = {name: x for name, x in source.items() if "shared" not in name}
    layer = load(make("fp8_channel", has_bias=True), source)
    assert (layer.w2_bias == torch.arange(E)[:, None] + 0.5).all() and layer.w13_bias[1, 2] == 1.5


SHARED = ["gate_proj", "up_proj", "down_proj"]
SIDE_BY_SIDE = [
    ("unquantized", 24), ("fp8_channel", 24), ("int8_w8a16", 24), ("fp8_tensor", 24),
    ("fp8_block32", 64), ("int4_w4a16_g32", 64), ("int4_w4a16_g32_zp", 64), ("int4_w4a16_g32", 8),
    ("int4_w4a16_g128", 64), ("int4_w4a8_g128", 128), ("nvfp4_w4a16", 32), ("mxfp4_w4a16", 32),
    ("fp8_block128", 192), ("int4_w4a16_g32", 48), ("nvfp4_w4a16", 24), ("int4_w4a16_g32", 15),
]  # fmt: skip
"""Schemes, and I of each of four shared experts. In the last row of the table blocks or bytes reach
from one of them into the next."""


@pytest.mark.parametrize(("scheme", "width"), SIDE_BY_SIDE)
def test_shared_experts_that_are_stored_quantized(scheme, width):
    """Each has its rows or columns of all numbers, and the first one the bias of ``w2``."""
    shared, g = Experts.random(1, H, 4 * width, seed=1), torch.Generator().manual_seed(3)
    q = Experts(*map(QTensor, shared)) if scheme == "unquantized" else shared.quantized(scheme)
    source = {n.replace("experts.0", "shared_experts"): x for n, x in per_expert(q).items()}
    sizes = dict(zip(SHARED, (4 * width, 4 * width, H), strict=True))
    biases = {f"shared_experts.{n}.bias": torch.randn(m, generator=g) for n, m in sizes.items()}
    options = {"scheme": scheme, "n_shared_experts": 4, "has_bias": True}
    layer = moe_ops.FusedMoE(E, 2, H, width, **options)
    report = moe_ops.load_checkpoint(layer, source | biases, strict=False, progress=False)
    if (scheme, width) in SIDE_BY_SIDE[-4:]:
        assert report.mismatched and all("into the next" in text for text in report.mismatched)
        return
    assert not report.mismatched and len(report.loaded) == len(source | biases)
    exact = (moe_ops.dequantize_weight(x, get_scheme(scheme)) for x in q)
    parts = Experts(
        *(torch.stack(x[0].chunk(4, axis))
          for x, axis in zip(exact, (0, 0, 1), strict=True))
    )  # fmt: skip
    wanted = expected(parts, "unquantized", layer, slice(None))
    assert all(torch.equal(x[E:], y) for x, y in zip(numbers(layer), wanted, strict=True))
    gate, up, down = (x.to(layer.w2_bias.dtype) for x in biases.values())
    both = torch.stack((*gate.chunk(4), *up.chunk(4))).view(2, 4, width).transpose(0, 1)
    assert torch.equal(layer.w13_bias[E:].view(4, 2, -1)[..., :width], both)
    assert torch.equal(layer.w2_bias[E:], torch.stack((down, *[down * 0] * 3)))


def test_one_expert_at_a_time():
    """No more than a projection in float32 is there beside the checkpoint and the layer."""
    experts, largest = fused(Experts.random(E, H, I, torch.bfloat16)), []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
            out = function(*arguments, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype in (torch.float32, torch.bfloat16):
                storage = out.untyped_storage()
                if storage.data_ptr() not in known:
                    largest.append(storage.nbytes())
            return out

    known = {x.untyped_storage().data_ptr() for x in experts.values()}
    layer = make("int8_channel", params_dtype=torch.bfloat16)
    with Watch():
        load(layer, experts)
    assert max(largest) <= 4 * 2 * I * H


@pytest.mark.parametrize("write", [per_expert, fused])
def test_what_to_do_is_said(write):
    source = write(Experts.random(E, H, I, torch.bfloat16))
    layer = make("fp8_channel")
    with pytest.raises(ValueError, match="not quantized .*: pass quantize=True to .* fp8_channel"):
        load(layer, source, quantize=False)
    assert not layer.w13_weight.float().any()


def test_what_is_not_taken():
    experts = Experts.random(E, H, I)
    with pytest.raises(ValueError, match="quantize must be False for a layer without a scheme"):
        load(make(None), per_expert(experts))
    with pytest.raises(TypeError, match="quantize must be a bool"):
        load(make("fp8_channel"), per_expert(experts), quantize="yes")
    quantized = per_expert(experts.quantized("fp8_channel"))
    with pytest.raises(ValueError, match="12 mismatched .*dtype must be one of|quantize must be"):
        load(make("fp8_channel"), quantized)
    scaled = per_expert(experts) | {"experts.0.up_proj.weight_scale": torch.ones(I, 1)}
    with pytest.raises(ValueError, match="quantize must be False for weights that are quantized"):
        load(make("fp8_channel"), scaled)
    with pytest.raises(ValueError, match=r"missing \(w13_input_scale\[0\].w1"):
        load(make("fp8_tensor_static"), per_expert(experts))
    broken = per_expert(experts)
    broken["experts.1.up_proj.weight"][2, 3] = torch.nan
    with pytest.raises(ValueError, match="experts.1.up_proj.weight: scales must be finite"):
        load(make("fp8_channel"), broken)


def w4a8(experts):
    """compressed-tensors: int4 in groups, with bfloat16 scales and none of rows."""
    quantized = Experts(*(moe_ops.quantize_weight(w, "int4_w4a16_g32") for w in experts))
    return quantized, per_expert(quantized)


def derived(scale):
    """vLLM's ``convert_bf16_scales_to_fp8``: rows in fp8, over 8, and 8 times their scale."""
    s = scale.float()
    row = s.abs().amax(-1, keepdim=True) / torch.full((), 448.0)
    eighth = (s / row).to(torch.float8_e4m3fn).float() / 8
    return eighth.to(torch.float8_e4m3fn), row[..., 0] * 8


def test_w4a8_with_scales_in_floats():
    quantized, source = w4a8(Experts.random(E, H, I, torch.bfloat16))
    as_stored = Experts(
        *(q._replace(scale=scales, global_scale=rows)
          for q in quantized for scales, rows in [derived(q.scale)])
    )  # fmt: skip
    explicit = per_expert(as_stored)
    for rank in RANKS:
        layer = load(make("int4_w4a8_g32", **rank), source, quantize=False)
        assert same(layer, load(make("int4_w4a8_g32", **rank), explicit, quantize=False))
        wanted = expected(as_stored, "int4_w4a8_g32", layer, held(layer))
        assert all(map(torch.equal, numbers(layer), wanted))
        streamed = make("int4_w4a8_g32", **rank)
        assert len(list(streamed.load_weights(source.items()))) == 6 * len(held(layer))
        assert same(layer, streamed)
    dense = torch.cat([moe_ops.dequantize_weight(q, "int4_w4a16_g32") for q in quantized[:2]], 1)
    first = numbers(load(make("int4_w4a8_g32"), source, quantize=False))[0]
    assert (first - dense).abs().max() < 2**-3 * dense.abs().max()


def test_w4a8_scales_are_of_one_kind():
    _, source = w4a8(Experts.random(E, H, I, torch.bfloat16))
    name = f"experts.1.gate_proj.{CHANNEL}"
    with pytest.raises(ValueError, match=rf"1 duplicated \({name}\)"):
        load(make("int4_w4a8_g32"), source | {name: torch.ones(I)}, quantize=False)
    for bad, rule in ((-1.0, "finite and not negative"), (torch.nan, "finite"), (torch.inf, "fin")):
        scale = source["experts.1.gate_proj.weight_scale"].clone()
        scale[3, 1] = bad
        with pytest.raises(
            ValueError, match=f"experts.1.gate_proj.weight_scale: scales must be {rule}"
        ):
            load(make("int4_w4a8_g32"), source | {"experts.1.gate_proj.weight_scale": scale},
                 quantize=False)  # fmt: skip
    layer, wrong = make("int4_w4a8_g32"), torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"gate_proj.weight_scale.*: shape must be \(256, 4\)"):
        name = "experts.1.gate_proj.weight_scale"
        layer.weight_loader(layer.w13_weight_scale, wrong, name, "w1", 1)
    with pytest.raises(ValueError, match=r"gate_proj.weight_scale: shape must be \(256, 4\)"):
        load(layer, source | {name: wrong}, quantize=False)

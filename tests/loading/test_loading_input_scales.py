"""Static scales of tokens in checkpoints: factors, or what is divided by."""

import pytest
import torch
from checkpoints import NAMES, RANKS, Experts, per_expert

import moe_ops
from moe_ops.loading.given import SHARED, GivenScales

E, K, H, I = 8, 2, 64, 256  # noqa: E741


def nvfp4(x, divide):
    """compressed-tensors' ``nvfp4-pack-quantized``, or ModelOpt's NVFP4."""
    out = {}
    for field, q in x.quantized("nvfp4")._asdict().items():
        for e in range(E):
            amax = torch.tensor(3.0 + e + (field == "down"))
            weight, rows = q.global_scale[e], 2688 / amax
            out |= {
                f"experts.{e}.{NAMES[field]}.{suffix}": tensor
                for suffix, tensor in (
                    ("weight_packed" if divide else "weight", q.data[e]),
                    ("weight_scale", q.scale[e]),
                    ("weight_global_scale", (1 / weight).view(1)) if divide
                    else ("weight_scale_2", 1 / (1 / weight)),
                    ("input_global_scale", rows.view(1)) if divide else ("input_scale", 1 / rows),
                )
            }  # fmt: skip
    return out


def test_global_scales_of_tokens_divide_or_multiply():
    """Bit by bit one layer from both forms: the largest factor of all experts is for all."""
    x = Experts.random(E, H, I)
    for rank in RANKS:
        layers = [moe_ops.FusedMoE(E, K, H, I, scheme="nvfp4", **rank) for _ in range(3)]
        for layer, divide in zip(layers, (True, False), strict=False):
            assert moe_ops.load_checkpoint(layer, nvfp4(x, divide), progress=False).is_complete
        first = layers[0]
        list(layers[2].load_weights(nvfp4(x, divide=True).items()))
        layers[2].quant_method.process_weights_after_loading(layers[2])
        amax = 3.0 + E - 1
        for name, largest in (("w13", amax), ("w2", amax + 1)):
            scale = getattr(first, f"{name}_input_scale")
            assert (scale == 1 / (2688 / torch.tensor(largest))).all()
        g = torch.Generator().manual_seed(0)
        call = torch.randn(9, H, generator=g), torch.randn(9, E, generator=g)
        for other in layers[1:]:
            state = zip(first.state_dict().values(), other.state_dict().values(), strict=True)
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in state)
            assert torch.equal(first(*call), other(*call))


def test_tokens_that_are_not_quantized_have_no_global_scale():
    layer = moe_ops.FusedMoE(E, K, H, I, scheme="nvfp4_w4a16")
    source = nvfp4(Experts.random(E, H, I), divide=True)
    assert moe_ops.load_checkpoint(layer, source, progress=False).is_complete


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1.0, 1e-40])
def test_a_global_scale_of_tokens_that_cannot_be_used(value):
    source = nvfp4(Experts.random(E, H, I), divide=True)
    name = "experts.5.up_proj.input_global_scale"
    layer = moe_ops.FusedMoE(E, K, H, I, scheme="nvfp4")
    with pytest.raises(ValueError, match=f"{name}: .*positive and finite"):
        moe_ops.load_checkpoint(layer, source | {name: torch.tensor([value])}, progress=False)
    del source[name], source[name.replace("up", "gate")]
    with pytest.raises(ValueError, match=r"1 missing \(w13_input_scale\[5\].w1|2 missing"):
        moe_ops.load_checkpoint(layer, source, progress=False)


STATIC = ["fp8_tensor_static", "mxfp4_w4a8", "nvfp4"]
SPREAD = [
    *({"ep_size": 2, "ep_rank": rank} for rank in range(2)),
    *({"tp_size": 2, "tp_rank": rank} for rank in range(2)),
    {"ep_size": 2, "ep_rank": 1, "expert_placement_strategy": "round_robin"},
]


def scaled(scheme, experts=4, largest=1):
    """A checkpoint in which one expert's input scales are far above the others'."""
    source = per_expert(Experts.random(experts, H, 64).quantized(scheme), input_scale=0.5)
    for name in source:
        if f"experts.{largest}." in name and name.endswith("input_scale"):
            source[name] = torch.tensor(7.25 + ("down" in name))
    return source


def layer_of(scheme, **options):
    return moe_ops.FusedMoE(4, K, H, 64, scheme=scheme, **options)


def by_weight_loader(layer, source):
    """As vLLM's models load: every rank hands over every expert."""
    mapping = moe_ops.parallel.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", 4)
    for name, x in source.items():
        for param_name, weight_name, expert, shard in mapping:
            if weight_name in f"{name}.":
                which = "w13" if "w13" in param_name else "w2"
                param = getattr(layer, f"{which}_{name.split('.')[-1]}")
                layer.weight_loader(param, x, name, shard, expert, return_success=True)
    layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("scheme", STATIC)
@pytest.mark.parametrize("largest", [0, 3])
def test_static_scales_do_not_depend_on_ranks(scheme, largest):
    source = scaled(scheme, largest=largest)
    for load in (lambda x, s: moe_ops.load_checkpoint(x, s, progress=False), by_weight_loader):
        for rank in ({}, *SPREAD):
            layer = layer_of(scheme, **rank)
            load(layer, source)
            for name, scale in (("w13_input_scale", 7.25), ("w2_input_scale", 8.25)):
                assert (getattr(layer, name) == scale).all(), (name, rank)
            layer.quant_method.process_weights_after_loading(layer)  # may be called again
            assert (layer.w2_input_scale == 8.25).all()


def test_scales_that_a_load_passed_on():
    """They count when weights are processed, unless their load has failed."""
    source, name = scaled("fp8_tensor_static", largest=3), "experts.0.down_proj.weight"
    own = {key: x for key, x in source.items() if key.startswith(("experts.0", "experts.1"))}
    rest = {key: x for key, x in source.items() if key != name}
    layer, other = (layer_of("fp8_tensor_static", ep_size=2, ep_rank=0) for _ in range(2))
    assert moe_ops.load_checkpoint(layer, rest, strict=False, progress=False).missing
    with pytest.raises(ValueError, match="1 missing"):
        moe_ops.load_checkpoint(other, rest, progress=False)
    largest = float(own["experts.1.down_proj.input_scale"])
    for each, weights, scale in ((layer, {name: source[name]}, 8.25), (other, own, largest)):
        assert set(each.load_weights(weights.items())) == weights.keys()
        each.quant_method.process_weights_after_loading(each)
        assert (each.w2_input_scale == scale).all()


def test_ranks_of_a_static_scheme_add_up_to_one():
    """Tokens are quantized alike on every rank, so that only the order of sums differs."""
    source = scaled("fp8_tensor_static")
    g = torch.Generator().manual_seed(0)
    call = torch.randn(9, H, generator=g), torch.randn(9, 4, generator=g)

    def run(**rank):
        layer = layer_of("fp8_tensor_static", **rank)
        moe_ops.load_checkpoint(layer, source, progress=False)
        return layer(*call)

    whole = run()
    torch.testing.assert_close(sum(run(**rank) for rank in SPREAD[:2]), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rank", SPREAD[:2])
def test_a_scale_of_another_ranks_expert_is_needed(rank):
    source = scaled("fp8_tensor_static")
    for expert in (0, 3):
        name = f"experts.{expert}.down_proj.input_scale"
        less = {n: x for n, x in source.items() if n != name}
        with pytest.raises(ValueError, match=rf"1 missing \(w2_input_scale\[{expert}\].w2\)"):
            moe_ops.load_checkpoint(layer_of("fp8_tensor_static", **rank), less, progress=False)
        bad = source | {name: torch.tensor(torch.nan)}
        with pytest.raises(ValueError, match=f"{name}: the scale must be positive and finite"):
            moe_ops.load_checkpoint(layer_of("fp8_tensor_static", **rank), bad, progress=False)


@pytest.mark.parametrize("rank", [{}, SPREAD[1]])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_a_layer_is_loaded_again(rank, activation):
    """With smaller and larger scales, by either way, and without what the first load left."""
    sources = [scaled("fp8_tensor_static")]
    for factor in (0.5, 3.0):
        sources.append({n: x * factor if x.dim() == 0 else x for n, x in sources[0].items()})
    for source in sources:
        for name in [n for n in source if "up_proj.weight_scale" in n]:
            source[name] = source[name.replace("up_proj", "gate_proj")]  # rows may alternate
    layer = layer_of("fp8_tensor_static", activation=activation, **rank)
    for load in (by_weight_loader, lambda x, s: moe_ops.load_checkpoint(x, s, progress=False)):
        for source in (*sources, sources[0]):
            fresh = layer_of("fp8_tensor_static", activation=activation, **rank)
            moe_ops.load_checkpoint(fresh, source, progress=False)
            load(layer, source)
            for a, b in zip(layer.parameters(), fresh.parameters(), strict=True):
                assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))


def test_a_state_ends_a_round_of_loading():
    """Scales that were handed over before belong to other weights."""
    layer, other = (layer_of("fp8_tensor_static", **SPREAD[1]) for _ in range(2))
    moe_ops.load_checkpoint(other, scaled("fp8_tensor_static", largest=3), progress=False)
    layer.weight_loader(layer.w2_input_scale, torch.tensor(99.0), "w2.input_scale", "w2", 0)
    layer.load_state_dict(other.state_dict())
    layer.quant_method.process_weights_after_loading(layer)
    assert (layer.w2_input_scale == 8.25).all()


def test_scales_of_one_round():
    """The last scale of a projection counts; gate and up agree within 1e-5, or exactly."""
    given = GivenScales()
    assert [given.take("a", 0, "w1", x) for x in (1.0, 3.0, 2.0)] == [1.0, 3.0, 2.0]
    assert given.take("a", 0, "w3", 2.000005) == 2.000005
    with pytest.raises(ValueError, match="input_scales of w1 and w3 .* 2.0 vs. 2.00002"):
        given.take("a", 0, "w3", 2.00002)
    given.take("b", 0, "w1", 9.0)
    assert (given.largest("a"), given.largest("b"), given.largest("c")) == (2.000005, 9.0, 0.0)
    with pytest.raises(ValueError, match="must be equal where their rows alternate"):
        given.take("b", 0, "w3", 9.000001, SHARED)

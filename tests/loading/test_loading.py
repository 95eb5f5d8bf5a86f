"""load_checkpoint: every scheme and family, cut over ranks, bit by bit."""

import pytest
import torch
from checkpoints import MIXTRAL, RANKS, Experts, expected, fused, held, numbers, per_expert
from hypothesis import given
from hypothesis import strategies as st

import moe_ops
from moe_ops.scheme import SCHEMES

E, K, H, I = 8, 2, 256, 512  # noqa: E741


def make(scheme=None, experts=E, hidden=H, width=I, **options):
    return moe_ops.FusedMoE(experts, K, hidden, width, scheme=scheme, **options)


def load(layer, source, **how):
    return moe_ops.load_checkpoint(layer, source, progress=False, **how)


def check(layer, experts, scheme):
    wanted = expected(experts, scheme or "unquantized", layer, held(layer))
    assert all(map(torch.equal, numbers(layer), wanted))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_on_every_rank(scheme):
    experts = Experts.random(E, H, I).quantized(scheme)
    activation = SCHEMES[scheme].activation
    static = activation is not None and (activation.static or activation.global_scale)
    source = per_expert(experts, input_scale=0.5 if static else None)
    for rank in RANKS:
        layer = make(scheme, **rank)
        assert load(layer, source).is_complete
        check(layer, experts, scheme)
        if static:
            assert (layer.w13_input_scale == 0.5 + (E - 1) / 64).all()


@pytest.mark.parametrize(
    ("scheme", "width", "tp_size", "refined", "each"),
    [
        ("fp8_block128", 768, 4, "fp8_block64", 192),
        ("fp8_block128", 704, 1, "fp8_block64x128", 704),
        ("fp8_block128", 192, 4, "fp8_block128", 128),  # gcd 16: padded instead
        ("fp8_block128_ue8m0", 352, 1, "fp8_block32x128_ue8m0", 352),
        ("fp8_w8a16_block128", 704, 2, "fp8_w8a16_block32", 352),
        ("fp8_block128", 100, 2, "fp8_block128", 128),
        ("int8_block128", 576, 3, "int8_block64", 192),
        ("int4_w4a16_g128", 704, 2, "int4_w4a16_g32", 352),
        ("int4_w4a16_g128_zp", 704, 2, "int4_w4a16_g32_zp", 352),
        ("int4_w4a16_g128_zp", 704, 1, "int4_w4a16_g128_zp", 704),
        ("int8_w8a16_g128", 192, 2, "int8_w8a16_g32", 96),
        ("mxfp4_w4a16", 360, 4, "mxfp4_w4a16", 96),
        ("nvfp4_w4a16", 360, 4, "nvfp4_w4a16", 96),
        ("int4_w4a16_channel", 30, 4, "int4_w4a16_channel", 8),
        ("fp8_channel", 30, 4, "fp8_channel", 8),
        (None, 30, 4, "unquantized", 8),
    ],
)
def test_widths_that_no_block_divides(scheme, width, tp_size, refined, each):
    experts = Experts.random(3, 64, width)
    experts = experts if scheme is None else experts.quantized(scheme)
    for rank in range(tp_size):
        layer = make(scheme, 3, 64, width, tp_size=tp_size, tp_rank=rank)
        load(layer, per_expert(experts))
        assert (layer.scheme.name, layer.sizes.intermediate_size) == (refined, each)
        check(layer, experts, scheme)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_tensors_of_all_experts(transposed, interleaved, activation):
    experts = Experts.random(E, 32, 24)
    source = fused(experts, transposed=transposed, interleaved=interleaved)
    for rank in RANKS:
        layer = make(None, E, 32, 24, activation=activation, **rank)
        load(layer, source, layout=moe_ops.loading.CheckpointLayout(interleaved=interleaved))
        check(layer, experts, None)


OWN = {"w13": "gate_up_proj", "w2": "down_proj"}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(32, 32), (32, 16)])
def test_one_square_tensor_is_told_by_the_other(sizes, transposed):
    """w2 with I = H, w13 with 2I = H; whichever comes first."""
    experts = Experts.random(E, *sizes)
    source = fused(experts, transposed=transposed)
    for names in (list(source), list(source)[::-1]):
        layer = make(None, E, *sizes)
        load(layer, {name: source[name] for name in names})
        check(layer, experts, None)


@pytest.mark.parametrize("sizes", [(32, 32), (32, 16), (32, 24)])
def test_tensors_by_the_names_of_a_layer_are_not_transposed(sizes):
    """Neither a square one beside one that is not, whichever comes first; a layout may say so."""
    experts = Experts.random(E, *sizes)
    plain = fused(experts, transposed=True)
    source = {f"{w}_weight": plain[f"experts.{n}"] for w, n in OWN.items()}
    for names in (list(source), list(source)[::-1]):
        turned = {name: source[name] for name in names}
        with pytest.raises(ValueError, match=r"mismatched \(w.*_weight: expert 0: shape must be"):
            load(make(None, E, *sizes), turned)
        layer = make(None, E, *sizes)
        load(layer, turned, layout="llama4")
        check(layer, experts, None)


def test_two_square_tensors_need_a_layout():
    w = Experts.random(E, 32, 32)
    source = {"experts.up_proj": w.up, "experts.down_proj": w.down}
    layer = make(None, E, 32, 32, activation="relu2_no_mul")
    with pytest.raises(ValueError, match="layout must set transposed"):
        load(layer, source)
    load(layer, source, layout="fused")
    assert torch.equal(layer.w13_weight, w.up)
    load(layer, source, layout="llama4")
    assert torch.equal(layer.w13_weight, w.up.transpose(1, 2))


@given(
    experts=st.integers(1, 5), width=st.integers(1, 40), tp_size=st.integers(1, 5),
    names=st.sampled_from([{}, {"names": MIXTRAL}]), gated=st.booleans(),
    seed=st.integers(0, 99), data=st.data(),
)  # fmt: skip
def test_any_size_on_any_rank(experts, width, tp_size, names, gated, seed, data):
    weights = Experts.random(experts, 16, width, seed=seed)
    source = per_expert(weights, **names)
    if not gated:
        source = {n: x for n, x in source.items() if "gate_proj" not in n and "w3" not in n}
    rank = data.draw(st.integers(0, tp_size - 1))
    options = {"tp_size": tp_size, "tp_rank": rank}
    options["activation"] = "silu" if gated else "relu2_no_mul"
    layer = moe_ops.FusedMoE(experts, 1, 16, width, **options)
    order = data.draw(st.permutations(sorted(source)))
    report = load(layer, ((name, source[name]) for name in order))
    assert set(report.loaded) == set(source)
    first, second = expected(weights, "unquantized", layer, slice(None))
    if not gated:
        first = first.chunk(2, 1)[0 if names else 1]
    assert torch.equal(layer.w13_weight, first) and torch.equal(layer.w2_weight, second)


def test_redundant_experts_hold_copies():
    weights = Experts.random(6, 32, 24)
    for rank in range(2):
        layer = make(
            None, 6, 32, 24, enable_eplb=True, num_redundant_experts=2, ep_size=2, ep_rank=rank
        )
        load(layer, per_expert(weights))
        assert held(layer) == [[0, 1, 2, 3], [4, 5, 0, 1]][rank]
        check(layer, weights, None)


def test_shared_experts_beside_the_routed_ones():
    """Two of them side by side along I, as DeepSeek-V2 stores them; on the first rank."""
    weights, shared = Experts.random(4, 32, 24), Experts.random(1, 32, 48, seed=1)
    source = per_expert(weights)
    for field, name in zip(shared, ("gate_proj", "up_proj", "down_proj"), strict=True):
        source[f"shared_experts.{name}.weight"] = field[0]
    parts = Experts(
        *(torch.cat((w, *s.chunk(2, axis)))
          for w, s, axis in zip(weights, shared, (1, 1, 2), strict=True))
    )  # fmt: skip
    for rank in range(2):
        layer = make(None, 4, 32, 24, n_shared_experts=2, ep_size=2, ep_rank=rank)
        load(layer, source)
        assert held(layer) == [[0, 1, 4, 5], [2, 3]][rank]
        check(layer, parts, None)


def test_a_wider_layer_has_zeros_behind():
    experts = Experts.random(4, 2880 // 10, 24, torch.bfloat16)
    config = moe_ops.FusedMoEParallelConfig(use_ep=True, all2all_backend="deepep_high_throughput")
    layer = make(None, 4, 288, 24, params_dtype=torch.bfloat16, moe_parallel_config=config)
    load(layer, per_expert(experts))
    assert layer.hidden_size == 512
    assert torch.equal(layer.w13_weight[:, :24, :288], experts.gate)
    assert not layer.w13_weight[..., 288:].any() and not layer.w2_weight[:, 288:].any()


@pytest.mark.parametrize("scheme", [None, "fp8_channel"])
def test_parameters_that_were_cast_stay_themselves(scheme):
    """However they were cast: optimizers and captured graphs hold them."""
    experts = Experts.random(E, H, I)
    source = per_expert(experts if scheme is None else experts.quantized(scheme))
    rows = {"gate_proj": I, "up_proj": I, "down_proj": H}
    names = [(f"experts.{e}.{name}.bias", n) for e in range(E) for name, n in rows.items()]
    source |= {name: torch.randn(n) for name, n in names}
    layer, whole = (make(scheme, has_bias=True, params_dtype=torch.float32) for _ in range(2))
    load(whole, source)
    layer.to(torch.bfloat16)
    for x in layer.parameters():
        if x.dtype == torch.bfloat16:
            x.data = x.data.half()
    before = {name: (x, x.dtype, x.data_ptr()) for name, x in layer.named_parameters()}
    load(layer, source)
    for name, x in layer.named_parameters():
        assert (x, x.dtype, x.data_ptr()) == before[name]
        assert torch.equal(x.float(), whole.get_parameter(name).to(x.dtype).float())

"""Weights whose columns were quantized in an order of their own, as GPTQ's tools write them."""

import copy
import pickle

import pytest
import torch
from act_ordered import E, H, I, act_ordered, compressed, gptq, rows
from checkpoints import NAMES, RANKS, Experts, expected, held, numbers
from hypothesis import given
from hypothesis import strategies as st

import moe_ops
from moe_ops.loading.act_order import ActOrder
from moe_ops.loading.names import CheckpointLayout
from moe_ops.loading.stored import Form
from moe_ops.testing import (
    Problem,
    assert_layer_matches,
    bounded_oracle,
    make_inputs,
    reference_experts,
)

K = 2


def make(scheme, num_experts=E, width=I, **options):
    return moe_ops.FusedMoE(num_experts, K, H, width, scheme=scheme, **options)


def load(layer, source, **how):
    report = moe_ops.load_checkpoint(layer, source, progress=False, **how)
    assert report.is_complete
    return layer


def check(layer, x):
    """Bit by bit: numbers, and the order in which a rank's experts take their input."""
    experts = held(layer)
    assert all(
        map(torch.equal, numbers(layer), expected(x.sorted(), "unquantized", layer, experts))
    )
    wanted = torch.stack([x.order.gate[e] for e in experts])
    assert layer.w13_input_order.dtype == torch.int32
    assert torch.equal(layer.w13_input_order.expand(len(experts), H).long(), wanted)


@pytest.mark.parametrize("write", [gptq, compressed])
@pytest.mark.parametrize("scheme", ["int4_w4a16_g32", "int4_w4a16_g64_zp", "int8_w8a16_g32"])
def test_every_rank(scheme, write):
    bits = 8 if scheme.startswith("int8") else 4
    x = act_ordered(scheme)
    source = write(x, bits)
    for rank in RANKS:
        for entries in (source, reversed(source.items())):  # groups before weights, and behind
            layer = load(make(scheme, **rank), entries, layout="gptq")
            check(layer, x)


def test_orders_of_rows():
    """Every row of an expert has its order; gate and up in one tensor have the same."""
    quant = moe_ops.scheme.get_scheme("int4_w4a16_g32").weight
    form = Form(8, 64, torch.uint8, quant, quant, CheckpointLayout())
    groups = torch.arange(64) % 2
    order = ActOrder()
    order.note(0, "w13", groups, form)
    found = order.input_order({0: [0, 2], 1: [1], 2: []}, 70, torch.device("cpu"), is_gated=True)
    plain = torch.arange(70, dtype=torch.int32)
    mine = torch.cat((plain[:64:2], plain[1:64:2], plain[64:]))
    assert torch.equal(found, torch.stack((mine, plain, mine)))
    whole = moe_ops.scheme.get_scheme("int8_w8a16").weight  # has no groups to sort
    order.note(1, "w1", torch.zeros(64), form._replace(quant=whole))
    assert (1, "w1") not in order.columns


def test_groups_that_ranks_share():
    """96 columns of a rank: groups of 64 become groups of 32, after they were sorted."""
    x = act_ordered("int4_w4a16_g64", width=192)
    for rank in range(2):
        layer = load(make("int4_w4a16_g64", width=192, tp_size=2, tp_rank=rank), compressed(x))
        assert layer.scheme.name == "int4_w4a16_g32"
        check(layer, x)


def inputs_of(problem, x, seed=3):
    """A call on the numbers that the checkpoint stands for, in the order that it has them."""
    w1 = torch.cat((x.dense.gate, x.dense.up), 1)
    inputs = make_inputs(problem, seed=seed)
    dtype = problem.dtype
    return inputs._replace(w1=w1.to(dtype), w2=x.dense.down.to(dtype))


def applied(layer, inputs):
    return layer.quant_method.apply(
        layer, inputs.hidden_states, inputs.topk_weights, inputs.topk_ids
    )


@pytest.mark.parametrize("routing", ["uniform", "duplicates", "holes"])
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_against_the_oracle(routing, on_input, same):
    scheme, width = "int4_w4a16_g32_zp", I
    x = act_ordered(scheme, same=same)
    layer = load(make(scheme, apply_router_weight_on_input=on_input), gptq(x))
    assert layer.w13_input_order.shape == (1 if same else E, H)
    problem = Problem(33, E, K, H, width, routing=routing, on_input=on_input)
    inputs = inputs_of(problem, x)
    out = applied(layer, inputs)
    assert_layer_matches(out, bounded_oracle(problem, inputs), reference_experts(problem, inputs))


@pytest.mark.parametrize("ranks", ["tp_size", "ep_size"])
def test_ranks_add_up(ranks):
    x = act_ordered("int4_w4a16_g32")
    problem = Problem(17, E, K, H, I)
    inputs, name = inputs_of(problem, x), ranks.replace("size", "rank")
    parts = [
        applied(load(make("int4_w4a16_g32", **{ranks: 2, name: r}), gptq(x)), inputs)
        for r in range(2)
    ]
    assert_layer_matches(
        sum(parts), bounded_oracle(problem, inputs), reference_experts(problem, inputs)
    )


def test_sorted_columns_change_nothing_else():
    """Bit by bit the layer of sorted weights on sorted tokens, whose sums run the same way."""
    x = act_ordered("int4_w4a16_g32", same=True)
    layer = load(make("int4_w4a16_g32"), compressed(x))
    plain = make("int4_w4a16_g32")
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if "order" not in k})
    each = load(make("int4_w4a16_g32"), compressed(x))
    each.w13_input_order = layer.w13_input_order.repeat(E, 1)
    inputs = inputs_of(Problem(9, E, K, H, I, dtype=torch.bfloat16, routing="holes"), x)
    moved = inputs._replace(hidden_states=inputs.hidden_states[:, x.order.gate[0]].contiguous())
    wanted = applied(plain.to(torch.bfloat16), moved)
    for one in (layer, each):
        assert torch.equal(applied(one.to(torch.bfloat16), inputs), wanted)


def test_biases_channels_and_rows_that_alternate():
    """Whatever belongs to a row of gate and up moves with it."""
    x = act_ordered("int4_w4a8_g64")
    g = torch.Generator().manual_seed(1)
    gate, up, down = (torch.randn(E, n, generator=g) for n in (I, I, H))
    source = compressed(x)
    for field, bias, q in zip(Experts._fields, (gate, up, down), x.scales, strict=True):
        for e in range(E):
            name = f"experts.{e}.{NAMES[field]}."
            source |= {f"{name}bias": bias[e], f"{name}weight_chan_scale": q.global_scale[e]}
    for activation in ("silu", "swigluoai"):
        layer = load(make("int4_w4a8_g64", activation=activation, has_bias=True), source)
        check(layer, x)
        moved = [rows(bias, x.order.down) for bias in (gate, up)]
        both = torch.cat(moved, 1)
        if layer.sizes.interleaved:
            both = torch.stack(moved, 2).flatten(1)
        assert torch.equal(layer.w13_bias, both) and torch.equal(layer.w2_bias, down)


def test_without_a_gate():
    x = act_ordered("int4_w4a16_g32")
    source = {n: t for n, t in gptq(x).items() if "gate_proj" not in n}
    layer = load(make("int4_w4a16_g32", activation="relu2_no_mul"), source)
    assert torch.equal(numbers(layer)[0], x.sorted().up)
    assert torch.equal(layer.w13_input_order.long(), torch.stack(x.order.up))


def test_a_saved_layer_copies_and_another_checkpoint():
    x = act_ordered("int4_w4a16_g32")
    layer = load(make("int4_w4a16_g32"), gptq(x))
    inputs = inputs_of(Problem(5, E, K, H, I), x)
    wanted = applied(layer, inputs)
    again = load(make("int4_w4a16_g32"), layer.state_dict())
    for one in (again, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(applied(one, inputs), wanted)
    for rank in RANKS:
        check(load(make("int4_w4a16_g32", **rank), layer.state_dict()), x)
    before = layer.w13_input_order.data_ptr()
    other = act_ordered("int4_w4a16_g32", seed=1)
    check(load(layer, gptq(other)), other)
    assert layer.w13_input_order.data_ptr() == before  # captured graphs read it
    load(layer, {n: t for n, t in gptq(other).items() if "g_idx" not in n})
    assert layer.w13_input_order is None


def test_one_graph_for_every_number_of_tokens():
    x = act_ordered("int4_w4a16_g32")
    layer = load(make("int4_w4a16_g32"), gptq(x))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (7, 2, 33):
        g = torch.Generator().manual_seed(tokens)
        call = torch.randn(tokens, H, generator=g), torch.randn(tokens, E, generator=g)
        with torch.compiler.set_stance("fail_on_recompile" if tokens == 33 else "default"):
            assert torch.equal(compiled(*call), layer(*call))


def test_orders_that_say_nothing():
    """Static groups and ``actorder="weight"`` leave columns in order; -1 stands for no groups."""
    x = act_ordered("int4_w4a16_g32")
    plain = [torch.arange(n) // 32 for n in (H, H, I)]
    for write, g_idx in (
        (gptq, plain), (compressed, plain), (compressed, [torch.full_like(p, -1) for p in plain]),
    ):  # fmt: skip
        static = x._replace(g_idx=Experts(*([p] * E for p in g_idx)))
        layer = load(make("int4_w4a16_g32"), write(static))
        assert layer.w13_input_order is None


def test_down_alone_costs_nothing():
    x = act_ordered("int4_w4a16_g32")
    plain = [torch.arange(H)] * E
    x = x._replace(order=Experts(plain, plain, x.order.down))
    source = gptq(act_ordered("int4_w4a16_g32"))
    for name in [n for n in source if n.endswith(("gate_proj.g_idx", "up_proj.g_idx"))]:
        source[name] = torch.arange(H) // 32
    layer = load(make("int4_w4a16_g32"), source)
    assert layer.w13_input_order is None
    assert torch.equal(numbers(layer)[1], x.sorted().down)


@given(
    hidden=st.sampled_from((32, 40, 96)), width=st.sampled_from((32, 48, 80, 96)),
    scheme=st.sampled_from(("int4_w4a16_g32", "int4_w4a16_g32_zp", "int8_w8a16_g32")),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_size(hidden, width, scheme, seed):
    """The last group may be partial, wherever its columns are."""
    x = act_ordered(scheme, seed, 2, width, hidden)
    layer = moe_ops.FusedMoE(2, 1, hidden, width, scheme=scheme)
    load(layer, gptq(x, 8 if scheme.startswith("int8") else 4), layout="gptq")
    wanted = x.sorted()
    assert torch.equal(numbers(layer)[0], torch.cat(wanted[:2], 1))
    assert torch.equal(numbers(layer)[1], wanted.down)
    order = torch.arange(hidden) if hidden == 32 else layer.w13_input_order  # one group, or more
    assert torch.equal(order.expand(2, hidden).long(), torch.stack(x.order.gate))


@pytest.mark.kernel
def test_on_a_device(device):
    x = act_ordered("int4_w4a16_g32")
    layer = load(make("int4_w4a16_g32", device=device), gptq(x))
    problem = Problem(7, E, K, H, I, routing="holes")
    inputs = inputs_of(problem, x)
    exact, reference = bounded_oracle(problem, inputs), reference_experts(problem, inputs)
    moved = inputs._replace(
        hidden_states=inputs.hidden_states.to(device),
        topk_weights=inputs.topk_weights.to(device), topk_ids=inputs.topk_ids.to(device),
    )  # fmt: skip
    assert_layer_matches(applied(layer, moved).cpu(), exact, reference)


def test_shared_experts_side_by_side():
    """Two of them in one down projection: its columns are sorted before they are parted."""
    x = act_ordered("int4_w4a16_g32")
    shared = act_ordered("int4_w4a16_g32", seed=5, num_experts=1, width=2 * I)
    source = compressed(x) | {
        name.replace("experts.0", "shared_experts"): tensor
        for name, tensor in compressed(shared).items()
    }
    layer = load(make("int4_w4a16_g32", n_shared_experts=2), source)
    w13, w2 = numbers(layer)
    gate, up, down = (w[0] for w in shared.sorted())
    for i in range(2):
        mine = slice(i * I, (i + 1) * I)
        assert torch.equal(w13[E + i], torch.cat((gate[mine], up[mine])))
        assert torch.equal(w2[E + i], down[:, mine])
        assert torch.equal(layer.w13_input_order[E + i].long(), shared.order.gate[0])


def test_gate_and_up_in_two_orders():
    source = gptq(act_ordered("int4_w4a16_g32", halves=False))
    layer = make("int4_w4a16_g32")
    before = layer.w13_weight.clone()
    with pytest.raises(NotImplementedError, match="gate and up projections of expert 0 must be eq"):
        moe_ops.load_checkpoint(layer, source, progress=False)
    assert torch.equal(layer.w13_weight, before)


def test_groups_that_cannot_be():
    source = gptq(act_ordered("int4_w4a16_g32"))
    layer, name = make("int4_w4a16_g32"), "experts.1.down_proj.g_idx"
    for bad in (torch.zeros(I), torch.arange(I) // 16, torch.arange(I) // 32 - 1):
        with pytest.raises(ValueError, match=f"{name}: groups must be 0, 1, .. of 32 columns"):
            moe_ops.load_checkpoint(layer, source | {name: bad.int()}, progress=False)
    with pytest.raises(ValueError, match=rf"{name}: shape must be \({I},\)"):
        moe_ops.load_checkpoint(layer, source | {name: torch.zeros(3)}, progress=False)
    saved = load(layer, source).state_dict()
    broken = saved | {"w13_input_order": torch.zeros(1, H, dtype=torch.int32)}
    with pytest.raises(ValueError, match="expert 0: numbers must be a permutation of"):
        moe_ops.load_checkpoint(layer, broken, progress=False)


def test_parts_of_a_checkpoint():
    source = gptq(act_ordered("int4_w4a16_g32"))
    part = {n: t for n, t in source.items() if "experts.2" not in n}
    layer = make("int4_w4a16_g32")
    with pytest.raises(ValueError, match=r"with act-order, source must hold this layer exactly"):
        moe_ops.load_checkpoint(layer, part, strict=False, progress=False)
    with pytest.raises(NotImplementedError, match="gate_proj.g_idx must be in the order of the"):
        list(layer.load_weights(source.items()))


def test_kernels_take_one_order_for_all():
    x = act_ordered("int4_w4a16_g32", same=True)
    inputs = inputs_of(Problem(5, E, K, H, I), x)
    layer = load(make("int4_w4a16_g32"), gptq(x))
    wanted = applied(layer, inputs)
    prepare = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP()
    layer.kernel = moe_ops.FusedMoEKernel(
        prepare, layer.quant_method.select_gemm_impl(prepare, layer)
    )
    assert torch.equal(applied(layer, inputs), wanted)
    load(layer, gptq(act_ordered("int4_w4a16_g32")))
    with pytest.raises(NotImplementedError, match="layer.kernel must be None if the act-order"):
        applied(layer, inputs)

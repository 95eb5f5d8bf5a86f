"""Adapters in a layer: those of `fused_experts`, in any scheme and with any router."""

import pytest
import torch
from act_ordered import act_ordered, gptq
from small_layers import TABLE, WORDS, E, H, I, K, T, batch, kernel_of

import moe_ops
from moe_ops.scheme import SCHEMES
from moe_ops.training import ExpertLora

L, R = 3, 4
WIDE = 128
"""H and I for schemes with groups, and for packed weights."""


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def adapters(layer, tokens=T, device="cpu", ids=None, **more):
    """Adapters of all experts of a layer; tokens have different ones, or none."""
    experts, hidden, width = layer.w13_weight.shape[0], layer.hidden_size, layer.intermediate_size
    shapes = ((R, hidden), (2 * width, R), (R, width), (hidden, R))
    a1, b1, a2, b2 = (
        random(L, experts, *s, seed=i).to(device).requires_grad_() for i, s in enumerate(shapes)
    )
    ids = torch.arange(tokens, device=device) % (L + 1) if ids is None else ids
    return ExpertLora((a1, b1), (a2, b2), ids, torch.tensor([0.5, 2.0, 1.0], device=device))


def layer_of(scheme="unquantized", device="cpu", dtype=torch.float32, **options):
    """A layer of random weights."""
    plain = moe_ops.FusedMoE(E, K, WIDE, WIDE, params_dtype=dtype, device=device)
    for i, p in enumerate(plain.parameters()):
        p.data.copy_(random(*p.shape, seed=i))
    if scheme == "unquantized":
        layer = moe_ops.FusedMoE(E, K, WIDE, WIDE, params_dtype=dtype, device=device, **options)
        layer.load_state_dict(plain.state_dict(), strict=False)
        return layer
    quant = SCHEMES[scheme].activation
    given = quant is not None and (quant.static or quant.global_scale)
    x, logits = (t.to(device, dtype) for t in batch(hidden=WIDE))
    calls = {"calibrate": lambda model: model(x, logits)} if given else {}
    layer = moe_ops.quantize_(plain, scheme, progress=False, **calls)
    layer.unpack_()  # on some GPUs, `quantize_` packs
    return layer


def expected(layer, x, logits, lora, **more):
    """`fused_experts` on what the layer's router chooses."""
    weights, ids, _ = layer.route(x, logits, **more)
    config = layer.quant_method.get_fused_moe_quant_config(layer)
    return moe_ops.fused_experts(
        x, layer.w13_weight, layer.w2_weight, weights, ids, activation=layer.activation,
        apply_router_weight_on_input=layer.apply_router_weight_on_input, quant_config=config,
        lora=lora, batch_invariant=layer.batch_invariant,
    )  # fmt: skip


def step(run, x, logits, lora):
    """The result and the gradients of tokens, logits and factors."""
    given = [x.clone().requires_grad_(), logits.clone().requires_grad_()]
    out = run(*given, lora)
    return [out, *torch.autograd.grad(out.square().sum(), [*given, *lora.w1, *lora.w2])]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme, device):
    layer = layer_of(scheme, device, torch.bfloat16)
    x, logits = (t.to(device, torch.bfloat16) for t in batch(hidden=WIDE))
    lora = adapters(layer, device=device)
    found = step(lambda a, b, lora: layer(a, b, lora=lora), x, logits, lora)
    near = step(lambda *given: expected(layer, *given), x, logits, lora)
    for a, b in zip(found, near, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert not torch.equal(found[0], layer(x, logits))
        assert torch.equal(found[0], layer(x, logits, lora=lora))


@pytest.mark.parametrize(
    "scheme", ["int4_w4a16_g32", "mxfp4_w4a16", "int8_w8a16", "int4_w4a8_g128"]
)
def test_packed(scheme, device):
    """Adapters train over packed weights as they do over plain ones."""
    layer = layer_of(scheme, device, torch.bfloat16)
    x, logits = (t.to(device, torch.bfloat16) for t in batch(hidden=WIDE))
    lora = adapters(layer, device=device)
    plain = step(lambda a, b, lora: layer(a, b, lora=lora), x, logits, lora)
    layer.pack_()
    found = step(lambda a, b, lora: layer(a, b, lora=lora), x, logits, lora)
    for a, b in zip(found, plain, strict=True):  # on Hopper, sums in other orders
        assert (a - b).norm() <= torch.finfo(torch.bfloat16).eps * b.norm()


def test_held_as_fp8(device):
    layer = layer_of("mxfp4_w4a8", device, torch.bfloat16)
    x, logits = (t.to(device, torch.bfloat16) for t in batch(hidden=WIDE))
    lora = adapters(layer, device=device)
    plain = step(lambda a, b, lora: layer(a, b, lora=lora), x, logits, lora)
    layer.as_fp8_()
    found = step(lambda a, b, lora: layer(a, b, lora=lora), x, logits, lora)
    for a, b in zip(found, plain, strict=True):  # sums in other orders, of the same numbers
        assert (a - b).norm() <= torch.finfo(torch.bfloat16).eps * b.norm()


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"chunk_size": 4}, {}),
        ({"batch_invariant": True}, {}),
        ({"apply_router_weight_on_input": True}, {}),
        ({"hash_indices_table": TABLE, "scoring_func": "sqrtsoftplus"}, {"input_ids": WORDS}),
        ({}, {"is_padding": torch.arange(T) % 2 == 0}),
    ],
)
def test_options(options, call, device):
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    layer = layer_of(device=device, **options)
    call = {name: x.to(device) for name, x in call.items()}
    x, logits = (t.to(device) for t in batch(hidden=WIDE))
    lora = adapters(layer, device=device)
    with torch.no_grad():
        near = expected(layer, x, logits, lora, **call)
        torch.testing.assert_close(layer(x, logits, lora=lora, **call), near)


def test_leading_axes_and_shared_experts(device):
    shared = torch.nn.Linear(WIDE, WIDE, device=device)
    layer = layer_of(device=device, shared_experts=shared)
    x, logits = (t.to(device) for t in batch(hidden=WIDE))
    lora = adapters(layer, device=device)
    near = expected(layer, x, logits, lora)
    deep = lora._replace(lora_ids=lora.lora_ids.view(3, 3))
    for ids in (lora, deep):
        beside, out = layer(x.view(3, 3, -1), logits.view(3, 3, -1), lora=ids)
        assert torch.equal(out.view(T, -1), near) and torch.equal(beside.view(T, -1), shared(x))


@pytest.mark.parametrize("alone", [True, False])
def test_a_kernel(alone, device):
    """The bits of the layer without one, also beside shared experts that the kernel runs."""
    x, logits = (t.to(device) for t in batch(hidden=WIDE))
    layer = layer_of(device=device)
    lora = adapters(layer, device=device)
    near = step(lambda a, b, lora: layer(a, b, lora=lora), x, logits, lora)
    layer.kernel = kernel_of(layer, shared_experts=None if alone else torch.neg)

    def run(x, logits, lora):
        out = layer(x, logits, lora=lora)
        if alone:
            return out
        assert torch.equal(out[0], -x)
        return out[1]

    for a, b in zip(step(run, x, logits, lora), near, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("scheme", "trained"),
    [
        ("unquantized", True),
        ("int8_w8a16", True),
        ("fp8_channel", False),
        pytest.param("unquantized", False, marks=pytest.mark.exhaustive),
        pytest.param("int8_w8a16", False, marks=pytest.mark.exhaustive),
        pytest.param("fp8_channel", True, marks=pytest.mark.exhaustive),
    ],
)
def test_one_compilation(scheme, trained, device):
    """For all numbers of tokens, forward and backward, or without gradients."""
    torch._dynamo.reset()
    layer = layer_of(scheme, device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")

    def run(layer, *given):
        if trained:
            return step(lambda x, logits, lora: layer(x, logits, lora=lora), *given)
        with torch.no_grad():
            return [layer(*given[:2], lora=given[2])]

    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        for number, tokens in enumerate((7, 5, 64, 1)):
            given = [t.to(device) for t in batch(tokens, hidden=WIDE)]
            given.append(adapters(layer, tokens, device))
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                found = run(compiled, *given)
            for a, b in zip(found, run(layer, *given), strict=True):
                assert torch.equal(a, b)


def test_where_there_are_none():
    x, logits = batch()

    def refused(layer, text, kind=NotImplementedError, **changes):
        lora = adapters(layer)._replace(**changes)
        with pytest.raises(kind, match=text):
            layer(x, logits, lora=lora)

    small = moe_ops.FusedMoE(E, K, H, I)
    both = moe_ops.FusedMoEParallelConfig(tp_size=2, ep_size=2, use_ep=True)
    cut = moe_ops.FusedMoE(E, K, H, I, moe_parallel_config=both)
    refused(cut, r"with both ep_size \(2\) and tp_size \(2\)")
    refused(moe_ops.FusedMoE(E, K, H, I, enable_eplb=True), "with enable_eplb, which moves")
    other = moe_ops.FusedMoE(E, K, H, I)
    part = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP()
    part.takes_lora = lambda: False
    other.kernel = kernel_of(small, part)
    refused(other, "unless prepare_finalize takes adapters")
    summed = moe_ops.FusedMoE(E, K, H, I, ep_size=2, ep_rank=1, reduce_results=True)
    refused(summed, "lora.w1's must be a tuple", TypeError, w1=7)
    whole = (random(L, E, R, H), random(L, E, 2 * I, R))
    refused(summed, "lora.w1's lora_a must be .3, 4, 4, 32.", ValueError, w1=whole)
    refused(small, "lora.lora_ids must", ValueError, lora_ids=torch.zeros(4, dtype=torch.int32))
    refused(small, "lora.w2's lora_b", ValueError, w2=(random(L, E, R, I), random(L, E, I, R)))
    with pytest.raises(TypeError, match="lora must be"):
        small(x, logits, lora=((x, x), None))


def test_calibration():
    """Peaks would be those without adapters."""
    layer = layer_of()
    x, logits = batch(hidden=WIDE)
    run = lambda model: model(x, logits, lora=adapters(layer))  # noqa: E731
    with pytest.raises(NotImplementedError, match="lora must be None while calibrate runs"):
        moe_ops.quantize_(layer, "fp8_tensor_static", calibrate=run, progress=False)


def test_act_order():
    made = act_ordered("int4_w4a16_g32_zp", same=True)
    layer = moe_ops.FusedMoE(4, 2, 128, 256, scheme="int4_w4a16_g32_zp")
    moe_ops.load_checkpoint(layer, gptq(made), progress=False)
    x, logits = batch(hidden=128, logits=4)
    with pytest.raises(NotImplementedError, match="weights in act-order"):
        layer(x, logits, lora=adapters(layer))

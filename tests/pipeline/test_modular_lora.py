"""Adapters through the modular kernel: those of `fused_experts`, also where tokens are sent."""

import pytest
import torch
from exchanges import World
from modular import BATCHED, EXPERTS, setup
from ranks import mine

import moe_ops
from moe_ops.parallel import determine_expert_ranks
from moe_ops.pipeline.calls import Call
from moe_ops.testing import Problem, call, run_ranks
from moe_ops.training import ExpertLora

L, R = 3, 4
PROBLEM = Problem(9, 8, 2, 32, 64, torch.bfloat16, has_bias=True, routing="holes")
STANDARD = (moe_ops.pipeline.TritonExperts, moe_ops.pipeline.GroupedGemmExperts)
NO_EP = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP
AllGather = moe_ops.pipeline.AllGatherPrepareAndFinalize


def adapters(problem, device="cpu", dtype=torch.int32):
    """Adapters of all experts; some tokens have none, and numbers of no adapter."""
    g = torch.Generator().manual_seed(3)
    h, i = problem.hidden_size, problem.intermediate_size
    a1, b1, a2, b2 = (
        (torch.randn(L, problem.num_experts, *s, generator=g) / s[-1] ** 0.5).to(device)
        for s in ((R, h), (2 * i, R), (R, i), (h, R))
    )
    ids = (torch.arange(problem.num_tokens, device=device) % (L + 2) - 1).to(dtype)
    return ExpertLora((a1, b1), (a2, b2), ids, torch.tensor([0.5, 2.0, 1.0], device=device))


def leaves(lora):
    """The adapters with factors that require grad, and these factors."""
    w1, w2 = (tuple(x.clone().requires_grad_() for x in pair) for pair in (lora.w1, lora.w2))
    return lora._replace(w1=w1, w2=w2), [*w1, *w2]


def test_who_takes_adapters():
    kinds = [k for k in EXPERTS if not k.is_monolithic()]
    assert {k for k in kinds if k.takes_lora()} == set(STANDARD)

    class Own(moe_ops.pipeline.TritonExperts):
        """Gradients of its own, which know no adapters."""

        def differentiable_apply(self, *arguments):
            """As the base class."""

    class Other(moe_ops.pipeline.TritonExperts):
        """Another forward pass."""

        def apply(self, *arguments):
            """As the base class."""

    assert Own.has_gradients() and not Own.takes_lora() and not Other.takes_lora()


@pytest.mark.parametrize("ids", ["each token", "one"])
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("scheme", ["unquantized", "int8_w8a16", "fp8_channel", "fp8_tensor"])
@pytest.mark.parametrize("kind", STANDARD, ids=lambda k: k.__name__)
def test_bits_of_the_functional_path(kind, scheme, on_input, ids, device):
    problem = PROBLEM.with_(scheme=scheme, on_input=on_input)
    s, given = setup(problem, kind, device), adapters(problem, device)
    if ids == "one":
        given = given._replace(lora_ids=None)

    def run(function):
        lora, factors = leaves(given)
        x, weights = (t.clone().requires_grad_() for t in (s.inputs[0], s.inputs.topk_weights))
        out = function(s.inputs._replace(hidden_states=x, topk_weights=weights), lora)
        return [out, *torch.autograd.grad(out.square().sum(), [x, weights, *factors])]

    found = run(lambda inputs, lora: s._replace(inputs=inputs).apply(lora=lora))
    config = s.config
    near = run(
        lambda inputs, lora: call(
            moe_ops.fused_experts, problem, inputs, quant_config=config, lora=lora
        )
    )
    for a, b in zip(found, near, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(s.apply(lora=given), found[0])  # nothing requires grad
    assert not torch.equal(s.apply(), found[0])


@pytest.mark.parametrize("kind", STANDARD, ids=lambda k: k.__name__)
def test_adapters_alone(kind, device):
    """Neither tokens nor weights require grad."""
    s, (lora, factors) = setup(PROBLEM, kind, device), leaves(adapters(PROBLEM, device))
    near = call(moe_ops.fused_experts, PROBLEM, s.inputs, quant_config=s.config, lora=lora)
    outs = s.apply(lora=lora), near
    found, expected = (torch.autograd.grad(out.square().sum(), factors) for out in outs)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_parts_of_a_call(device):
    """Chunks, micro-batches and shared experts."""
    s, lora = setup(PROBLEM, STANDARD[0], device), adapters(PROBLEM, device)
    whole = s.apply(lora=lora)
    parts = (s.kernel.prepare_finalize, s.kernel.fused_experts)
    chunked = moe_ops.FusedMoEKernel(*parts, chunk_size=4)
    torch.testing.assert_close(chunked.apply(**s.arguments(lora=lora)), whole)
    kernel = moe_ops.FusedMoEKernel(*parts, lambda x: 2 * x)
    calls = [Call(**s.arguments(lora=lora)).tokens(slice(*part)) for part in ((0, 4), (4, 9))]
    outs = moe_ops.pipeline.run_micro_batches(kernel, calls)
    torch.testing.assert_close(torch.cat([routed for _, routed in outs]), whole)
    assert torch.equal(outs[1][0], 2 * s.inputs.hidden_states[4:])


@pytest.mark.parametrize("scheme", ["unquantized", "fp8_channel"])
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("exchange", ["gather", "fixed", "exact"])
def test_ids_travel(exchange, on_input, scheme):
    """Also as 64-bit numbers that no adapter has, and on a rank that passes 32-bit ones."""
    problem = Problem(11, 8, 2, 32, 64, torch.float32, scheme=scheme, on_input=on_input)
    s, lora, ranks = setup(problem, STANDARD[0]), adapters(problem), 3
    wide = lora.lora_ids.long()
    wide[3], wide[4] = 2**32, -(2**32)  # not adapter 0
    lora = lora._replace(lora_ids=wide)
    world = World(s, determine_expert_ranks(ranks, 8), (4, 0, 7))
    known = world.expert_ranks
    make = {
        "gather": lambda group: AllGather(group),
        "fixed": lambda g: moe_ops.pipeline.FixedCapacityPrepareAndFinalize(g, 7, known),
        "exact": lambda g: moe_ops.pipeline.ExactAllToAllPrepareAndFinalize(g, None, known),
    }[exchange]

    def run(rank, group):
        kernel, arguments = world.kernel(rank, make(group))
        held, ids = world.held(rank), wide[mine(world.counts, rank)]
        w1, w2 = (tuple(x[:, held] for x in pair) for pair in (lora.w1, lora.w2))
        own = ExpertLora(w1, w2, ids.clamp(-1, 9).int() if rank == 2 else ids, lora.scaling)
        return kernel.apply(**world.own(rank, arguments), lora=own)

    found = torch.cat(run_ranks(ranks, run))
    torch.testing.assert_close(found, s.apply(lora=lora))
    assert torch.equal(wide[3:5], torch.tensor([2**32, -(2**32)]))


@pytest.mark.parametrize("more", [None, "one", "each"])
@pytest.mark.parametrize("exact", [False, True])
def test_bytes(exact, more):
    """An id takes 4 bytes of a token's row; without ids, adapters send nothing."""
    problem = Problem(8, 8, 2, 32, 64, torch.float32)
    s, lora = setup(problem, STANDARD[0]), adapters(problem, dtype=torch.int64)
    world = World(s, determine_expert_ranks(2, 8), (4, 4))
    kind = moe_ops.pipeline.ExactAllToAllPrepareAndFinalize if exact else AllGather

    def run(rank, group):
        widths = []
        start = {name: getattr(group, name) for name in ("start_all_gather", "start_exchange")}
        for name, function in start.items():

            def noted(x, *rest, function=function):
                widths.append(x.shape[1] * x.dtype.itemsize if x.dim() > 1 else 0)
                return function(x, *rest)

            setattr(group, name, noted)
        kernel, arguments = world.kernel(rank, kind(group, None if exact else 4))
        given = world.own(rank, arguments)
        held, ids = world.held(rank), lora.lora_ids[mine(world.counts, rank)]
        w1, w2 = (tuple(x[:, held] for x in pair) for pair in (lora.w1, lora.w2))
        own = ExpertLora(w1, w2, ids if more == "each" else None, lora.scaling)
        kernel.apply(**given, lora=None if more is None else own)
        return widths

    facts = 2 * (4 + 4) + (4 if more == "each" else 0)
    sent = [32 * 4, facts, 32 * 4]
    for widths in run_ranks(2, run):
        assert widths[-3:] == sent  # before them: numbers of tokens, and whose experts these are


def test_what_is_refused(device):
    s, lora = setup(PROBLEM, STANDARD[0], device), adapters(PROBLEM, device)

    def refused(kernel, text, kind=NotImplementedError, given=lora, **changes):
        with pytest.raises(kind, match=text):
            kernel.apply(**s.arguments(**changes), lora=given)

    experts, part = s.kernel.fused_experts, s.kernel.prepare_finalize
    batched = next(k for k in EXPERTS if k.activation_format() is BATCHED and k.has_gradients())
    other = setup(PROBLEM, batched, device).kernel
    other.prepare_finalize.max_num_tokens = 4
    refused(other, "lora must be None unless prepare_finalize takes adapters")
    aside = moe_ops.FusedMoEKernel(moe_ops.pipeline.AsyncPrepareAndFinalize(part), experts)
    near = s.apply(lora=lora)
    assert torch.equal(aside.apply(**s.arguments(), lora=lora), near)
    aside.prepare_finalize.takes_lora = lambda: False
    refused(aside, "got adapters and AsyncPrepareAndFinalize")

    class Own(STANDARD[0]):
        """Another forward pass."""

        def apply(self, *arguments):
            """As the base class."""

    own = moe_ops.FusedMoEKernel(part, Own(experts.moe_config, experts.quant_config))
    refused(own, "unless fused_experts takes adapters .takes_lora., got adapters and Own")
    for kernel in (s.kernel, other):
        refused(kernel, "lora must be an ExpertLora", TypeError, ((None, None), None))
    refused(s.kernel, "lora_ids must", ValueError, lora._replace(lora_ids=lora.lora_ids[:4]))
    refused(s.kernel, "lora.w1's lora_a", ValueError, lora._replace(w1=lora.w1[::-1]))
    scaled = PROBLEM.with_(scheme="fp8_tensor")
    chunks = setup(scaled, STANDARD[0], device, chunk_size=4)
    with pytest.raises(NotImplementedError, match="lora must be None: activations must not have"):
        chunks.apply(lora=lora)
    inplace = setup(PROBLEM, STANDARD[0], device, inplace=True)
    trained, factors = leaves(lora)
    out = inplace.apply(hidden_states=inplace.inputs[0].clone(), lora=trained)
    assert torch.equal(out, near)
    with pytest.raises(NotImplementedError, match="inplace must be False"):
        out.sum().backward()
    frozen = setup(PROBLEM.with_(scheme="int8_w8a16"), STANDARD[0], device)
    frozen.config.w1_scale.requires_grad_()
    out = frozen.apply(lora=trained)
    with pytest.raises(NotImplementedError, match="quantized weights and their scales must not"):
        out.sum().backward()
    assert all(x.grad is None for x in factors)


def test_exchanges_that_send_no_ids():
    """Called by themselves, too."""

    class Silent(AllGather):
        """Knows nothing of adapters."""

        def takes_lora(self):
            return False

    s, lora = setup(PROBLEM, STANDARD[0]), adapters(PROBLEM)
    part = Silent(moe_ops.pipeline.exchange.groups.RankGroup())
    x, weights, ids = s.inputs.hidden_states, s.inputs.topk_weights, s.inputs.topk_ids
    with pytest.raises(NotImplementedError, match="lora_ids must be None, because Silent"):
        part.prepare(x, weights, ids, 8, None, False, s.config, lora_ids=lora.lora_ids)

    class Forgetful(NO_EP):
        """Takes the ids, and returns other tokens without them."""

        def prepare(self, a1, topk_weights, topk_ids, *rest, lora_ids=None):
            found = super().prepare(a1, topk_weights, topk_ids, *rest)
            return found._replace(topk_ids=topk_ids)

    kernel = moe_ops.FusedMoEKernel(Forgetful(), s.kernel.fused_experts)
    with pytest.raises(ValueError, match="must have lora_ids attached"):
        kernel.apply(**s.arguments(), lora=lora)


def test_an_exchange_of_a_users_sends_adapters_along():
    class Turned(NO_EP):
        """Takes the tokens in another order."""

        def prepare(self, a1, topk_weights, topk_ids, *rest, lora_ids=None):
            a1, weights, ids = (x.flip(0) for x in (a1, topk_weights, topk_ids))
            if lora_ids is not None:
                moe_ops.pipeline.attach_lora_ids(ids, lora_ids.flip(0))
            found = super().prepare(a1, weights, ids, *rest)
            return found._replace(topk_ids=ids, topk_weights=weights)

        def finalize(self, *arguments):
            return super().finalize(*arguments).flip(0)

    problem = PROBLEM.with_(dtype=torch.float32)
    s, lora = setup(problem, STANDARD[0]), adapters(problem)
    kernel = moe_ops.FusedMoEKernel(Turned(), s.kernel.fused_experts)
    for given in (lora, lora._replace(lora_ids=None)):
        expected = s.kernel.apply(**s.arguments(), lora=given)
        torch.testing.assert_close(kernel.apply(**s.arguments(), lora=given), expected)

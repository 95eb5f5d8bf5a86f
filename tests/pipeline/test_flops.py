"""PyTorch's counter of floating-point operations counts the products of every operator, once."""

import sys
from types import SimpleNamespace

import pytest
import torch
from modular import BATCHED, EXPERTS, capacity, setup
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import moe_ops
from moe_ops import flops, ops
from moe_ops.scheme import SCHEMES, is_packed, pack_weight
from moe_ops.testing import Problem, call, make_inputs, quantize_inputs
from moe_ops.training import ExpertLora, expert_lora

T, E, K, H, I, R = 5, 4, 2, 128, 128, 4  # noqa: E741
SUMS = {"expert_bias_grad"}
"""Operators with a plan that only add."""
SLOW = pytest.mark.exhaustive
PROBLEM = Problem(T, E, K, H, I, torch.float32)


def count(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def forward(tokens=T, up=2):
    """The products of a layer whose first weight has ``up * I`` rows."""
    return 2 * tokens * K * (up * I * H + H * I)


def test_every_operator_that_multiplies_has_a_formula():
    """These are the operators with a weight ``w`` or a plan of a GEMM, ``tiles``."""
    for name in ops.STAGES:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.moe_ops, packet), overload or "default")
        arguments = {argument.name for argument in operator._schema.arguments}
        multiplies = bool(arguments & {"w", "tiles"}) and name not in SUMS
        assert (operator in flops.FORMULAS) == multiplies, name
        assert (operator.overloadpacket in flop_registry) == multiplies, name


def calls(problem, inputs, config=None):
    """A layer without gradients, and with gradients of its tokens."""
    yield lambda: call(moe_ops.fused_experts, problem, inputs, quant_config=config)
    x = inputs.hidden_states.clone().requires_grad_()
    leaf = inputs._replace(hidden_states=x)
    yield lambda: call(moe_ops.fused_experts, problem, leaf, quant_config=config).sum().backward()


def test_schemes():
    """Few tokens and one; frozen weights have no products of their own in the backward pass."""
    wrong = []
    for scheme in SCHEMES:
        for tokens in (T, 1):
            problem = Problem(tokens, E, K, H, I, torch.bfloat16, scheme=scheme)
            inputs, config, _ = quantize_inputs(problem, make_inputs(problem))
            found = [count(run) for run in calls(problem, inputs, config)]
            if found != [forward(tokens), 2 * forward(tokens)]:
                wrong.append((scheme, tokens, found))
    assert not wrong


def test_packed_weights():
    for scheme in ("int4_w4a16_g128", "mxfp4_w4a16", "fp8_w8a16", "mxfp6_e2m3"):
        w1, w2 = (torch.randn(E, *s, dtype=torch.bfloat16) for s in ((2 * I, H), (H, I)))
        packed = [pack_weight(moe_ops.quantize_weight(w, scheme), scheme) for w in (w1, w2)]
        assert all(is_packed(w.data) for w in packed)
        config = moe_ops.FusedMoEQuantConfig.from_weights(scheme, *packed)
        inputs = make_inputs(PROBLEM.with_(dtype=torch.bfloat16))
        given = (inputs.hidden_states, *(w.data for w in packed), *inputs[3:5])
        assert (
            count(lambda g=given, c=config: moe_ops.fused_experts(*g, quant_config=c)) == forward()
        )


def test_options():
    """Slots without an expert count; experts of one product up and none beside."""
    kept = PROBLEM.with_(num_local_experts=2)
    assert make_inputs(kept).expert_map is not None
    for problem, up in (
        (kept, 2),
        (PROBLEM.with_(routing="holes"), 2),
        (PROBLEM.with_(activation="relu2_no_mul"), 1),
        (PROBLEM.with_(has_bias=True, on_input=True), 2),
    ):
        inputs = make_inputs(problem)
        found = [count(run) for run in calls(problem, inputs)]
        assert found == [forward(up=up), 2 * forward(up=up)], problem


def test_gradients_of_weights():
    x, w1, w2, weights, ids = make_inputs(PROBLEM)[:5]
    given = [v.requires_grad_() for v in (x, w1, w2)]
    run = lambda: moe_ops.fused_experts(*given, weights, ids).sum().backward()  # noqa: E731
    assert count(run) == 3 * forward()
    w2.requires_grad_(False)
    assert count(run) == 3 * forward() - 2 * T * K * H * I


def test_adapters():
    x, w1, w2, weights, ids = make_inputs(PROBLEM)[:5]
    a1, b1, a2, b2 = (
        torch.randn(1, E, *s, requires_grad=True) for s in ((R, H), (2 * I, R), (R, I), (H, R))
    )
    lora = ExpertLora((a1, b1), (a2, b2))
    given, low = (x.requires_grad_(), w1, w2, weights, ids), 2 * T * K * R
    each = low * (H + 2 * I), low * (I + H)
    with torch.no_grad():
        found = count(lambda: moe_ops.fused_experts(*given, lora=lora))
    assert found == forward() + sum(each)
    # Backward: both factors' gradients, the way through both, and the rows of rank r once more.
    again = low * (H + I)
    found = count(lambda: moe_ops.fused_experts(*given, lora=lora).sum().backward())
    assert found == 2 * forward() + 3 * sum(each) + again
    alone = count(lambda: expert_lora(x, a1, b1, ids).sum().backward())
    assert alone == 3 * each[0] + low * H


def test_modular_kernels():
    """In the Batched format each row that a batch has room for counts."""
    for kind in EXPERTS:
        if kind.is_monolithic():
            continue
        rows = capacity(PROBLEM) * E if kind.activation_format() is BATCHED else T * K
        found = count(setup(PROBLEM, kind).apply)
        assert found == forward() * rows // (T * K), kind.__name__


class Block(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.router = torch.nn.Linear(H, E, bias=False)
        self.experts = moe_ops.FusedMoE(E, K, H, I, params_dtype=torch.float32, **options)

    def forward(self, x):
        return self.experts(x, self.router(x))


def test_modules():
    """A layer's products are those of its module, also in chunks and where Dynamo sees hooks."""
    x, router = torch.randn(T, H, requires_grad=True), 2 * T * H * E
    for options, compiled in (({}, False), ({"chunk_size": 2}, False), ({}, True)):
        block = Block(**options)
        block.requires_grad_().experts.requires_grad_(False)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            block(x)
        found = {k: sum(v.values()) for k, v in counter.get_flop_counts().items()}
        assert found["Block.experts"] == forward() and found["Block.router"] == router
        run = torch.compile(block, backend="aot_eager") if compiled else block
        run(x).sum().backward()
        assert count(lambda r=run: r(x).sum().backward()) == 2 * forward() + 3 * router


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=SLOW)])
def test_compiled(backend):
    """The code that a compiler has made, counted within the call and in its backward pass.

    Dynamo runs eager code instead if the counter is on before the call.
    """
    x, w1, w2, weights, ids = make_inputs(PROBLEM)[:5]
    given, found = [v.requires_grad_() for v in (x, w1, w2)], []

    def counted(graph, inputs):
        compiled = torch._dynamo.lookup_backend(backend)(graph, inputs)

        def run(*args):
            results = []
            found.append(count(lambda: results.append(compiled(*args))))
            return results[0]

        return compiled if torch.is_grad_enabled() else run

    layer = lambda *a: moe_ops.fused_experts(*a, weights, ids)  # noqa: E731
    run = torch.compile(layer, backend=counted, fullgraph=True)
    with torch.no_grad():
        run(*given)
    assert found == [forward()]
    out = run(*given)
    assert count(lambda: out.sum().backward()) == 2 * forward()


def test_a_compiled_function_called_first_while_counting():
    """Dynamo skips its frame for good, and must not trace operators' implementations below it."""
    x, w1, w2, weights, ids = make_inputs(PROBLEM)[:5]
    run = torch.compile(lambda x: moe_ops.fused_experts(x, w1, w2, weights, ids), backend="eager")
    assert count(lambda: run(x)) == forward()
    assert torch.equal(run(x), moe_ops.fused_experts(x, w1, w2, weights, ids))


def test_the_counter_is_imported_before_or_after(monkeypatch):
    """Once: what is imported again, or by others, is found as ever."""
    registered = {}

    def register_flop_formula(target, get_raw):
        return lambda formula: registered.update({target: get_raw})

    stub = SimpleNamespace(register_flop_formula=register_flop_formula)
    monkeypatch.setitem(sys.modules, flops.COUNTER, stub)
    flops.register()
    assert set(registered) == {o.overloadpacket for o in flops.FORMULAS}
    assert all(registered.values())
    monkeypatch.delitem(sys.modules, flops.COUNTER)
    finders = [*sys.meta_path]
    flops.register()
    import torch.utils.flop_counter as counter

    assert sys.meta_path == finders
    assert {o.overloadpacket for o in flops.FORMULAS} <= set(counter.flop_registry)
    assert counter.FlopCounterMode is not FlopCounterMode  # executed again
    monkeypatch.undo()
    torch.utils.flop_counter = sys.modules[flops.COUNTER]

"""LoRA on experts in vLLM's plug-in, on stand-ins; `make test-vllm` serves adapters with vLLM."""

import logging
from types import SimpleNamespace

import pytest
import torch
import vllm_stand_ins as vllm
from adapter_cases import CASES, E, H, I
from merged_adapters import factors
from table_items import every_row
from vllm_layers import AG, BATCH, KEYS, expected, layer, of_engine, problem, served
from vllm_lora import LoRAConfig, Stacks, Wrapper

from moe_ops import dequantize_weight, pack_weight
from moe_ops.integrations import _engines
from moe_ops.integrations.vllm import register
from moe_ops.testing import Inputs
from moe_ops.training import ExpertLora

STANDARD = vllm.FusedMoEActivationFormat.Standard


@pytest.fixture
def engine(monkeypatch):
    return vllm.install(monkeypatch)


def with_adapters(engine, config, operands, scheme="unquantized", wrapper=None, **stacks):
    """Experts of a layer, its stacks with all places but the last filled, and the wrapper."""
    _, _, _, q1, q2, biases = operands
    made = engine.experts.MoeOpsExperts(config, of_engine(scheme, q1, q2, biases))
    held, wrapper = Stacks(config, **stacks), wrapper or Wrapper()
    made.set_lora_context(held.context(wrapper))
    layout = "shared" if held.shared else "one"
    layout = f"apart and {layout}" if held.slices == 2 else layout
    sizes = (config.num_local_experts, H, I)
    for place in range(2):
        held.set(place, factors(*sizes, config.activation.value, layout), source=place)
    return made, held, wrapper


def oracle_inputs(operands, scheme, expert_map=None):
    """The layer's operands for the oracle, weights dequantized."""
    x, weights, ids, q1, q2, (b1, b2) = operands
    w1, w2 = (q.data if scheme == "unquantized" else dequantize_weight(q, scheme) for q in (q1, q2))
    return Inputs(x, w1, w2, weights, ids, expert_map, b1, b2)


@every_row("mapped", [False, True])
@every_row("on_gpu", [False, True])
@every_row("case", CASES)
def test_each_token_has_its_adapter(engine, case, on_gpu, mapped):
    """Factors of a smaller rank, too. Behind a step's ids the buffer has those of earlier steps."""
    scheme, count = "int8_w8a16" if case.quantized else "unquantized", 6 if mapped else E
    operands = problem(scheme, tokens=case.tokens, num_experts=E, gated=case.kind.is_gated)
    expert_map = None
    if mapped:
        expert_map = torch.tensor([2, -1, 0, 3, 1, -1], dtype=torch.int32)
        ids = torch.rand(case.tokens, 6).topk(2).indices.to(torch.int32)
        operands = (*operands[:2], ids, *operands[3:])
    config = layer(count, local=E, activation=vllm.MoEActivation(case.activation))
    made, held, wrapper = with_adapters(
        engine, config, operands, scheme, Wrapper(on_gpu),
        slices=1 + ("apart" in case.layout), shared="shared" in case.layout,
    )  # fmt: skip
    x, weights, ids, q1, q2, _ = operands

    def step(places):
        wrapper.update(torch.tensor([1, 0, -1, 2] * 16)[: len(x) + 3])
        wrapper.update(places)
        return served(made, x, q1.data, q2.data, weights, ids, expert_map)

    case.assert_served(oracle_inputs(operands, scheme, expert_map), step, held.adapters)


def test_steps_copy_nothing_and_follow_the_stacks(engine):
    """Adapters come and go in place: in the layer as in captured graphs."""
    operands = problem("unquantized")
    made, held, wrapper = with_adapters(engine, layer(), operands)
    x, weights, ids, q1, q2, _ = operands
    seen = {low.a.data_ptr() for low in (*made.adapters.first, made.adapters.second)}
    assert seen == {t.data_ptr() for t in (*held.w13_a, *held.w2_a)}
    wrapper.update(torch.tensor([0, 1, 2, -1, 0]))

    def run():
        return served(made, x, q1.data, q2.data, weights, ids)

    before = run()
    held.set(0, factors(E, H, I, "silu", "apart"), source=2)
    changed = (run() != before).any(1)
    assert changed.tolist() == [True, False, False, False, True]
    held.reset(0)
    wrapper.update(torch.tensor([2, 1, 2, -1, 2]))  # a place without an adapter: zeros
    empty = run()
    wrapper.update(torch.tensor([-1, 1, -1, -1, -1]))
    assert torch.equal(run(), empty)


def test_padding_of_captured_batches(engine):
    """Rows behind a batch are padding: whatever their ids are, those before keep their bits."""
    engine.envs.VLLM_BATCH_INVARIANT = True  # the reference multiplies each row by itself
    operands = problem("unquantized", tokens=8)
    made, _, wrapper = with_adapters(engine, layer(), operands)
    x, weights, ids, q1, q2, _ = operands
    outs = []
    for stale in (-1, 0, 1, 77, -(2**40), 2**40):
        wrapper._token_lora_indices[3:].fill_(stale)
        wrapper.update(torch.tensor([1, 0, -1]))
        outs.append(served(made, x, q1.data, q2.data, weights, ids))
    assert all(torch.equal(out[:3], outs[0][:3]) for out in outs)
    for no_adapter in outs[3:]:
        assert torch.equal(no_adapter, outs[0])


def test_steps_without_adapters(engine):
    """vLLM says on a GPU that a step has none: the layer then runs as it does without LoRA.

    Not in batch-invariant mode, where bits may not depend on what others have.
    """
    operands = problem("unquantized")
    x, weights, ids, q1, q2, biases = operands
    for invariant in (False, True):
        engine.envs.VLLM_BATCH_INVARIANT = invariant
        made, _, wrapper = with_adapters(engine, layer(), operands)
        plain = engine.experts.MoeOpsExperts(layer(), of_engine("unquantized", q1, q2, biases))
        wrapper._token_lora_indices.fill_(0)
        wrapper.update(torch.full((2,), -1))  # what lies behind is stale
        expected = served(plain, x, q1.data, q2.data, weights, ids)
        out = served(made, x, q1.data, q2.data, weights, ids)
        assert torch.equal(out, expected) is not invariant


def test_packed_weights(engine):
    """Adapters beside weights in the packed form: the bits of the plain form."""
    x, weights, ids, q1, q2, biases = problem("int4_w4a16_g32")
    outs = []
    for one, two in ((q1, q2), [pack_weight(q, "int4_w4a16_g32") for q in (q1, q2)]):
        config = vllm.FusedMoEQuantConfig(
            "int4", block_shape=[0, 32], w1_scale=one.scale, w2_scale=two.scale,
            w1_bias=biases[0], w2_bias=biases[1],
        )  # fmt: skip
        made = engine.experts.MoeOpsExperts(layer(), config)
        held, wrapper = Stacks(layer()), Wrapper()
        made.set_lora_context(held.context(wrapper))
        held.set(0, factors(E, H, I, "silu", "apart"))
        wrapper.update(torch.tensor([0, -1, 0, 0, 1]))
        outs.append(served(made, x, one.data, two.data, weights, ids))
    assert torch.equal(*outs)


@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_block32", "int8_channel"])
def test_quantized_rows(engine, scheme):
    """Adapters read rows as they were before they are quantized: the bits of `fused_experts`."""
    x, weights, ids, q1, q2, biases = operands = problem(scheme)
    made, held, wrapper = with_adapters(engine, layer(), operands, scheme, slices=1)
    assert made.expects_unquantized_inputs
    step = torch.tensor([0, 1, 0, -1, 0])
    wrapper.update(step)
    out = served(made, x, q1.data, q2.data, weights, ids)
    lora = ExpertLora((*held.w13_a, *held.w13_b), (*held.w2_a, *held.w2_b), step)
    want = expected(scheme, x, q1.data, q2.data, weights, ids, (q1, q2), biases, lora=lora)
    assert torch.equal(out, want)


def test_what_is_declined(engine, caplog):
    """One line each; vLLM's own experts then run."""
    caplog.set_level(logging.INFO, logger="vllm.moe_ops")
    ours = engine.experts.MoeOpsExperts
    cases = [
        ({}, LoRAConfig(fully_sharded_loras=True), None),
        ({}, LoRAConfig(lora_dtype="auto"), None),
        ({}, LoRAConfig(max_loras=1024), None),
        ({}, LoRAConfig(max_loras=1025), "max_loras times experts must be at most 4096, got 4100"),
        ({}, LoRAConfig(lora_dtype=torch.float16), "LoRA in torch.float16 beside torch.float32"),
        ({}, None, "LoRA without a configuration"),
        ({"moe_parallel_config": vllm.FusedMoEParallelConfig(tp_size=2)},
         LoRAConfig(fully_sharded_loras=True), "fully_sharded_loras on several ranks"),
        ({"moe_parallel_config": AG}, LoRAConfig(), "LoRA where ranks send each other tokens"),
    ]  # fmt: skip
    for change, lora, reason in cases:
        _engines.say_once.cache_clear()
        caplog.clear()
        engine.config.current = SimpleNamespace(lora_config=lora)
        config = layer(is_lora_enabled=True, **change)
        for _ in range(2):
            supported, said = ours.is_supported_config(ours, config, None, None, STANDARD)
            assert supported == (reason is None) and (reason is None or reason in said)
        assert [reason in r.message for r in caplog.records] == [True] * (reason is not None)
        plain = layer(**change)  # without LoRA none of it matters
        assert ours.is_supported_config(ours, plain, None, None, STANDARD)[0]
    batched = engine.experts.BatchedMoeOpsExperts
    config = layer(is_lora_enabled=True, moe_parallel_config=BATCH)
    form = vllm.FusedMoEActivationFormat.BatchedExperts
    assert not batched.is_supported_config(batched, config, *KEYS["unquantized"], form)[0]
    assert not batched.supports_lora()


def test_the_selection_asks(engine, caplog):
    """With LoRA vLLM takes the first class of its backend unasked; ours is asked here."""
    caplog.set_level(logging.INFO, logger="vllm.moe_ops")
    _engines.say_once.cache_clear()
    oracle = engine.oracles["unquantized"]

    def select(moe_config):
        return oracle.choice, oracle.backend_to_kernel_cls(oracle.choice)[0]

    select.__name__ = "select_unquantized_moe_backend"
    oracle.select_unquantized_moe_backend = select
    register()
    ours, config = engine.experts.MoeOpsExperts, layer(is_lora_enabled=True)
    engine.config.current = SimpleNamespace(lora_config=LoRAConfig())
    assert oracle.select_unquantized_moe_backend(config) == (oracle.choice, ours)
    assert not caplog.records
    engine.config.current.lora_config.max_loras = 5000
    assert oracle.select_unquantized_moe_backend(config) == (oracle.choice, vllm.Theirs)
    assert "vLLM's own experts run: max_loras" in caplog.text
    assert oracle.select_unquantized_moe_backend(layer()) == (oracle.choice, ours)
    oracle.choice = oracle.backends["XPU"]
    assert oracle.select_unquantized_moe_backend(config)[1] is vllm.Theirs


def test_a_wrapper_that_is_another(engine):
    """Nothing is guessed: loading stops, and says how to go on."""
    operands = problem("unquantized")
    with pytest.raises(NotImplementedError, match="must have _token_lora_indices.*MOE_OPS_VLLM=0"):
        with_adapters(engine, layer(), operands, wrapper=SimpleNamespace())
    held = Stacks(layer())
    held.w2_b = (held.w2_b[0][:, :, :3],)
    made = engine.experts.MoeOpsExperts(layer(), of_engine("unquantized", *operands[3:]))
    with pytest.raises(ValueError, match="second.b must be"):
        made.set_lora_context(held.context(Wrapper()))
    assert made.adapters is None

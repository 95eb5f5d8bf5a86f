"""CUDA graphs: capture, replay with changed routing, streams, pools, syncs, launches."""

import pytest
import torch
from graphs import E, H, I, K, batch, capture, layer_of

import moe_ops
from moe_ops.pipeline.host_experts import host_experts, store
from moe_ops.scheme import FusedMoEQuantConfig
from moe_ops.tensors import ExpertWeight, ExpertWeights
from moe_ops.testing import Problem, call, make_inputs


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replay_with_changed_routing_is_bitwise_eager(tokens, dtype):
    layer, inputs = layer_of(dtype)
    moe_ops.warmup(inputs.w1, inputs.w2, K, [tokens], router_logits_dtype=torch.float32)
    x, logits = batch(tokens, dtype=dtype)
    graph, out = capture(layer, x, logits)
    for seed in range(1, 6):
        new_x, new_logits = batch(tokens, seed, dtype)
        x.copy_(new_x), logits.copy_(new_logits)
        graph.replay()
        assert torch.equal(out, layer(new_x, new_logits))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "most"), [(1, 3), (64, 5), (700, 8)])
def test_no_host_sync_and_few_launches(tokens, most):
    """Few launches from tokens and a routing to the output, and nothing waits.

    With many tokens two for the plan, one to pack rows, and one for each count of tiles.
    """
    _, inputs = layer_of()
    x, logits = batch(tokens)
    weights, ids = moe_ops.fused_topk(x, logits, K, True)

    def layer():
        return moe_ops.fused_experts(x, inputs.w1, inputs.w2, weights, ids)

    layer()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    activities = [torch.profiler.ProfilerActivity.CUDA]
    # Fresh memory is filled in these tests, which launches kernels of its own.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with torch.profiler.profile(activities=activities) as profile:
            layer()
            torch.cuda.synchronize()
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    names = [e.name for e in kernels if "kernel" in e.name.lower() or "mem" in e.name.lower()]
    assert 0 < len(names) <= most, names


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 700])
def test_replays_with_experts_in_host_memory(tokens):
    """One wave, several, and waves of half of the slots whose copies run on another stream."""
    layer, inputs = layer_of(torch.bfloat16)
    weights = ExpertWeights(ExpertWeight(inputs.w1), ExpertWeight(inputs.w2))
    config, device = FusedMoEQuantConfig("unquantized"), inputs.w1.device
    host = host_experts(store(weights, pinned=True), config, max(K, E // 2), device)

    def on_host(x, logits):
        weights, ids = moe_ops.fused_topk(x, logits, K, True)
        return moe_ops.fused_experts(
            x, host.w1, host.w2, weights, ids, quant_config=host.quant_config
        )

    x, logits = batch(tokens, dtype=torch.bfloat16)
    assert torch.equal(on_host(x, logits), layer(x, logits))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_host(x, logits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, out = capture(on_host, x, logits)
    for seed in range(1, 9):
        new_x, new_logits = batch(tokens, seed, torch.bfloat16)
        x.copy_(new_x), logits.copy_(new_logits)
        graph.replay()
        assert torch.equal(out, layer(new_x, new_logits))


@pytest.mark.gpu
def test_replay_allocates_nothing():
    layer, inputs = layer_of()
    moe_ops.warmup(inputs.w1, inputs.w2, K, [32], router_logits_dtype=torch.float32)
    graph, _ = capture(layer, *batch(32))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
def test_two_captures_share_a_pool():
    layer, inputs = layer_of()
    moe_ops.warmup(inputs.w1, inputs.w2, K, [8, 64], router_logits_dtype=torch.float32)
    small, large = batch(8, 1), batch(64, 2)
    first, out_small = capture(layer, *small)
    second, out_large = capture(layer, *large, pool=first.pool())
    for _ in range(3):
        first.replay()
        assert torch.equal(out_small, layer(*small))
        second.replay()
        assert torch.equal(out_large, layer(*large))


@pytest.mark.gpu
def test_streams_do_not_disturb_each_other():
    layer, _ = layer_of()
    batches = [batch(100 + n, n) for n in range(4)]
    expected = [layer(*b) for b in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for _ in range(5):
        results = []
        for stream, arguments in zip(streams, batches, strict=True):
            with torch.cuda.stream(stream):
                results.append(layer(*arguments))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.slow
def test_reduce_overhead_skips_nothing():
    """Inductor's own graphs: one recording for each token count, none refused."""
    torch._dynamo.reset()
    layer, _ = layer_of()
    options = {"backed_size_oblivious": True}
    with (
        torch.fx.experimental._config.patch(**options),
        torch._inductor.config.patch({"triton.cudagraph_or_error": True}),
    ):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, mode="reduce-overhead")
        for tokens in (8, 1, 64, 8, 1):
            for seed in range(4):
                arguments = batch(tokens, seed)
                torch.compiler.cudagraph_mark_step_begin()
                assert torch.equal(compiled(*arguments).clone(), layer(*arguments))


@pytest.mark.gpu
@pytest.mark.slow
@torch.no_grad()
def test_decode_loop_of_a_model_in_a_graph():
    """Static cache, one captured step, replayed token by token: the text that eager writes."""
    transformers = pytest.importorskip("transformers")
    import moe_ops.integrations.transformers  # noqa: F401

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=64, moe_intermediate_size=32,
        num_experts=8, num_experts_per_tok=2, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).cuda().eval()
    prompt = torch.arange(1, 7, device="cuda")[None]  # no padding token among them
    model.set_experts_implementation("eager")
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
    model.set_experts_implementation("moe_ops")
    cache = transformers.StaticCache(config=config, max_cache_len=64)
    token = model(prompt, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    position = torch.full((1,), prompt.shape[1], device="cuda")
    written = [token.clone()]

    def step():
        logits = model(
            token, past_key_values=cache, use_cache=True,
            position_ids=position[None], cache_position=position,
        ).logits  # fmt: skip
        token.copy_(logits[:, -1:].argmax(-1))
        position.add_(1)

    torch.cuda.synchronize()  # the other stream does not wait for the prompt
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    written.append(token.clone())
    graph, _ = capture(step)
    for _ in range(18):
        graph.replay()
        written.append(token.clone())
    assert torch.equal(torch.cat([prompt, *written], 1), expected)


@pytest.mark.gpu
def test_every_setting_replays():
    for changes in (
        {"has_bias": True, "activation": "swigluoai"},
        {"num_local_experts": 5, "routing": "holes"},
        {"on_input": True, "activation": "relu2_no_mul"},
    ):
        problem = Problem(40, E, K, H, I, torch.bfloat16, **changes)
        inputs = make_inputs(problem, "cuda")
        expected = call(moe_ops.fused_experts, problem, inputs)
        graph, out = capture(lambda p=problem, i=inputs: call(moe_ops.fused_experts, p, i))
        graph.replay()
        assert torch.equal(out, expected)

"""CUDA graphs: capture, replay with changed routing, warm-up, streams, pools, syncs, launches."""

import json

import pytest
import torch
from conftest import INTERPRETED
from test_tuned import PACKED, STREAM, entry, gemm_of, own

import moe_ops
from moe_ops import tuned
from moe_ops.pipeline import row_spaces, warmup
from moe_ops.pipeline.devices import TARGETS
from moe_ops.testing import Problem, call, make_inputs
from moe_ops.tiles import is_direct
from moe_ops.tuned_file import file_name, parse

E, K, H, I = 32, 4, 256, 128  # noqa: E741


def layer_of(dtype=torch.bfloat16, **changes):
    inputs = make_inputs(Problem(4, E, K, H, I, dtype, **changes), "cuda")

    def layer(x, logits):
        weights, ids = moe_ops.fused_topk(x, logits, K, True)
        return moe_ops.fused_experts(x, inputs.w1, inputs.w2, weights, ids)

    return layer, inputs


def batch(tokens, seed=0, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=g).to(dtype).cuda()
    return x, (torch.randn(tokens, E, generator=g) * (1 + 20 * (seed % 3 == 2))).cuda()


def capture(function, *arguments, pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = function(*arguments)
    return graph, out


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


def compiled():
    """What was compiled so far."""
    from moe_ops.kernels.hopper_stream import hopper_stream_kernel
    from moe_ops.kernels.hopper_tile import hopper_gemm_kernel
    from moe_ops.kernels.launch import COMPILED

    kernels = hopper_stream_kernel, hopper_gemm_kernel
    caches = [made for kernel in kernels for made, *_ in kernel.device_caches.values()]
    return set(COMPILED).union(*caches)


@pytest.mark.gpu
def test_warmup_leaves_nothing_to_compile():
    """No launch of any token count up to 300 goes through Triton's compiler again."""
    layer, inputs = layer_of(torch.float16)
    ran = moe_ops.warmup(inputs.w1, inputs.w2, K, 300, router_logits_dtype=torch.float32)
    assert len(ran) < 14
    known = compiled()
    for tokens in (0, *range(1, 301, 7), 300):
        layer(*batch(tokens, dtype=torch.float16))
    assert compiled() == known
    module = moe_ops.FusedMoE(E, K, H, I, params_dtype=torch.float16, device="cuda")
    module.warmup(300, torch.float32)
    assert compiled() == known


@pytest.mark.gpu
@pytest.mark.parametrize(
    "scheme", ["fp8_block128", "fp8_channel", "fp8_tensor", "int8_tensor", "int4_w4a16_g128"]
)
def test_warmup_of_a_quantized_layer(scheme):
    layer = moe_ops.FusedMoE(
        32, K, 256, 384, params_dtype=torch.bfloat16, quant_config=scheme, device="cuda"
    )
    layer.warmup(900)
    known = compiled()
    for tokens in (0, *range(1, 901, 13), 900):
        x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
        layer(x, torch.randn(tokens, 32, device="cuda", dtype=torch.bfloat16))
    assert compiled() == known


HOPPER_FILE = {
    "top_k": 4,
    "8": entry(16, own(STREAM, 64, num_stages=3), gemm_of()),
    "60": entry(16, gemm_of(), own(STREAM, 128)),
    "700": entry(64, own(PACKED, 128), own(PACKED, 256, 4, 3)),
}


@pytest.mark.skipif(INTERPRETED, reason="there is no interpreter for Gluon")
@pytest.mark.parametrize(
    ("scheme", "file"),
    [("unquantized", None), ("fp8_tensor", None), ("fp8_tensor", HOPPER_FILE),
     ("fp8_block128", None), ("fp8_block128", HOPPER_FILE)],
)  # fmt: skip
def test_warmup_knows_every_kernel_of_hoppers(scheme, file, monkeypatch):
    """Those that launchers choose at any token count are chosen at one that is run."""
    pytest.importorskip("triton")
    from moe_ops.kernels import expert_gemm, scaled_gemm

    (experts, width, hidden), wide = (32, 384, 256), scheme == "unquantized"
    if file:
        layers = [parse(file_name((32, 384, 256), "NVIDIA H200", scheme), json.dumps(file))]
        monkeypatch.setattr(tuned, "TABLES", tuned.tables(layers))
    monkeypatch.setattr(row_spaces, "device_name", lambda device: "NVIDIA_H200")
    for module in (expert_gemm, scaled_gemm, warmup):
        monkeypatch.setattr(module, "device_facts", lambda device: TARGETS["sm_90"].facts)
    dtype, known = torch.bfloat16, moe_ops.get_scheme(scheme)
    w1, w2 = (
        torch.empty(experts, *shape, dtype=dtype if wide else known.weight.dtype, device="meta")
        for shape in ((2 * width, hidden), (hidden, width))
    )
    variants = warmup.Variants(w1, w2, K, known, dtype, "silu", False)
    tiles, device = row_spaces.row_tiles_of(known, w2), torch.device("meta")

    def kernels(tokens):
        """As the launchers choose them."""
        for w, top_k, act in ((w1, K, "silu"), (w2, 1, None)):
            sizes = tokens * K, tuple(w.shape)
            if wide:
                found = expert_gemm._hopper.__wrapped__(*sizes, 2, tiles, top_k, device, act)
            else:
                rows = 128 if scheme == "fp8_block128" else w.shape[1]
                variant = scaled_gemm._Variant(scheme, act, rows)
                found = scaled_gemm._hopper.__wrapped__(*sizes, tiles, top_k, device, variant)
            yield found, is_direct(tokens * K, experts)

    ran = warmup.run_variants(lambda tokens: None, 3000, variants)
    warm = {kernel for tokens in ran for kernel in kernels(tokens)}
    all_of_them = {kernel for tokens in range(1, 3001) for kernel in kernels(tokens)}
    assert all_of_them <= warm
    assert sum(kernel is not None for kernel, _ in warm) >= (2 if wide else 4)


def test_warmup_runs_on_the_cpu():
    inputs = make_inputs(Problem(4, 8, 2, 32, 16), "cpu")
    assert moe_ops.warmup(inputs.w1, inputs.w2, 2, 20) == [1, 2, 3, 5, 9]
    assert moe_ops.warmup(inputs.w1, inputs.w2, 2, (3, 500), activation="gelu") == [3, 500]


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "most"), [(1, 3), (64, 5)])
def test_no_host_sync_and_few_launches(tokens, most):
    """Few launches from tokens and a routing to the output, and nothing waits."""
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

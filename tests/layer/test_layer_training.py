"""A new layer is a normal module: initialised, trainable, and as before without grad mode."""

import copy
import pickle
import warnings
from functools import partial
from itertools import product

import pytest
import torch
from checkpoints import Experts, per_expert
from loaded_layers import SECOND_OF_TWO, E, H, I, batch, loaded, make
from torch.utils.checkpoint import checkpoint

import moe_ops


def parameters(layer):
    return {name: p.detach().clone() for name, p in layer.named_parameters()}


def seeded(*args, **options):
    torch.manual_seed(0)
    return make(*args, **options)


def test_training_moves_router_and_experts():
    """As README's block: nothing is set by hand."""
    router, experts = torch.nn.Linear(H, E, bias=False), make(has_bias=True)
    both = torch.nn.ModuleList([router, experts])
    optimizer, before = torch.optim.AdamW(both.parameters(), lr=1e-2), parameters(both)
    x, y = torch.randn(32, H), torch.randn(32, H)
    losses = []
    for _ in range(20):
        loss = (x + experts(x, router(x)) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert [name for name, p in both.named_parameters() if torch.equal(p, before[name])] == []


WAYS = {
    "plain": {},
    "interleaved": {"activation": "swigluoai"},
    "no gate": {"activation": "relu2_no_mul"},
    "shared": {"n_shared_experts": 2},
    "replicas": {"enable_eplb": True, "num_redundant_experts": 4},
}


@pytest.mark.parametrize("way", WAYS)
def test_initial_values(way):
    """Each projection of each expert begins as a `torch.nn.Linear` does, in any dtype."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer = seeded(has_bias=True, params_dtype=dtype, **WAYS[way])
        for name, fan_in in (("w13", H), ("w2", I)):
            bound = torch.tensor(fan_in**-0.5).to(dtype).item()
            for kind in ("weight", "bias"):
                x = getattr(layer, f"{name}_{kind}")
                assert x.requires_grad and x.dtype == dtype
                for rows in x.detach().float().flatten(1):
                    assert rows.abs().max() <= bound and rows.abs().max() > 0.8 * bound
                    assert abs(rows.mean()) < 6 * bound / (3 * len(rows)) ** 0.5
                whole = x.detach().float().std() / bound
                assert abs(whole - 3**-0.5) < 0.05
        experts = layer.placement.experts
        distinct = {tuple(row.flatten().tolist()) for row in layer.w2_weight.detach().float()}
        assert len(distinct) == len(set(experts))
        for row, expert in enumerate(experts):
            assert torch.equal(layer.w13_weight[row], layer.w13_weight[experts.index(expert)])


def test_the_same_layer_on_any_ranks():
    """Seeded alike, ranks hold parts of the layer of one rank; padding is zeros."""
    whole = seeded(has_bias=True)
    source = {f"{name}": x for name, x in parameters(whole).items()}
    ways = [{"ep_size": 2, "ep_rank": r} for r in range(2)]
    ways += [{"tp_size": n, "tp_rank": r} for n in (2, 3) for r in range(n)]
    replicated = {"enable_eplb": True, "num_redundant_experts": 4}
    ways += [{**replicated, "ep_size": 2, "ep_rank": r} for r in range(2)]
    states = set()
    for way in ways:
        layer = seeded(has_bias=True, **way)
        states.add(torch.rand(()).item())
        found, expected = parameters(layer), make(has_bias=True, **way)
        for p in expected.parameters():
            p.data.zero_()
        moe_ops.load_checkpoint(expected, source, progress=False)
        for name, x in parameters(expected).items():
            assert torch.equal(found[name], x), (way, name)
    assert len(states) == 1


def test_padding_of_hidden_sizes_stays_zero(monkeypatch):
    from moe_ops.layer import options

    monkeypatch.setattr(options, "maybe_roundup_hidden_size", lambda hidden, *_: hidden + 16)
    layer = seeded(has_bias=True)
    for _ in range(2):
        assert layer.w13_weight.shape[-1] == H + 16 and layer.w13_weight[..., :H].all(-1).all()
        assert not layer.w13_weight[..., H:].any() and not layer.w2_weight[:, H:].any()
        assert not layer.w2_bias[:, H:].any() and layer.w2_bias[:, :H].any()
        for p in layer.parameters():
            p.data.fill_(torch.nan)
        layer.reset_parameters()


def test_initialization_can_be_skipped():
    """And nothing else draws random numbers."""
    state = torch.get_rng_state()
    with torch.device("meta"):
        on_meta = make()
    skipped = torch.nn.utils.skip_init(moe_ops.FusedMoE, E, 2, H, I, **SECOND_OF_TWO)
    assert all(p.requires_grad for m in (on_meta, skipped) for p in m.parameters())
    assert skipped.expert_map.tolist() == [-1] * 4 + [0, 1, 2, 3]
    make("fp8_block32"), make("fp8_block32").reset_parameters()
    assert torch.equal(torch.get_rng_state(), state)
    layer = make()
    state = torch.get_rng_state()
    moe_ops.load_checkpoint(layer, per_expert(Experts.random(E, H, I)), progress=False)
    loaded(make("fp8_channel"), "fp8_channel")
    moe_ops.quantize_(layer, "int8_w8a16", progress=False)
    assert torch.equal(torch.get_rng_state(), state)


def test_distributed_parameters_are_initialised():
    """FSDP2 makes the parameters of a layer on meta distributed tensors, then they are reset."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        with torch.device("meta"):
            layer = make(has_bias=True)
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
        layer.to_empty(device="cpu")
        torch.manual_seed(0)
        layer.reset_parameters()
        expected = parameters(seeded(has_bias=True))
        for name, p in layer.named_parameters():
            assert p.requires_grad and torch.equal(p.full_tensor(), expected[name])
    finally:
        torch.distributed.destroy_process_group()


def test_what_requires_grad_stays():
    """Loading, copies and casts keep it; quantized layers have no trainable parameters."""
    for before in (True, False):
        layer = make(has_bias=True).requires_grad_(before)
        changes = {
            "loaded": lambda m: moe_ops.load_checkpoint(
                m, per_expert(Experts.random(E, H, I)), progress=False, strict=False
            ),
            "deepcopy": copy.deepcopy,
            "pickle": lambda m: pickle.loads(pickle.dumps(m)),
            "cast": lambda m: m.to(torch.bfloat16),
            "state": lambda m: m.load_state_dict(make(has_bias=True).state_dict()),
            "empty": lambda m: m.to_empty(device="cpu").reset_parameters(),
        }
        for name, change in changes.items():
            found = change(layer)
            found = found if isinstance(found, torch.nn.Module) else layer
            assert all(p.requires_grad == before for p in found.parameters()), name
    alternating = make(has_bias=True, activation="swigluoai")  # I is no multiple of 64
    quantized = moe_ops.quantize_(alternating, "int4_w4a16_g32", progress=False)
    for layer in (quantized, make("fp8_block128", has_bias=True)):
        assert not any(p.requires_grad for p in layer.parameters())
    quantized.pack_()
    quantized.unpack_()
    assert not any(p.requires_grad for p in quantized.parameters())
    layer = make("fp8_block128", has_bias=True)  # blocks of a checkpoint are refined
    layer.w2_bias.requires_grad_()
    loaded_blocks = per_expert(Experts.random(E, H, I).quantized("fp8_block128"))
    moe_ops.load_checkpoint(layer, loaded_blocks, progress=False, strict=False)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["w2_bias"]


def test_an_empty_quantized_layer_warns_once():
    for scheme in ("fp8_block32", "int4_w4a16_g32", "mxfp4_w4a16", "nvfp4", "fp8_tensor"):
        layer = make(scheme)
        with pytest.warns(UserWarning, match="load_checkpoint") as found:
            layer(*batch())
            layer.float()(*batch())
        assert [w.filename for w in found] == [__file__]
        by_hand = make(scheme)
        by_hand.w2_weight_scale.data.view(torch.uint8).fill_(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            if scheme != "nvfp4":  # its checkpoints have input scales
                loaded(make(scheme), scheme)(*batch())
            by_hand(*batch())
            make(scheme).to("meta")(*(x.to("meta") for x in batch()))


def half():
    torch.manual_seed(0)
    return make(params_dtype=torch.bfloat16)


@pytest.mark.parametrize("kernel", [False, True])
def test_bits_without_grad_mode(kernel):
    """In training mode too they are those of a frozen layer, and only checkpoints record."""
    layer = half()
    if kernel:
        part = moe_ops.pipeline.MoEPrepareAndFinalizeNoEP()
        experts = layer.quant_method.select_gemm_impl(part, layer)
        layer.kernel = moe_ops.FusedMoEKernel(part, experts)
    x, logits = (t.bfloat16() for t in batch())
    recorded = layer(x, logits).detach()
    expected = layer.requires_grad_(False)(x, logits)
    assert torch.equal(recorded, expected)
    for trains, asked in product((True, False), (True, False)):
        layer.train(trains).requires_grad_(asked)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(layer(x, logits), expected), (trains, asked, mode)
                given = x.requires_grad_(mode is torch.no_grad), logits
                out = checkpoint(layer, *given, use_reentrant=True)
                assert torch.equal(out, expected)
        out = checkpoint(layer, x.requires_grad_(), logits, use_reentrant=True)
        assert torch.equal(out, recorded) and out.requires_grad
        out.sum().backward()
        x = x.detach()


def test_compiled_bits():
    """A compiled layer, in a checkpoint or around one, has the bits of an eager one."""
    layer = half()
    x, logits = (t.bfloat16() for t in batch())
    asked = x.clone().requires_grad_()
    recorded = layer(asked, logits).detach()
    with torch.no_grad():
        plain = layer(x, logits)
    for order in ("no grad, checkpoint, no grad", "checkpoint, no grad", "around, checkpoint"):
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for way in order.split(", "):
            if way == "no grad":
                with torch.no_grad():
                    assert torch.equal(compiled(x, logits), plain), order
                continue
            run = partial(checkpoint, compiled, use_reentrant=True)
            if way == "around":
                inside = partial(checkpoint, layer, use_reentrant=True)
                run = torch.compile(inside, fullgraph=True, backend="aot_eager")
            out = run(asked, logits)
            assert torch.equal(out, recorded), order
            out.sum().backward()


def test_chunks_keep_the_graph_connected():
    """Without tokens gradients are zeros, as DDP and FSDP2 need; rows of padding add nothing."""
    router, layer = torch.nn.Linear(H, E), make(chunk_size=2)
    for rows, most in ((0, None), (0, 3), (1, 5), (3, None)):
        x = torch.randn(rows, H, requires_grad=True)
        router.zero_grad(), layer.zero_grad()
        logits = router(x.detach())
        out = layer.forward_impl_chunked(x, logits, max_tokens_across_ranks=most)
        assert out.shape == x.shape
        out.sum().backward()
        grads = [p.grad for p in (x, *router.parameters(), *layer.parameters())]
        assert all((g is not None) and (bool(g.any()) == bool(rows)) for g in grads if g.numel())
        if rows == 1:
            found, size = x.grad.clone(), layer.chunk_size
            layer.chunk_size, x.grad = None, None
            layer(x, router(x.detach())).sum().backward()
            layer.chunk_size = size
            torch.testing.assert_close(x.grad, found)

"""`BatchedSymmetricPrepareAndFinalize` over processes, against one rank with all tokens."""

import pytest
import torch
from compilations import Compilations
from conftest import INTERPRETED
from modular import layer_config, setup
from rank_kernels import ANSWERS, COUNTS, PROBLEM, kernel_of, one_program, part_of
from ranks import compiled_on, config_of, device, experts_of, mine, spawn, two_gpus
from torch.utils.checkpoint import checkpoint

import moe_ops
from moe_ops.parallel import determine_expert_ranks

E, K, ROOM = PROBLEM.num_experts, PROBLEM.top_k, 9
RANKS = (2, 3)
COUNT_OF = {2: COUNTS[2], 3: (5, 0, 6)}
SCHEMES = ("unquantized", "fp8_block128", "fp8_channel", "fp8_tensor", "fp8_tensor_static", "nvfp4")
FEW = ("unquantized", "fp8_block128", "fp8_tensor_static")


def exchange_of(ranks, top_k=K, dtype=PROBLEM.dtype):
    sizes = (ROOM, PROBLEM.hidden_size, top_k, determine_expert_ranks(ranks, E))
    share = f"{top_k} slots"
    return moe_ops.pipeline.BatchedSymmetricPrepareAndFinalize(
        None, *sizes, dtype=dtype, share=share, timeout=ANSWERS
    )


def whole_prepare(s, ranks, ids, x, weights, on_input):
    """What one rank with the tokens of all ranks, padded, gives to all experts."""
    room = ranks * ROOM
    there = torch.cat([ROOM * r + torch.arange(n) for r, n in enumerate(COUNT_OF[ranks])])
    padded = [y.new_full((room, *y.shape[1:]), -1 if y is ids else 0) for y in (x, weights, ids)]
    for buffer, y in zip(padded, (x, weights, ids), strict=True):
        buffer[there.to(y.device)] = y
    one = moe_ops.pipeline.BatchedPrepareAndFinalize(room, E, 1, 0)
    return one.prepare(*padded, E, None, on_input, s.config, False), padded


@torch.no_grad()
def check_prepared(rank, ranks):
    tokens = mine(COUNT_OF[ranks], rank)
    held = slice(rank * (E // ranks), (rank + 1) * (E // ranks))
    modes = ((False, 3), (True, 3), (True, 1))
    for number, name in enumerate(FEW if INTERPRETED else SCHEMES):
        for on_input, top_k in modes[number:][:1] if INTERPRETED else modes:
            s = setup(
                PROBLEM.with_(scheme=name, top_k=top_k), moe_ops.pipeline.TritonExperts, device()
            )
            x, _, _, weights, ids, *_ = s.inputs
            ids = ids.masked_fill(torch.arange(11, device=ids.device)[:, None] == 2, -1)
            ids[3, 0], ids[4, 0] = E + 5, -7
            expected, (_, all_weights, all_ids) = whole_prepare(s, ranks, ids, x, weights, on_input)
            part = exchange_of(ranks, top_k)
            own = (x[tokens], weights[tokens], ids[tokens])
            if name == "fp8_tensor" and on_input:
                with pytest.raises(NotImplementedError, match="on_input must be False"):
                    part.prepare(*own, E, None, on_input, s.config, False)
                continue
            rows, scale, meta, local, there = part.prepare(*own, E, None, on_input, s.config, False)
            counts = expected.expert_tokens_meta.expert_num_tokens[held]
            assert torch.equal(meta.expert_num_tokens, counts)
            assert not meta.num_dropped.any()
            here = (all_ids >= held.start) & (all_ids < held.stop)
            assert torch.equal(local, torch.where(here, all_ids - held.start, -1).int())
            routed = ((all_ids >= 0) & (all_ids < E)).any(1)
            assert torch.equal(there[routed], all_weights[routed].float())
            assert rows.shape == expected.a1q[held].shape and rows.dtype == expected.a1q.dtype
            for expert, count in enumerate(counts.tolist()):
                a, b = rows[expert, :count], expected.a1q[held][expert, :count]
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
                if scale is not None:
                    a, b = (y[expert, :count] if y.shape[1] > 1 else y[expert]
                            for y in (scale, expected.a1q_scale[held]))  # fmt: skip
                    assert torch.equal(a.float(), b.float()), name
            sums = torch.zeros(ranks * ROOM, PROBLEM.hidden_size).to(x)
            noop = moe_ops.pipeline.TopKWeightAndReduceNoOP()
            part.finalize(sums, there, local, on_input, noop)


def kernels(s, rank, ranks, kind):
    held, expert_map = experts_of(rank, ranks, E)
    config = layer_config(s.problem, device())
    experts = kind(config, config_of(s.config, held), ROOM, ranks)
    kernel = moe_ops.FusedMoEKernel(exchange_of(ranks, dtype=s.problem.dtype), experts)
    oracle, arguments = kernel_of(
        s, rank, ranks, moe_ops.pipeline.AllGatherPrepareAndFinalize(None, ROOM)
    )
    return oracle, kernel, part_of(arguments, mine(COUNT_OF[ranks], rank))


def check_kernels(rank, ranks):
    kinds = moe_ops.pipeline.BatchedTritonExperts, moe_ops.pipeline.BatchedGroupedGemmExperts
    names = FEW if INTERPRETED else ("unquantized", "fp8_block128", "fp8_channel")
    for number, name in enumerate(names):
        for kind in kinds[number % 2 :][:1] if INTERPRETED else kinds:
            s = setup(PROBLEM.with_(scheme=name), moe_ops.pipeline.TritonExperts, device())
            oracle, kernel, arguments = kernels(s, rank, ranks, kind)
            expected = oracle.apply(**arguments).float()
            with torch.no_grad():
                out = kernel.apply(**arguments)
            error = (out.float() - expected).norm() / expected.norm().clamp(min=1e-9)
            assert error < 0.02, (name, kind.__name__, float(error))
            assert torch.equal(kernel.apply(**arguments), out)
            trained = arguments | {"hidden_states": arguments["hidden_states"].requires_grad_()}
            assert torch.equal(kernel.apply(**trained), out)


TRAINED = ("hidden_states", "topk_weights", "w1", "w2")


def gradients(apply, arguments, grad):
    """The result, and the gradients of what is trained."""
    given = {n: arguments[n].detach().clone().requires_grad_() for n in TRAINED}
    out = apply(**arguments | given)
    return [out.detach(), *torch.autograd.grad(out, [*given.values()], grad)]


def check_gradients(rank, ranks):
    """Gradients equal those of one rank with all tokens; results have the bits of inference."""
    tokens, (held, _) = mine(COUNT_OF[ranks], rank), experts_of(rank, ranks, E)
    for kind, on_input in (
        (moe_ops.pipeline.BatchedTritonExperts, False),
        (moe_ops.pipeline.BatchedGroupedGemmExperts, True),
    ):
        problem = PROBLEM.with_(dtype=torch.float32, on_input=on_input)
        s = setup(problem, moe_ops.pipeline.TritonExperts, device())
        _, kernel, own = kernels(s, rank, ranks, kind)
        own["topk_ids"] = own["topk_ids"].clone()
        own["topk_ids"][:1, 1:] = -1
        whole = s.arguments(topk_ids=s.inputs.topk_ids.clone())
        for first in (0, COUNT_OF[ranks][0]):
            whole["topk_ids"][first : first + 1, 1:] = -1
        grad = torch.randn(s.inputs[0].shape, generator=torch.Generator().manual_seed(7)).to(
            device()
        )
        expected = gradients(s.kernel.apply, whole, grad)
        with torch.no_grad():
            inferred = kernel.apply(**own)
        out, x, weights, w1, w2 = actual = gradients(kernel.apply, own, grad[tokens])
        assert torch.equal(out, inferred)
        for a, b in zip((out, x, weights), expected, strict=False):
            torch.testing.assert_close(a, b[tokens])
        for a, b in zip((w1, w2), expected[3:], strict=True):
            torch.testing.assert_close(a, b[held])
        if INTERPRETED:
            continue

        def recomputed(kernel=kernel, **call):
            return checkpoint(lambda: kernel.apply(**call), use_reentrant=False)

        for a, b in zip(gradients(recomputed, own, grad[tokens]), actual, strict=True):
            assert torch.equal(a, b)
        if on_input:
            continue
        compiled = compiled_on(0, kernel.apply, backend="aot_eager")
        for a, b in zip(gradients(compiled, own, grad[tokens]), actual, strict=True):
            assert torch.equal(a, b)


@torch.no_grad()
def check_compiled(rank, ranks):
    s = setup(PROBLEM, moe_ops.pipeline.TritonExperts, device())
    _, kernel, arguments = kernels(s, rank, ranks, moe_ops.pipeline.BatchedTritonExperts)
    kernel.apply(**arguments)
    backend = Compilations("aot_eager")
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = compiled_on(-1, kernel.apply, dynamic=True, backend=backend)
        whole = s.arguments()
        for counts in ((4, 7), (2, 6), (3, 0), (0, 5)):
            own = {**arguments, **part_of(whole, slice(counts[rank]))}
            own = {**own, **{n: arguments[n] for n in ("w1", "w2", "expert_map")}}
            assert torch.equal(compiled(**own), kernel.apply(**own))
    assert backend.count == (rank == ranks - 1)


@torch.no_grad()
def check_captured(rank, ranks):
    s = setup(PROBLEM, moe_ops.pipeline.TritonExperts, device())
    _, kernel, arguments = kernels(s, rank, ranks, moe_ops.pipeline.BatchedTritonExperts)
    names = ("hidden_states", "topk_weights", "topk_ids")
    static = {**arguments, **{n: arguments[n].clone() for n in names}}
    kernel.apply(**static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = kernel.apply(**static)
    g = torch.Generator().manual_seed(rank)
    shape = static["topk_ids"].shape
    for replay in range(200):
        ids = torch.rand(shape[0], E, generator=g).argsort(1)[:, :K]
        static["topk_ids"].copy_(ids.masked_fill(torch.rand(shape, generator=g) < 0.1, -1))
        static["hidden_states"].normal_()
        graph.replay()
        if replay % 20 == 0:
            assert torch.equal(out, kernel.apply(**static)), replay
    torch.cuda.synchronize()
    kernel.prepare_finalize.check()


def check_errors(rank, ranks):
    uneven = torch.zeros(E, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"equally many experts, got counts \[6, 0"):
        moe_ops.pipeline.BatchedSymmetricPrepareAndFinalize(None, ROOM, 64, K, uneven)
    part, config = exchange_of(ranks), moe_ops.FusedMoEQuantConfig("unquantized")
    x = torch.ones(ROOM, PROBLEM.hidden_size, device=device(), dtype=PROBLEM.dtype)
    ids = torch.zeros(ROOM, K, device=device(), dtype=torch.int32)  # K slots for one expert
    call = (x, ids.float(), ids, E, None, False, config)
    most, rows = ranks * ROOM, ranks * ROOM * K
    assert part.prepare(*call).expert_tokens_meta.num_dropped.sum() == (rank == 0) * (rows - most)
    with moe_ops.checking():
        if rank:
            part.prepare(*call)
            return
        with pytest.raises(ValueError, match=f"got {most}: {rows - most} rows did not fit"):
            part.prepare(*call)


def check_all(rank, ranks):
    if INTERPRETED:
        one_program()
    check_prepared(rank, ranks)
    check_kernels(rank, ranks)
    check_gradients(rank, ranks)
    check_errors(rank, ranks)
    if ranks == 2 and not INTERPRETED:
        check_compiled(rank, ranks)
    if device().type == "cuda":
        check_captured(rank, ranks)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (2, "gloo"),
        pytest.param(3, "gloo", marks=pytest.mark.exhaustive),
        pytest.param(2, "nccl", marks=two_gpus),
    ],  # fmt: skip
)
def test_rows_are_those_of_one_rank(ranks, backend):
    spawn(check_all, ranks, backend=backend)

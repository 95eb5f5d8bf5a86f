"""Two processes: results are summed over ranks, tokens are exchanged.

On the CPU, and on two GPUs where there are, also in CUDA graphs.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from checkpoints import Experts, per_expert
from ranks import BACKENDS, compiled_on, spawn
from torch._dynamo.testing import CompileCounter

import moe_ops

E, K, H, I, T = 4, 2, 32, 24, 6  # noqa: E741


def layer_of(device, **options):
    layer = moe_ops.FusedMoE(E, K, H, I, **options)
    moe_ops.load_checkpoint(layer, per_expert(Experts.random(E, H, I)), progress=False)
    return layer.to(device)


def check_rank(rank, device):
    g = torch.Generator().manual_seed(1)
    x, logits = (torch.randn(T, n, generator=g).to(device) for n in (H, E))
    expected = layer_of(device)(x, logits)
    for mode in ("tp", "ep"):
        options = {f"{mode}_size": 2, f"{mode}_rank": rank}
        part = layer_of(device, **options)
        reduced = layer_of(device, reduce_results=True, tp_group=dist.group.WORLD, **options)
        out = part(x, logits)
        torch.testing.assert_close(reduced(x, logits), expected)
        summed = part.maybe_all_reduce_tensor_model_parallel(out)
        torch.testing.assert_close(summed, expected)
        assert not torch.equal(out, expected)
        mine = slice(rank * T // 2, (rank + 1) * T // 2)
        sequence = layer_of(device, is_sequence_parallel=True, **options)
        torch.testing.assert_close(sequence(x[mine], logits[mine]), expected[mine])
        padding = torch.arange(T, device=device) % 3 == 1  # other rows on each rank
        out = sequence(x[mine], logits[mine], is_padding=padding[mine])
        unpadded = expected.masked_fill(padding[:, None], 0)
        torch.testing.assert_close(out, unpadded[mine])
        for layer, rows, lowered in ((reduced, slice(None), mode == "tp"), (sequence, mine, False)):
            turn = int(lowered != (mode == "ep"))
            check_compiled(turn, layer, x[rows], logits[rows], expected[rows], lowered=lowered)
            if device.type == "cuda":
                check_captured(layer, x[rows], logits[rows], expected[rows])


def check_compares_once(rank, device):
    """A compiled call compares no layers, and an eager call between two does not compile again."""
    torch._dynamo.reset()
    g = torch.Generator().manual_seed(2)
    x, logits = (torch.randn(T, n, generator=g).to(device) for n in (H, E))
    layer, counter = (
        layer_of(device, ep_size=2, ep_rank=rank, reduce_results=True),
        CompileCounter(),
    )
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    expected = layer_of(device)(x, logits)
    for call, agree in ((compiled, False), (layer, True), (compiled, True)):
        torch.testing.assert_close(call(x, logits), expected)
        assert layer.ranks_agree == agree
    assert counter.frame_count == 1


def check_unequal_parts(rank, device):
    """Ranks that split a sequence may have different numbers of tokens, also none.

    A kernel that leaves the tokens on their ranks is refused.
    """
    g = torch.Generator().manual_seed(1)
    x, logits = (torch.randn(T, n, generator=g).to(device) for n in (H, E))
    expected = layer_of(device)(x, logits)
    for options in ({"tp_size": 2, "tp_rank": rank}, {"ep_size": 2, "ep_rank": rank}):
        layer = layer_of(device, is_sequence_parallel=True, **options)
        for first in (1, 6, 0):
            mine = slice(first, None) if rank else slice(first)
            torch.testing.assert_close(layer(x[mine], logits[mine]), expected[mine])
        experts = moe_ops.select_kernel(layer.moe_config, "unquantized").fused_experts
        layer.kernel = moe_ops.FusedMoEKernel(moe_ops.pipeline.MoEPrepareAndFinalizeNoEP(), experts)
        with pytest.raises(NotImplementedError, match="exchanges tokens .*NoEP"):
            layer(x[:2], logits[:2])


def check_derived_ranks(rank, device):
    """A rank of the tensor-parallel group is a rank of the expert-parallel one."""
    g = torch.Generator().manual_seed(2)
    x, logits = (torch.randn(T, n, generator=g).to(device) for n in (H, E))
    layer = layer_of(device, tp_size=2, tp_rank=rank, ep_size=2, reduce_results=True)
    torch.testing.assert_close(layer(x, logits), layer_of(device)(x, logits))


def check_balanced(rank, device):
    """Rows travel between the devices, in place: a graph that was captured before them goes on."""
    g = torch.Generator().manual_seed(3)
    x, logits = (torch.randn(T, n, generator=g).to(device) for n in (H, E))
    expected = layer_of(device)(x, logits)
    layer = layer_of(
        device, dp_size=2, dp_rank=rank, ep_size=2, enable_eplb=True, num_redundant_experts=2,
        max_num_tokens=T,
    )  # fmt: skip
    state = moe_ops.EplbState.make(1, E, 2, device=device, group=dist.group.WORLD)
    layer.set_eplb_state(0, *state[1:])
    mine = slice(rank * T // 2, (rank + 1) * T // 2)
    run = functools.partial(layer, x[mine], logits[mine])
    torch.testing.assert_close(run(), expected[mine])
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = layer(x[mine], logits[mine])

        def run():
            graph.replay()
            return out

    for loads in ([9, 1, 1, 1, 9, 1], [1, 1, 9, 9, 1, 1]):
        state.expert_load.copy_(torch.tensor([loads]))
        before = state.physical_to_logical_map.clone()
        for _ in state.rebalance_steps([layer.expert_tensors()], 1, 1, 2):
            torch.testing.assert_close(run(), expected[mine])
        assert not torch.equal(before, state.physical_to_logical_map)


def check_exchanges(rank, device):
    """Ranks with different numbers of tokens, over every backend."""
    g = torch.Generator().manual_seed(3)
    x, logits = (torch.randn(T, n, generator=g).to(device) for n in (H, E))
    mine = slice(4) if rank == 0 else slice(4, 6)
    expected = layer_of(device)(x, logits)[mine]
    for backend in ("allgather_reducescatter", "fixed_capacity", "alltoall"):
        parallel = moe_ops.FusedMoEParallelConfig(
            dp_size=2, dp_rank=rank, ep_size=2, ep_rank=rank, use_ep=True, all2all_backend=backend
        )
        layer = layer_of(device, moe_parallel_config=parallel, max_num_tokens=4)
        torch.testing.assert_close(layer(x[mine], logits[mine]), expected)
        if backend == "alltoall":
            continue
        lowered = backend == "fixed_capacity"
        check_compiled(int(lowered), layer, x[mine], logits[mine], expected, lowered=lowered)
        if device.type == "cuda":
            check_captured(layer, x[mine], logits[mine], expected)


def check_compiled(turn, layer, x, logits, expected, *, lowered):
    """``lowered``: by AOTAutograd too, which takes twice as long as Dynamo alone."""
    backend = "aot_eager" if lowered else "eager"
    compiled = compiled_on(turn, layer, dynamic=True, backend=backend)
    torch.testing.assert_close(compiled(x, logits), expected)


@torch.no_grad()
def check_captured(layer, x, logits, expected):
    """Replays read what lies in the buffers by then."""
    rows = [torch.zeros_like(x), torch.zeros_like(logits)]
    layer(*rows)  # kernels are loaded, ranks are connected
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = layer(*rows)
    for buffer, value in zip(rows, (x, logits), strict=True):
        buffer.copy_(value)
    graph.replay()
    torch.testing.assert_close(out, expected)


def check_two(rank, ranks, backend):
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    check_rank(rank, device)
    check_derived_ranks(rank, device)
    check_compares_once(rank, device)
    check_unequal_parts(rank, device)
    check_balanced(rank, device)
    check_exchanges(rank, device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_processes(backend):
    spawn(check_two, 2, backend, backend=backend)

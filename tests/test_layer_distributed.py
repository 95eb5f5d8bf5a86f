"""Two processes: results are summed over ranks, tokens are gathered and scattered."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from checkpoints import Experts, per_expert

import moe_ops

E, K, H, I, T = 4, 2, 32, 24, 6  # noqa: E741


def layer_of(**options):
    layer = moe_ops.FusedMoE(E, K, H, I, **options)
    moe_ops.load_checkpoint(layer, per_expert(Experts.random(E, H, I)), progress=False)
    return layer


def check_rank(rank):
    g = torch.Generator().manual_seed(1)
    x, logits = torch.randn(T, H, generator=g), torch.randn(T, E, generator=g)
    expected = layer_of()(x, logits)
    for mode in ("tp", "ep"):
        options = {f"{mode}_size": 2, f"{mode}_rank": rank}
        part = layer_of(**options)
        reduced = layer_of(reduce_results=True, tp_group=dist.group.WORLD, **options)
        out = part(x, logits)
        torch.testing.assert_close(reduced(x, logits), expected)
        summed = part.maybe_all_reduce_tensor_model_parallel(out)
        torch.testing.assert_close(summed, expected)
        assert not torch.equal(out, expected)
        mine = slice(rank * T // 2, (rank + 1) * T // 2)
        sequence = layer_of(is_sequence_parallel=True, **options)
        torch.testing.assert_close(sequence(x[mine], logits[mine]), expected[mine])
    for layer, part in ((reduced, slice(None)), (sequence, mine)):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x[part], logits[part]), expected[part])


def run(rank, store):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    check_rank(rank)
    dist.destroy_process_group()


def test_two_processes():
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (f"{folder}/store",), nprocs=2)

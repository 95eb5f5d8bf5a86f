"""Data parallel training: two ranks with half of a batch each train as one process does."""

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from pairwise import half_exhaustive
from ranks import BACKENDS, device, spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.parallel import DistributedDataParallel
from training_models import KINDS, batch_of, model_of

SHARDING = inspect.getsource(FSDPParam._init_sharded_param)
"""torch 2.11 makes every shard a parameter that requires grad, which integers cannot be."""
RATE, STEPS, BITS = 0.1, 3, 2**9
"""``BITS``: how many units in the last place of float32 a step's sums may differ by."""


def sharded(model, **options):
    """Sharded by FSDP2: every block by itself, then the rest."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for block in model.layers:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def replicated(model):
    return DistributedDataParallel(model)


def checkpointed(model):
    """FSDP2 gathers weights again for the second forward pass."""
    model.checkpoint(use_reentrant=False)
    return sharded(model, reshard_after_forward=True)


def mixed(model):
    """Weights are gathered in bfloat16; gradients are summed in float32."""
    how = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(model, mp_policy=how)


WAYS = {"ddp": replicated, "fsdp": sharded, "fsdp-checkpoints": checkpointed, "fsdp-mixed": mixed}


def trained(model, batches, ranks=1):
    """The mean loss of each step of SGD, and by how much parameters have changed."""
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    trains = {name: p for name, p in inner.named_parameters() if p.requires_grad}
    before = {name: whole(p).clone() for name, p in trains.items()}
    for ids in batches:
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss)
    changes = {name: whole(p) - before[name] for name, p in trains.items()}
    return torch.stack(losses), changes


def whole(parameter):
    """A parameter's numbers, gathered from all ranks."""
    parameter = parameter.detach()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def check_training(rank, ranks, kind, way):
    model = model_of(kind).to(device())
    batches = [batch_of(2 * ranks, 9 + step).to(device()) for step in range(STEPS)]
    losses, changes = trained(copy.deepcopy(model), batches)
    halves = [ids.chunk(ranks)[rank] for ids in batches]
    found, changed = trained(WAYS[way](model), halves, ranks)
    rounding = BITS * torch.finfo(torch.float32).eps
    is_mixed = way == "fsdp-mixed"  # where gradients are as exact as bfloat16, or experts change
    torch.testing.assert_close(found, losses, rtol=0.02 if is_mixed else rounding, atol=0)
    assert set(changed) == set(changes)
    for name, exact in changes.items():
        assert changed[name].dtype == torch.float32
        if any(part in name for part in ("moe", "experts", "router", "gate")):
            assert exact.any() and changed[name].any(), name
            apart = (changed[name] - exact).norm() / exact.norm()
            assert is_mixed or apart <= rounding, (name, apart)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "way"), half_exhaustive([*KINDS, "qlora"], WAYS))
def test_ranks_train_as_one(kind, way, backend):
    if kind != "layer":
        pytest.importorskip("transformers")
    if kind == "qlora" and way.startswith("fsdp") and "requires_grad=" not in SHARDING:
        pytest.skip("fully_shard of this torch takes no quantized parameters")
    spawn(check_training, 2, kind, way, backend=backend)

"""Print the Triton cache keys of all kernels as JSON, after using kernels in some order.

    python tests/support/cache_keys.py ORDER

ORDER is ``forward``, ``backward`` or the seed of a shuffle. Launchers run on fake tensors and ask
Triton for their kernels' keys as a launch does; nothing is compiled. The other keys are computed
afterwards, in the same order of names.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import sys
import warnings
from unittest import mock

import torch
from aot import compiling
from products import plain_product, scaled_product, stored_product
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITCallable, JITFunction

import moe_ops.kernels
from moe_ops.kernels import align, expert_product, permute, weight_and_reduce
from moe_ops.kernels._runtime.cache_keys import compute_cache_key


def use_permutation() -> None:
    """Kernels that one cached function makes launches of."""
    rows, index, offset = empty(8, 64), empty(8, dtype=torch.int32), empty(5, dtype=torch.int32)
    permute.gather_rows(rows, index, offset, 2)
    permute.moe_unpermute(rows, empty(4, 2), index.view(4, 2), offset)


def use_weights() -> None:
    """Weights that are dequantized, or multiplied as they are where a GPU does that."""
    ids, w = empty(1, 2, dtype=torch.int32), empty(4, 64, 64, dtype=torch.uint8)
    scale = empty(4, 64, 4, dtype=torch.uint8)
    rest = (None, None, [None, ids, None], 2)
    stored_product(expert_product, empty(1, 128), w, scale, None, None, *rest, "mxfp4_w4a16")
    rows, row_scale = empty(2, 128, dtype=torch.float8_e4m3fn), empty(2, 4, dtype=torch.uint8)
    rest = (None, [None, ids, None], 1)
    scaled_product(
        expert_product, rows, row_scale, w, scale, None, *rest, "mxfp4_mxfp8", torch.bfloat16
    )


def use_plan() -> None:
    """Alignment, a GEMM and the sum."""
    ids = empty(64, 2, dtype=torch.int32)
    plan = align.plan_slots(ids, None, 4, "unquantized", torch.bfloat16)
    rest = (None, None, [plan, ids, None])
    plain_product(expert_product, empty(64, 64), empty(4, 64, 64), *rest, 2)
    weight_and_reduce.moe_fused_mul_sum(empty(64, 2, 64), empty(64, 2), ids, None, None, 4)


USES = {use.__name__: use for use in (use_permutation, use_weights, use_plan)}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A fake CUDA tensor."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def in_order(names: list[str], order: str) -> list[str]:
    """The sorted names, backwards, or shuffled by a seed."""
    names = sorted(names, reverse=order == "backward")
    if order.isdecimal():
        random.Random(int(order)).shuffle(names)
    return names


def functions() -> dict[str, JITCallable]:
    """Every Triton function of the library by its full name."""
    found = {}
    for info in pkgutil.walk_packages(moe_ops.kernels.__path__, "moe_ops.kernels."):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if isinstance(value, JITCallable) and value.fn.__module__.startswith("moe_ops."):
                found[f"{value.fn.__module__}.{value.fn.__qualname__}"] = value
    return found


def keys(order: str) -> dict[str, str]:
    """The key of every function."""
    with mock.patch.object(JITFunction, "run", lambda self, *_, **__: self.cache_key):
        for arch in (90, 100):
            with compiling(arch), FakeTensorMode():
                for name in in_order(list(USES), order):
                    USES[name]()
    found = functions()
    asked = sum(function.hash is not None for function in found.values())
    if asked < 40:
        raise RuntimeError(f"launchers asked for only {asked} keys")
    for name in in_order(list(found), order):
        compute_cache_key(found[name])
    return {name: found[name].cache_key for name in sorted(found)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of addresses of fake tensors
    print(json.dumps(keys(sys.argv[1])))

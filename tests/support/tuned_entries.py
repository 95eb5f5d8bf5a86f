"""Files of tuned tiles, piece by piece."""

import json

import pytest

from moe_ops.dispatch import tuned
from moe_ops.dispatch.hopper import PACKED
from moe_ops.dispatch.tuned_file import file_name, parse_tuned_layer
from moe_ops.inspect.devices import TARGETS

H200 = TARGETS["sm_90"].facts
SIZES = (8, 64, 128)


@pytest.fixture
def nothing_ships(monkeypatch, tmp_path):
    """The package has no tuned files, with which those of a user would begin."""
    len(tuned.TABLES)  # read for the tests that follow
    monkeypatch.setattr(tuned, "PACKAGED", tmp_path / "configs")


def gemm_of(block_n=64, block_k=64, group_m=1, num_warps=4, num_stages=3):
    return {
        "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": group_m,
        "num_warps": num_warps, "num_stages": num_stages,
    }  # fmt: skip


def entry(block_m=16, gemm1=None, gemm2=None):
    return {"BLOCK_M": block_m, "gemm1": gemm1 or gemm_of(), "gemm2": gemm2 or gemm_of(32)}


def own(kernel=PACKED, block_n=128, group_m=8, num_stages=4, **more):
    """A GEMM by one of Hopper's own kernels."""
    sizes = {"BLOCK_N": block_n, "GROUP_M": group_m, "num_stages": num_stages}
    return {"kernel": kernel, **sizes, **more}


def record(top_k=2, **entries):
    return {"top_k": top_k, **{key.strip("_"): value for key, value in entries.items()}}


def layer(content, sizes=SIZES, scheme="unquantized"):
    return parse_tuned_layer(file_name(sizes, "NVIDIA H200", scheme), json.dumps(content))

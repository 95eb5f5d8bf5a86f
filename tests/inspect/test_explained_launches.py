"""What `explain` says of tiles is what launchers take: every scheme, load and architecture."""

from dataclasses import asdict, replace
from itertools import product
from unittest import mock

import pytest
import torch
from conftest import INTERPRETED

pytest.importorskip("triton")
import aot  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import moe_ops  # noqa: E402
from moe_ops.dispatch.hopper import FETCH, PACKED, STREAM, TOKEN, HopperTiles  # noqa: E402
from moe_ops.dispatch.hopper_decode import (  # noqa: E402
    DECODE_FEW,
    DECODE_MANY,
    DECODE_SLOT,
    DECODE_SUM,
    decodes_to_fp8,
)
from moe_ops.dispatch.tiles import TileConfig  # noqa: E402
from moe_ops.inspect.devices import TARGETS  # noqa: E402
from moe_ops.kernels._hopper import dequantized_gemm  # noqa: E402
from moe_ops.kernels._hopper.gemm import Constants  # noqa: E402
from moe_ops.kernels._runtime.launch import Launch  # noqa: E402
from moe_ops.pipeline.row_spaces import depends_on_batch  # noqa: E402
from moe_ops.scheme import TENSORS, packs, what_lacks  # noqa: E402
from moe_ops.support import ARCHITECTURES  # noqa: E402

E, H, I, K = 32, 512, 256, 4  # noqa: E741
TOKENS = (1, 2, 8, 64, 512, 4096)
CONFIG = moe_ops.FusedMoEConfig(
    E, K, H, I, E, "silu", "cuda", moe_ops.RoutingMethodType.Renormalize
)
ROWS_BY_EXPERT = {
    "permuted": (moe_ops.pipeline.GroupedGemmExperts, None),
    "batched, few rows": (moe_ops.pipeline.BatchedTritonExperts, 3),
    "batched, some rows": (moe_ops.pipeline.BatchedTritonExperts, 50),
    "batched, many rows": (moe_ops.pipeline.BatchedGroupedGemmExperts, 400),
}
"""Experts whose rows lie by expert, and rows of an expert in the Batched format."""
GEMM_KERNELS = {
    "hopper_gemm_kernel": PACKED, "hopper_stream_kernel": STREAM,
    "hopper_token_kernel": TOKEN, "hopper_token_sum_kernel": TOKEN,
    "hopper_decode_few_kernel": DECODE_FEW, "hopper_decode_many_kernel": DECODE_MANY,
}  # fmt: skip


def fake(t):
    """What one expert has as a fake CUDA tensor of all experts."""
    return torch.empty(E, *t.shape[1:], dtype=t.dtype, device="cuda")


def weights_of(scheme, mode, arch, invariant=False):
    """Fake weights as a layer keeps them on a GPU, and the rest of its configuration."""
    shapes = ((1, 2 * I, H), (1, H, I))
    dense = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    if scheme.weight is None:
        with mode:
            return (*map(fake, dense), None)
    stored = [moe_ops.quantize_weight(w, scheme) for w in dense]
    plain = invariant and decodes_to_fp8(DECODE_MANY, scheme)
    if arch == 90 and not plain and all(packs(scheme, *shape[1:]) for shape in shapes):
        stored = [moe_ops.pack_weight(w, scheme) for w in stored]
    config, quant = moe_ops.FusedMoEQuantConfig.from_weights(scheme, *stored), scheme.activation
    given = {n: t for n in TENSORS if (t := getattr(config, n)) is not None}
    with mode:
        tensors = {name: fake(t) for name, t in given.items()}
        if quant is not None and (quant.static or quant.global_scale):
            names = ("a1_gscale", "a2_gscale") if quant.global_scale else ("a1_scale", "a2_scale")
            tensors |= {name: torch.empty(1, device="cuda") for name in names}
        config = moe_ops.FusedMoEQuantConfig(scheme, **tensors)
        return *(fake(w.data) for w in stored), config


def launched(layer, target, mode):
    """The tiles of both GEMMs of a call on a GPU, as launches have them; nothing is compiled."""
    seen = []

    def record(self, grid, *arguments):
        name, constants = self.kernel.__name__, self.constants
        for c in constants.values():
            kernel = GEMM_KERNELS.get(name)
            if isinstance(c, Constants):
                kernel = FETCH if c.FETCHES else kernel
                tiles = (c.BLOCK_M, c.BLOCK_N, c.GROUP_M, c.STAGES, c.ON_DEMAND)
                seen.append(asdict(HopperTiles(kernel, *tiles)))
            elif isinstance(c, dequantized_gemm.DequantizedConstants) and kernel is not None:
                tiles = (c.BLOCK_M, 64 * c.STAGE_UNITS, c.GROUP_M, c.STAGES, c.ON_DEMAND, c.CTAS)
                seen.append(asdict(HopperTiles(kernel, *tiles)))
        if name in JOBS:
            seen.append({"kernel": JOBS[name], "num_stages": constants["S"].BUFFERS})
        elif name in ("hopper_token_kernel", "hopper_token_sum_kernel"):
            seen.append({"kernel": TOKEN, "num_stages": constants["G"].STAGES})
        elif "BLOCK_K" in constants:
            seen.append(asdict(TileConfig(*(constants[size] for size in PLAIN))))

    recorded = mock.patch.object(Launch, "__call__", record)
    with aot.compiling(target.facts), mode, aot.OnKernels(), recorded:
        layer()
    return seen


JOBS = {"hopper_decode_slot_kernel": DECODE_SLOT, "hopper_decode_sum_kernel": DECODE_SUM}
PLAIN = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "num_warps", "num_stages")


def explained(tiles):
    """A cost's tiles as `launched` has them."""
    if isinstance(tiles, HopperTiles) and tiles.kernel in (TOKEN, DECODE_SLOT, DECODE_SUM):
        return {"kernel": tiles.kernel, "num_stages": tiles.num_stages}
    return asdict(tiles)


@pytest.mark.skipif(INTERPRETED, reason="what is launched on a GPU")
@pytest.mark.filterwarnings("ignore")  # of addresses of fake tensors
@pytest.mark.parametrize("name", moe_ops.SCHEMES)
def test_explained_tiles_are_launched(name):
    scheme = moe_ops.get_scheme(name)
    mode = FakeTensorMode()
    wrong = []
    for arch in ARCHITECTURES:
        target = TARGETS[f"sm_{arch}"]
        if what_lacks(scheme, arch) is not None:
            continue
        w1, w2, quant = weights_of(scheme, mode, arch)
        told = moe_ops.explain(CONFIG, scheme, num_tokens=TOKENS, device=target.name)
        for cost in told.costs:
            tokens = cost.num_tokens

            def layer(tokens=tokens, w1=w1, w2=w2, quant=quant):
                x = torch.empty(tokens, H, dtype=torch.bfloat16, device="cuda")
                ids = torch.empty(tokens, K, dtype=torch.int32, device="cuda")
                weights = torch.empty(tokens, K, device="cuda")
                moe_ops.fused_experts(x, w1, w2, weights, ids, quant_config=quant)

            ran = launched(layer, target, mode)
            said = [explained(cost.gemm1), explained(cost.gemm2)]
            if ran != said:
                wrong.append((arch, tokens, ran, said))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.skipif(INTERPRETED, reason="what is launched on a GPU")
@pytest.mark.filterwarnings("ignore")  # of addresses of fake tensors
@pytest.mark.parametrize("kind", ROWS_BY_EXPERT)
@pytest.mark.parametrize("name", moe_ops.SCHEMES)
def test_explained_tiles_of_rows_by_expert_are_launched(name, kind):
    """Their plans have other row tiles than those of slots have; also in batch-invariant mode."""
    scheme, (cls, most), mode = moe_ops.get_scheme(name), ROWS_BY_EXPERT[kind], FakeTensorMode()
    modes = (False,) if depends_on_batch(scheme.activation) else (False, True)
    wrong, turn = [], [*moe_ops.SCHEMES].index(name) + [*ROWS_BY_EXPERT].index(kind)
    for arch, invariant in product((90, (80, 100)[turn % 2]), modes):
        if what_lacks(scheme, arch) is not None:
            continue
        target = TARGETS[f"sm_{arch}"]
        w1, w2, quant = weights_of(scheme, mode, arch, invariant)
        config = replace(CONFIG, max_num_tokens=most, batch_invariant=invariant)
        counts = (2, 512) if most is None else (2,)
        options = {"device": target.name, "candidates": (cls,)}
        told = moe_ops.explain(config, quant or scheme, num_tokens=counts, **options)
        sizes = () if most is None else (most, 1)
        experts = cls(config, quant or moe_ops.FusedMoEQuantConfig(name), *sizes)
        for cost in told.costs:

            def layer(tokens=cost.num_tokens, experts=experts, w1=w1, w2=w2):
                rows = (tokens,) if most is None else (E, most)
                x = torch.empty(*rows, H, dtype=torch.bfloat16, device="cuda")
                ids = torch.empty(tokens, K, dtype=torch.int32, device="cuda")
                weights = torch.empty(tokens, K, device="cuda")
                counted = torch.empty(E, dtype=torch.int32, device="cuda")
                meta = moe_ops.pipeline.ExpertTokensMetadata(counted, None) if most else None
                routing = (weights, ids, "silu", E, None, None, meta, False)
                experts.apply(x, w1, w2, *routing)

            ran = launched(layer, target, mode)
            said = [explained(cost.gemm1), explained(cost.gemm2)]
            if ran != said:
                wrong.append((arch, invariant, cost.num_tokens, ran, said))
    assert not wrong, "\n".join(map(str, wrong))

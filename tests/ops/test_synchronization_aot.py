"""Fences, waits and arrivals of kernels whose threads or ranks wait for each other, as compiled.

No interpreter sees a fence that is gone, or a wait that leaves too much under way: on a GPU results
are then right nearly always. So what the PTX has of each is pinned here, with its reason. The
launches are those of other compile tests, which leave them in Triton's cache.
"""

import re
from collections import Counter

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
triton = pytest.importorskip("triton")

import aot  # noqa: E402
from aot_launches import H200, launch_hopper_layer, launch_packed_layer, packed  # noqa: E402
from products import stored_product, stored_sum  # noqa: E402
from token_layers import Layer  # noqa: E402

from moe_ops.kernels import expert_product, symmetric, symmetric_batched  # noqa: E402
from moe_ops.windows import FAILED  # noqa: E402

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="what Triton 3.6 makes"),
]
BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
PATTERNS = {
    "fence": r"fence\.proxy\.async",
    "products left": r"wgmma\.wait_group\.sync\.aligned (\d+)",
    "copies left": r"cp\.async\.wait_group\s+(\d+)",
    "wait": r"mbarrier\.try_wait",
    "arrive": r"mbarrier\.arrive\.shared",
    "expect": r"mbarrier\.arrive\.expect_tx",
    "copies arrive": r"cp\.async\.mbarrier\.arrive",
    "turn": r"griddepcontrol\.wait",
    "let in": r"griddepcontrol\.launch_dependents",
    "release": r"atom\S*\.release",
    "acquire": r"atom\S*\.acquire",
}
"""Instructions by name; of what waits for all but some, the number of those is found too."""


def synchronization(kernel):
    """How many of each of these instructions a kernel has; of waits, by how many are left."""
    counts = {}
    for name, pattern in PATTERNS.items():
        hits = re.findall(pattern, kernel.asm["ptx"])
        if hits:
            counts[name] = dict(Counter(map(int, hits))) if hits[0].isdigit() else len(hits)
    return counts


def packed_token(empty):
    """Both GEMMs of one token with packed weights."""
    (n, k, slots), scheme = (2048, 768, 8), "mxfp4_w4a16"
    x, h, ids = empty(1, n), empty(slots, k), empty(1, slots, dtype=I32)
    w1, w2 = (packed(empty, scheme, *sizes, BF16) for sizes in ((2 * k, n), (n, k)))
    tiles, weights = [None, ids, None], empty(1, slots, dtype=F32)
    rows = (x, *w1, empty(128, 2 * k), None, tiles, slots, scheme, "silu")
    stored_product(expert_product, *rows)
    stored_sum(expert_product, h, *w2, empty(128, n), weights, tiles, scheme)


def token(empty):
    """Both GEMMs of one token: of the second one, the kernel that reads early and the other."""
    for scheme in ("unquantized", "fp8_block128"):
        layer = Layer(empty, (128, 2048, 768, 8), scheme)
        layer.rows("relu2_no_mul")
        layer.sum(early=True)


def exchange(empty):
    """A send to 8 ranks, what they return, and a send in the Batched format."""
    where = (empty(9, dtype=I64), empty(FAILED + 1, dtype=I32))
    weights, ids = empty(64, 8, dtype=F32), empty(64, 8, dtype=I32)
    holders, x = empty(256, dtype=I32), empty(64, 2048)
    symmetric.symmetric_send(x, None, weights, ids, holders, *where, 64, 256, False, "")
    symmetric.symmetric_return(empty(512, 2048), holders, *where, 8)
    where = (empty(3, dtype=I64), empty(FAILED + 1, dtype=I32), 64)
    placement, held = empty(2, 64, dtype=I32), empty(32, dtype=I32)
    given = (x, None, weights, ids, placement, held, *where)
    symmetric_batched.symmetric_send_batched(*given, False, "")


LAUNCHES = {
    "packed fp8": (90, launch_hopper_layer("fp8_channel", 8000, "silu", 2048, 768, False)),
    "packed dense": (90, launch_hopper_layer("unquantized", 65536, "silu", 4096, 1536, False)),
    "stream": (90, launch_hopper_layer("fp8_block128", 100, "swigluoai", 2880, 2880, False)),
    "few 16": (16, launch_packed_layer("mxfp4_w4a16", 16, "swigluoai", (2880, 2880))),
    "few 64": (64, launch_packed_layer("mxfp4_w4a16", 64, "swigluoai", (2880, 2880))),
    "many": (128, launch_packed_layer("mxfp4_w4a16", 128, "silu", (2048, 768))),
    "jobs": (None, packed_token),
    "token": (90, token),
    "exchange": (90, exchange),
}
"""An architecture, or a row tile on an H200; and launches."""


PINNED = {
    # The fence of barriers that were set up. An fp8 product is waited for at once, in two parts by
    # each of two warp groups: nothing may read its registers before.
    "packed fp8": [
        {"fence": 1, "products left": {0: 4}, "wait": 12, "arrive": 11, "expect": 2, "turn": 1},
        {"fence": 1, "products left": {0: 4}, "wait": 17, "arrive": 16, "expect": 2, "turn": 1},
    ],
    # Each warp group leaves one product under way, so that a stage is released once the next one's
    # product has begun, and waits for all of a tile's at its end.
    "packed dense": [
        {"fence": 1, "products left": {0: 2, 1: 2}, "wait": 12, "arrive": 13, "expect": 2,
         "turn": 1}
    ] * 2,
    # A second fence: threads write the rows that WGMMA reads through the async proxy.
    "stream": [
        {"fence": 2, "products left": {0: 1}, "wait": 2, "arrive": 1, "expect": 1,
         "copies arrive": 1, "turn": 1, "let in": 1}
    ] * 2,
    # Each of the two loops (over half and whole tiles) has one fence before a stage is released, as
    # words may be on their way to registers, and an arrival of the loads that read it.
    "few 16": [
        {"fence": 3, "wait": 4, "expect": 2, "copies arrive": 4, "turn": 1, "let in": 1}
    ] * 2,
    # Two warp groups with two loops each have a fence before WGMMA reads rows that threads wrote,
    # and a wait for all products before the stage is released.
    "few 64": [
        {"fence": 5, "products left": {0: 4}, "wait": 6, "expect": 2, "copies arrive": 6,
         "turn": 1, "let in": 1}
    ] * 2,
    # TMA writes rows, so no fence but those of barriers. For each of four parts and two warp
    # groups: products of one unit are waited for while the other's are under way, all at the end.
    "many": [
        {"fence": 2, "products left": {0: 8, 1: 24, 2: 8}, "wait": 17, "arrive": 8, "expect": 2,
         "copies arrive": 8, "turn": 1}
    ] * 2,
    # A round of copies is there when all but those of later rounds have arrived.
    "jobs": [
        {"copies left": {1: 1}, "turn": 1, "let in": 1},
        {"copies left": {2: 1}, "turn": 1, "let in": 1},
    ],
    # A second fence: threads write the vectors. 16-bit products overlap the next stage's, those of
    # 8 bits are waited for at once. GEMM 1 lets GEMM 2 in at its last weights or at its end, in
    # each of two copying warps; GEMM 2 reads what GEMM 1 wrote after its turn has come.
    "token": [
        {"fence": 2, "products left": {0: 1, 2: 2}, "wait": 4, "arrive": 2, "expect": 2,
         "turn": 1, "let in": 4},
        {"fence": 2, "products left": {0: 1, 2: 2}, "wait": 4, "arrive": 2, "expect": 2, "turn": 1},
        {"fence": 2, "products left": {0: 1}, "wait": 3, "arrive": 1, "expect": 2,
         "copies arrive": 2, "turn": 1, "let in": 4},
        {"fence": 2, "products left": {0: 1}, "wait": 3, "arrive": 1, "expect": 2,
         "copies arrive": 2, "turn": 1},
    ],
    # A flag is released in each rank's window after what is written there, and acquired before that
    # is read. In the Batched format ranks do so twice, first with ids, for all programs' flags.
    "exchange": [
        {"turn": 1, "let in": 1, "release": 8, "acquire": 1},
        {"turn": 1, "let in": 1, "release": 8, "acquire": 1},
        {"turn": 1, "let in": 1, "release": 4, "acquire": 5},
    ],
}  # fmt: skip
"""What the kernels of each launch have, in their order."""
BESIDE = ("_count_blocks_kernel", "_align_blocks_kernel", "_align_kernel", "_pack_kernel")
"""Kernels that nothing waits in."""


def test_what_waits_for_what():
    wrong = []
    for name, (where, launch) in LAUNCHES.items():
        gpu = where if where == 90 else H200._replace(row_tile=where)
        kernels = [k for k in aot.compile_launch(gpu, launch) if k.metadata.name not in BESIDE]
        found = [synchronization(kernel) for kernel in kernels]
        if found != PINNED[name]:
            wrong += [f"{name}: {[k.metadata.name for k in kernels]} have {found}"]
    assert not wrong, "\n".join(wrong)

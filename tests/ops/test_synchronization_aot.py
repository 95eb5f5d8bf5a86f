"""Fences, waits and arrivals of kernels whose threads or ranks wait for each other, as compiled.

No interpreter sees a fence that is gone, or a wait that leaves too much under way: on a GPU results
are then right nearly always. So what the PTX has of each is pinned here, with its reason. The
launches are those of other compile tests, which leave them in Triton's cache.
"""

import re
from collections import Counter

import pytest
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
triton = pytest.importorskip("triton")

import aot  # noqa: E402
from aot_launches import H200  # noqa: E402
from stage_launches import SYNCHRONIZED  # noqa: E402

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="what Triton 3.6 makes"),
]
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


PINNED = {
    # The fence of barriers that were set up. An fp8 product is waited for at once, in two parts by
    # each of two warp groups: nothing may read its registers before. The first GEMM fetches rows:
    # each warp group has a fence before WGMMA reads through the async proxy what threads wrote.
    "packed fp8": [
        {"fence": 3, "products left": {0: 4}, "wait": 15, "arrive": 13, "expect": 1,
         "copies arrive": 1, "turn": 1},
        {"fence": 1, "products left": {0: 4}, "wait": 17, "arrive": 16, "expect": 2, "turn": 1},
    ],
    # Each warp group leaves one product under way, so that a stage is released once the next one's
    # product has begun, and waits for all of a tile's at its end.
    "packed dense": [
        {"fence": 3, "products left": {0: 2, 1: 2}, "wait": 15, "arrive": 15, "expect": 1,
         "copies arrive": 1, "turn": 1},
        {"fence": 1, "products left": {0: 2, 1: 2}, "wait": 12, "arrive": 13, "expect": 2,
         "turn": 1},
    ],
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
    # A thread for each rank releases a flag in its window after what is written there; flags are
    # acquired before that is read. In the Batched format ranks do so twice, first with ids, for all
    # programs' flags. Rows of sums are loaded two turns ahead. A turn of a writer leaves one turn's
    # rows and addresses under way, one of an adder its rows; after both loops nothing is.
    "exchange": [
        {"turn": 1, "let in": 1, "release": 1, "acquire": 1},
        {"copies left": {2: 1, 1: 1, 0: 2}, "turn": 1, "let in": 1, "release": 1, "acquire": 1},
        {"turn": 1, "let in": 1, "release": 2, "acquire": 5},
    ],
    # A kernel finds the rows of experts before. A fence in each of two warp groups: threads write
    # the rows that WGMMA reads. Products overlap those of the next step, and are waited for at the
    # end of the loop and again after it.
    "gradient": [
        {"turn": 1, "let in": 1},
        {"fence": 3, "products left": {0: 4, 1: 2}, "wait": 3, "arrive": 4, "copies arrive": 1,
         "turn": 1},
    ] * 3,
}  # fmt: skip
"""What the kernels of each launch have, in their order."""
BESIDE = ("_count_blocks_kernel", "_align_blocks_kernel", "_align_kernel", "_pack_kernel")
"""Kernels that nothing waits in."""


def has_written(kernel):
    """Whether all threads have stored what a flag says: a barrier stands before each release."""
    steps = re.findall(r"st\.global|bar\.sync|\.release", kernel.asm["ptx"])
    before = [a for a, b in zip(steps, steps[1:], strict=False) if b == ".release"]
    return set(before) <= {"bar.sync"}


def leaves_together(kernel):
    """Whether a loop's end hangs on nothing but a reduction, which all threads share.

    Each warp reads the clock and other ranks' notes for itself: one that left by what it has read
    would leave the others to reduce without it, and they name a wrong rank.
    """
    text, ends = kernel.asm["ttgir"], []
    body = re.compile(r"^( *)%\S+ = scf\.while.*?^\1} do {(.*?)^\1}", re.DOTALL | re.MULTILINE)
    for _, loop in body.findall(text):
        carried = re.findall(r"^ *scf\.yield (%\S+) : i32", loop, re.MULTILINE)
        ends.append(len(carried) == 1 and f'{carried[0]} = "tt.reduce"' in loop)
    return all(ends) and len(ends) == text.count("scf.while")


def test_what_waits_for_what():
    wrong = []
    for name, (where, launch) in SYNCHRONIZED.items():
        gpu = where if where == 90 else H200._replace(row_tile=where)
        kernels = [k for k in aot.compile_launch(gpu, launch) if k.metadata.name not in BESIDE]
        found = [synchronization(kernel) for kernel in kernels]
        wrong += [k.metadata.name for k in kernels if not has_written(k)]
        if name == "exchange":
            wrong += [
                f"{k.metadata.name} leaves warps behind" for k in kernels if not leaves_together(k)
            ]
        if found != PINNED[name]:
            wrong += [f"{name}: {[k.metadata.name for k in kernels]} have {found}"]
    assert not wrong, "\n".join(wrong)

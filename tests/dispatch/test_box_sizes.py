"""Sizes of every remainder: who takes a GEMM, and whether its programs suffice."""

from itertools import product

import torch

from moe_ops import get_scheme
from moe_ops.activation import formula
from moe_ops.dispatch.device import NO_GPU
from moe_ops.dispatch.families.portable import SLOT
from moe_ops.dispatch.gemm_plan import plan_gemm
from moe_ops.dispatch.hopper import (
    FETCH,
    PACKED,
    STREAM,
    TOKEN,
    TOKEN_SUM,
    gathered_rows,
    operand_bytes,
)
from moe_ops.dispatch.operands import layer_operands
from moe_ops.dispatch.problem import problem_of
from moe_ops.dispatch.row_tiles import row_tile_rule
from moe_ops.dispatch.tiles import (
    KNOWN_ROW_TILES,
    Gemm,
    TileConfig,
    cdiv,
    direct_slots,
    max_programs,
    max_row_tiles,
    one_row_tile,
    plan_sizes,
)

MANY = (PACKED, FETCH)
HOPPERS = (*MANY, STREAM, TOKEN, TOKEN_SUM)
SCHEMES = ("unquantized", "fp8_channel", "fp8_block128", "int8_channel")
E, K = 64, 4
NS, KS = (80, 68, 72, 76, 704, 708, 716), (128, 132, 136, 140, 144, 264, 708, 712, 720)


def problem(name, tokens, n, k, activation, facts):
    """The first GEMM of a layer, or with one token and no activation the second one."""
    halves = 2 if activation and formula(activation).gated else 1
    rule = row_tile_rule(name, 2, facts.arch, facts.row_tile, False)
    layer = ((E, halves * n, k), get_scheme(name), torch.bfloat16, rule, tokens * K)
    how = {"top_k": K if activation else 1, "activation": activation}
    return problem_of(layer_operands(*layer, num_tokens=tokens, **how))


def test_sizes_that_no_box_holds():
    """Rows of 16 bytes along K, and 8 gate rows beside 8 up rows: else no Hopper kernel."""
    wrong, taken = [], set()
    activations = ("silu", "swigluoai", "relu2_no_mul", "")
    for name, tokens, activation in product(SCHEMES, (1, 2, 64, 4096), activations):
        for n, k, rows in product(NS, KS, (None, 16, 64, 128, 192)):
            facts = NO_GPU._replace(row_tile=rows)
            kernel = plan_gemm(problem(name, tokens, n, k, activation, facts), facts).kernel
            gated = activation != "" and formula(activation).gated
            whole = k * operand_bytes(get_scheme(name)) % 16 == 0 and (not gated or n % 8 == 0)
            fused = name[:4] != "int8" and tokens == 1
            if whole and fused and name != "fp8_block128":
                wanted = kernel == (TOKEN if activation else TOKEN_SUM)
            elif whole and tokens == 4096 and rows in (64, 128) and name != "fp8_block128":
                wanted = kernel in MANY
            elif whole:
                wanted = kernel not in MANY or tokens > 2  # so few slots have no plan
            else:
                wanted = kernel not in HOPPERS
            taken.add(kernel)
            wrong += [] if wanted else [(name, tokens, activation, n, k, rows, kernel)]
    assert not wrong, wrong[:9]
    assert taken >= {*HOPPERS, SLOT.kernel}


def test_programs_for_every_tile():
    """However slots lie: the most tiles that so many slots can have."""
    for slots, experts, tile in product(range(1, 90), (1, 2, 3, 8, 40), KNOWN_ROW_TILES):
        rule, n = one_row_tile(tile), 36
        most = min(slots, experts) + max(slots - experts, 0) // tile
        sizes = plan_sizes(slots, experts, rule)
        assert sizes.tiles >= most and sizes.rows >= most * tile
        rows = gathered_rows(slots, experts, tile)
        assert rows % 4 == 0 and rows >= most * tile
        direct = slots <= direct_slots(experts)
        programs = max_programs(
            Gemm(slots, experts, n, 16, 2, 1, rule), TileConfig(tile, 16, 16, 1, 4, 1)
        )
        assert max_row_tiles(slots, experts, tile) >= (slots if direct else most)
        assert programs >= (slots if direct else most) * cdiv(n, 16)

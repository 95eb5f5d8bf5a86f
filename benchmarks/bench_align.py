"""Time the alignment operators: slots sorted by expert and padded to tiles, and counted."""

from __future__ import annotations

from collections.abc import Iterator

from stages import Case, main, nbytes
from torch import Tensor

from moe_ops import ops
from moe_ops.bench.problems import Inputs, Problem
from moe_ops.tiles import ROW_TILES


def cases(problem: Problem, inputs: Inputs) -> Iterator[Case]:
    ids, num_experts = inputs.topk_ids, problem.num_experts

    def align() -> tuple:
        return ops.moe_align_block_size(ids, None, ROW_TILES, num_experts, False, True)

    def plan() -> Tensor:
        return ops.plan_slots(ids, None, ROW_TILES, num_experts)

    def count() -> Tensor:
        return ops.count_expert_num_tokens(ids, None, num_experts)

    counts = count()
    room = inputs.x.shape[0]

    def batched() -> Tensor:
        return ops.plan_batched(counts, room, ROW_TILES)

    offset = ops.moe_permutation(ids, None, num_experts)[0]

    def permuted() -> Tensor:
        return ops.plan_permuted(offset, ids.numel(), ROW_TILES)

    yield Case("moe_align_block_size", align, nbytes(ids, *align()))
    yield Case("plan_slots", plan, nbytes(ids, plan()))
    yield Case("count_expert_num_tokens", count, nbytes(ids, counts))
    yield Case("plan_batched", batched, nbytes(counts, batched()))
    yield Case("plan_permuted", permuted, nbytes(offset, permuted()))


if __name__ == "__main__":
    main("align", cases)

"""Time the alignment operators: slots sorted by expert and padded to tiles, and counted."""

from __future__ import annotations

from collections.abc import Iterator

from stages import Case, main, nbytes, row_tiles
from torch import Tensor

from moe_ops import ops
from moe_ops.bench.problems import Inputs, Problem


def cases(problem: Problem, inputs: Inputs) -> Iterator[Case]:
    ids, num_experts = inputs.topk_ids, problem.num_experts
    tiles = row_tiles(problem, "unquantized", ids.device)

    def align() -> tuple:
        return ops.moe_align_block_size(ids, None, tiles, num_experts, False, True)

    def plan() -> Tensor:
        return ops.plan_slots(ids, None, tiles, num_experts)

    def count() -> Tensor:
        return ops.count_expert_num_tokens(ids, None, num_experts)

    counts = count()
    room = inputs.x.shape[0]

    def batched() -> Tensor:
        return ops.plan_batched(counts, room, tiles)

    offset = ops.moe_permutation(ids, None, num_experts)[0]

    def permuted() -> Tensor:
        return ops.plan_permuted(offset, ids.numel(), tiles)

    yield Case("moe_align_block_size", align, nbytes(ids, *align()))
    yield Case("plan_slots", plan, nbytes(ids, plan()))
    yield Case("count_expert_num_tokens", count, nbytes(ids, counts))
    yield Case("plan_batched", batched, nbytes(counts, batched()))
    yield Case("plan_permuted", permuted, nbytes(offset, permuted()))


if __name__ == "__main__":
    main("align", cases)

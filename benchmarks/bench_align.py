"""Time the alignment operators: slots sorted by expert and padded to tiles, and counted."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main

from moe_ops import ops
from moe_ops.dispatch.row_tiles import expert_rule
from moe_ops.dispatch.tiles import row_tile
from moe_ops.functional import count_expert_num_tokens, moe_align_block_size
from moe_ops.pipeline.row_spaces import BatchedRows, permuted_rows
from moe_ops.tensors import Permutation


def cases(layer: Layer) -> Iterator[Case]:
    ids, num_experts = layer.inputs.topk_ids, layer.problem.num_experts
    yield from layer.cases("align")  # none for few slots: their ids tell the tiles

    # Rows that lie by expert, as experts of the Batched format and `GroupedGemmExperts` have them.
    scheme, room = layer.experts.scheme, len(ids)
    counts = count_expert_num_tokens(ids, num_experts)
    yield from layer.cases("align", lambda: BatchedRows.of(counts, room, scheme, False))
    order = Permutation(*ops.moe_permutation(ids, None, num_experts))
    yield from layer.cases("align", lambda: permuted_rows(order, ids.numel(), scheme, False))

    # Public functions that the layer itself does not call. A block is a power of two.
    rule = expert_rule(scheme.key, ids.device)
    tile = row_tile(rule, ids.numel(), num_experts)
    block = tile & -tile
    yield from layer.cases("align", lambda: count_expert_num_tokens(ids, num_experts))
    yield from layer.cases("align", lambda: moe_align_block_size(ids, block, num_experts))

    # With adapters: each token's own of eight.
    of_tokens = torch.arange(len(ids), device=ids.device) % 8
    yield from layer.cases("align", lambda: ops.adapter_ids(ids, None, of_tokens, num_experts, 8))


if __name__ == "__main__":
    main("align", cases)

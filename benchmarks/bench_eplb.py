"""Time the mapping to physical experts, with and without counting their load."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, nbytes

from moe_ops import ops
from moe_ops.parallel import compute_logical_maps, initial_physical_to_logical_map

REDUNDANT_EXPERTS = 32


def cases(layer: Layer) -> Iterator[Case]:
    ids, num_experts = layer.inputs.topk_ids, layer.problem.num_experts
    placement = initial_physical_to_logical_map(num_experts, REDUNDANT_EXPERTS)
    maps = compute_logical_maps(placement.to(ids.device), num_experts)
    load = torch.zeros(placement.shape, dtype=torch.int32, device=ids.device)
    # Per expert with tokens: its replica count, a replica, and a load that is read and written.
    touched = layer.inputs.num_active * (8 + 8 + 2 * load.element_size())
    for name, enabled in (("", None), (":not_recorded", load.new_zeros(1))):
        yield Case(
            f"eplb_map_to_physical_and_record{name}",
            lambda enabled=enabled: ops.eplb_map_to_physical_and_record(
                ids, load, *maps, enabled, None, ids.dtype, 0
            ),
            nbytes(ids, ids) + touched,
        )


if __name__ == "__main__":
    main("eplb", cases)

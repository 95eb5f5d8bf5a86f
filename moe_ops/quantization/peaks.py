"""The largest inputs of a layer's GEMMs, from which static activation scales follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
from torch import Tensor

from moe_ops.layer.plain import PlainExperts
from moe_ops.pipeline.gated_experts import gated_experts
from moe_ops.pipeline.token_rows import weighted_rows
from moe_ops.scheme import Scheme
from moe_ops.tensors import Routing

PART_BYTES = 2**30
"""Bytes of experts that are copied at once from host memory to the device of the tokens."""


class Peaks:
    """The largest magnitudes in the inputs of both GEMMs of one layer, over several calls."""

    def __init__(self) -> None:
        self._seen: list[Tensor | None] = [None, None]

    @torch.no_grad()
    def observe(
        self,
        hidden_states: Tensor,
        plain: PlainExperts,
        routing: Routing,
        gate: Callable[[Tensor], Tensor],
        *,
        weight_on_input: bool = False,
    ) -> None:
        """Run a layer's experts, and note the magnitudes. Skipped slots do not count.

        Args:
            hidden_states: ``(T, H)``, in the dtype of the weights.
            plain: the layer's weights, which may be in host memory.
            routing: the tokens' routing; the expert map may only skip slots.
            gate: see `gated_experts`.
            weight_on_input: whether router weights scale the tokens, as in `fused_experts`.
        """
        parts: Iterable[tuple[PlainExperts, Routing]] = [(plain, routing)]
        if plain.w1.device != hidden_states.device:
            parts = in_parts(plain, routing, hidden_states.device)
        for experts, slots in parts:
            self._observe(hidden_states, experts, slots, gate, weight_on_input=weight_on_input)

    def _observe(
        self,
        hidden_states: Tensor,
        plain: PlainExperts,
        routing: Routing,
        gate: Callable[[Tensor], Tensor],
        *,
        weight_on_input: bool,
    ) -> None:
        weights, ids, expert_map = routing
        if weight_on_input:
            hidden_states = weighted_rows(hidden_states, weights)
            ids, weights = ids.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1)
        held = (ids >= 0) & (ids < plain.w1.shape[0])
        self._note(0, hidden_states, held.any(1))

        def observed(rows: Tensor) -> Tensor:
            h = gate(rows)
            self._note(1, h, held.flatten())
            return h

        gated_experts(
            hidden_states,
            plain.w1,
            plain.w2,
            weights,
            ids,
            observed,
            is_gated=plain.w1.shape[1] == 2 * plain.w2.shape[2],
            expert_map=expert_map,
            w1_bias=plain.w1_bias,
            w2_bias=plain.w2_bias,
        )

    def _note(self, gemm: int, rows: Tensor, counted: Tensor) -> None:
        if rows.numel():
            magnitudes = torch.where(counted[:, None], rows.abs(), 0)
            peak, highest = magnitudes.amax().float(), self._seen[gemm]
            self._seen[gemm] = peak if highest is None else torch.maximum(peak, highest)

    def input_scales(self, name: str, scheme: Scheme) -> tuple[float, float]:
        """Return the scales that map the peaks to the largest numbers of the scheme.

        Raises:
            ValueError: the layer saw no token, only zeros, or numbers that are not finite.
        """
        peaks = [0.0 if seen is None else float(seen) for seen in self._seen]
        for gemm, peak in enumerate(peaks, 1):
            if not (math.isfinite(peak) and peak > 0):
                raise ValueError(
                    "calibrate must run the model so that the largest input of every GEMM is "
                    f"positive and finite, got {peak} for GEMM {gemm} of {name}"
                )
        # The reciprocal of a float32 number, which is what checkpoints of NVFP4 hold.
        whole = torch.tensor(scheme.quants[0].largest, dtype=torch.float32, device="cpu")
        first, second = (1 / (whole / peak) for peak in peaks)
        return float(first), float(second)


def in_parts(
    plain: PlainExperts, routing: Routing, device: torch.device, part_bytes: int = PART_BYTES
) -> Iterator[tuple[PlainExperts, Routing]]:
    """Yield some experts after the other, copied to a device, with the routing to them alone.

    Parts have at least k experts; the last one may repeat experts, which changes no maximum.
    """
    size, count = sum(x[0].nbytes for x in plain if x is not None), plain.w1.shape[0]
    weights, ids, expert_map = routing
    step = min(max(part_bytes // size, ids.shape[1]), count)
    for start in range(0, count, step):
        first = min(start, count - step)
        part, held = slice(first, first + step), (ids >= first) & (ids < first + step)
        w1, w2, b1, b2 = (None if x is None else x[part].to(device) for x in plain)
        experts = PlainExperts(cast(Tensor, w1), cast(Tensor, w2), b1, b2)
        rows = None if expert_map is None else (expert_map[part] - first).clamp(min=-1)
        yield experts, Routing(weights, torch.where(held, ids - first, -1), rows)

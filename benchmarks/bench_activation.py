"""Time the activation operator alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from stages import Case, Layer, main, nbytes
from torch import Tensor

from moe_ops import ops


def cases(layer: Layer) -> Iterator[Case]:
    x, slots, width = layer.inputs.x, layer.inputs.topk_ids.numel(), layer.problem.intermediate_size
    like = {"dtype": x.dtype, "device": x.device}
    gate_up = torch.randn((slots, 2 * width), **like)
    gate = gate_up[:, :width].contiguous()

    def case(kind: str, x: Tensor) -> Case:
        return Case(f"activation:{kind}", lambda: ops.activation(x, kind), nbytes(x, gate))

    yield case("silu", gate_up)
    yield case("swigluoai", gate_up)
    yield case("relu2_no_mul", gate)
    ids, experts = layer.inputs.topk_ids, layer.problem.num_experts
    weights = layer.inputs.topk_weights
    yield Case(
        "moe_activation_backward:silu",
        lambda: ops.moe_activation_backward(
            gate, gate_up, weights, ids, None, experts, "silu", True
        ),
        nbytes(gate, gate_up, weights, ids, gate_up, gate),
    )


if __name__ == "__main__":
    main("activation", cases)

"""Layers with adapters that the plug-in of each engine must compute: one table for all engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from merged_adapters import LAYOUTS, assert_merged
from torch import Tensor

from moe_ops.activation import MoEActivation
from moe_ops.pipeline.adapters import Adapters
from moe_ops.testing import Inputs, Problem

E, H, I = 4, 64, 64  # noqa: E741
STEPS = [1, -1, 0, 1, 2, 0, -1, 0, 0, 1]
"""Places of tokens' adapters: two are filled, 2 is empty, and -1 is none."""


class Case(NamedTuple):
    """A layer."""

    tokens: int
    activation: str
    layout: str
    """Name of the adapters' layout, in `LAYOUTS`."""
    quantized: bool
    """Whether its weights are int8."""

    @property
    def kind(self) -> MoEActivation:
        """The activation."""
        return MoEActivation.from_str(self.activation)

    def assert_served(
        self, inputs: Inputs, run: Callable[[Tensor], Tensor], held: Callable[[Tensor], Adapters]
    ) -> None:
        """Compare two steps of an engine with weights that have a token's adapter merged into them.

        Args:
            inputs: the layer's operands, weights dequantized.
            run: returns the layer's result, given each token's place.
            held: returns what the engine holds in its places, given each token's place.
        """
        count = E if inputs.expert_map is None else len(inputs.expert_map)
        sizes = (self.tokens, count, 2, H, I, torch.float32)
        described = Problem(*sizes, self.activation, has_bias=True)
        for first in (0, 1):
            ids = torch.tensor(STEPS[first : first + self.tokens])
            assert_merged(run(ids), described, inputs, held(ids), torch.float32)


ACTIVATIONS = ("silu", "swigluoai", "gelu", "relu2_no_mul")
CASES = [
    Case((1, 5, 9)[(i + j) % 3], activation, layout, quantized=bool((i + j) % 2))
    for i, activation in enumerate(ACTIVATIONS)
    for j, layout in enumerate(LAYOUTS)
]
"""The table: every activation with every layout."""

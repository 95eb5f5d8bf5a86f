"""Plain weights of experts, and a quantized layer that is filled from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_ops.layer.methods import QuantizedFusedMoEMethod
from moe_ops.layer.module import FusedMoE
from moe_ops.layer.placing import Placing
from moe_ops.layer.stage import Stage
from moe_ops.layer.state import LayerState
from moe_ops.loading.names import LAYOUTS, SHARED_GATE
from moe_ops.loading.sources import Entry, entry_of
from moe_ops.scheme import Scheme


class PlainExperts(NamedTuple):
    """Views of unquantized weights."""

    w1: Tensor
    """``(E, 2I, H)``, or ``(E, I, H)`` without a gate."""
    w2: Tensor
    """``(E, H, I)``."""
    w1_bias: Tensor | None
    w2_bias: Tensor | None

    @classmethod
    def of_layer(cls, layer: FusedMoE) -> PlainExperts:
        """Return the parameters of an unquantized layer, without the padding of H."""
        hidden, b2 = layer.model_hidden_size, layer.w2_bias
        w1, w2 = layer.w13_weight[..., :hidden], layer.w2_weight[:, :hidden]
        return cls(w1, w2, layer.w13_bias, None if b2 is None else b2[:, :hidden])

    def entries(
        self, rows: Mapping[int, int], input_scales: tuple[float, float] | None
    ) -> Iterator[Entry]:
        """Yield the tensors of a checkpoint with one tensor of gate and up rows per expert.

        Args:
            rows: the row of each expert.
            input_scales: the static (or global) scales of the inputs of both GEMMs.
        """
        first = "gate_up_proj" if self.w1.shape[1] == 2 * self.w2.shape[2] else "up_proj"
        scales = input_scales or (None, None)
        projections = (
            (first, self.w1, self.w1_bias, scales[0]),
            ("down_proj", self.w2, self.w2_bias, scales[1]),
        )
        for expert, row in rows.items():
            for name, weight, bias, scale in projections:
                tensors = {"weight": weight[row], "bias": None if bias is None else bias[row]}
                if scale is not None:
                    tensors["input_scale"] = torch.tensor(scale, dtype=torch.float32, device="cpu")
                for suffix, x in tensors.items():
                    if x is not None:
                        yield entry_of((f"experts.{expert}.{name}.{suffix}", x), "plain")


def fill_quantized(
    layer: FusedMoE,
    plain: PlainExperts,
    rows: Mapping[int, int],
    input_scales: tuple[float, float] | None,
    state: LayerState | None = None,
) -> None:
    """Give a layer with a scheme new parameters, and quantize plain weights into them.

    The result is bit for bit that of `load_checkpoint` with ``quantize=True``. Experts are
    quantized one after the other: besides input and output, memory is needed for one projection.
    A failure leaves the layer as it was.

    Args:
        layer: a layer with a scheme, whose parameters are replaced by new ones on the device of
            the weights.
        plain: the weights, in the layer's ``params_dtype``.
        rows: for each logical expert, its row in ``plain``.
        input_scales: see `PlainExperts.entries`.
        state: the state to make the new weights for; None: the layer's own.

    Raises:
        ValueError: numbers that the scheme cannot hold, with the expert.
    """
    state = layer.state if state is None else state
    stage = Stage.new(replace(state, sizes=state.aligned_sizes()), plain.w1.device)
    placing = Placing(layer, stage, LAYOUTS["auto"], quantize=True)
    for entry in plain.entries(rows, input_scales):
        placing.take(entry, entry.name)
    placing.finish()
    wrong = [*placing.mismatched, *map(str, placing.missing())]
    if wrong:
        raise ValueError(f"weights must fit scheme {state.checkpoint_scheme.name}, got {wrong[0]}")
    stage = state.quant_method.finished(stage)
    gate = layer.shared_expert_gate_weight
    frozen = None if gate is None else nn.Parameter(gate.data, requires_grad=False)
    layer._parameters.update(stage.parameters | {SHARED_GATE: frozen})
    layer.take(Stage(layer.state.holding(stage.state), layer._parameters))
    layer.renew_slots()


def quantize_layer(
    layer: FusedMoE, scheme: Scheme, input_scales: tuple[float, float] | None
) -> None:
    """Quantize an unquantized layer in place, as if ``scheme=scheme`` had been given.

    A failure leaves the layer as it was.
    """
    state, method = layer.stage().as_held().state, QuantizedFusedMoEMethod()
    method.exchange = layer.quant_method.exchange
    state = replace(
        state,
        sizes=replace(state.sizes, scheme=scheme),
        checkpoint_scheme=scheme,
        quant_method=method,
    )
    rows = {expert: held[0] for expert, held in state.placement.rows.items() if held}
    fill_quantized(layer, PlainExperts.of_layer(layer), rows, input_scales, state)

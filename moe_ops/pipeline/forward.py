"""The body of every forward pass of a layer: one function, from routing to the finished sums.

Suffixes name the axes of a tensor: ``T`` tokens, ``H`` hidden, ``R`` rows of the GEMMs (slots,
permuted or padded rows), ``N`` rows of the first weight, ``I`` intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from moe_ops import ops
from moe_ops.pipeline.formats import ExpertTokensMetadata
from moe_ops.pipeline.gathering import Gathered, by_slot
from moe_ops.pipeline.gemms import activated, gemm, gemm_then_sum, quantized, sums_at_once
from moe_ops.tensors import Routing, Rows


class Exchange(Protocol):
    """What takes tokens to their experts and brings the results back, quantized or not."""

    def send(
        self, x: Tensor, routing: Routing
    ) -> tuple[Tensor, Tensor | None, ExpertTokensMetadata | None, Routing]:
        """Send tokens; returns rows, their scales, row counts, and the routing of the rows."""

    def send_back(self, y: Tensor) -> Any:
        """Send results back, to be summed over ranks; may return what waits for them."""


class Between(Protocol):
    """What a call does between the GEMMs, and after the second, beside the activation."""

    def activate(self, product: Tensor, space: Any, step: Pass) -> Rows:
        """Turn the first GEMM's product into the second GEMM's input."""

    def after(self, y: Tensor) -> Tensor:
        """Return the second GEMM's rows, changed."""


class Pass(NamedTuple):
    """What a forward pass is given beside tokens and routing: decided before anything runs."""

    weights: Any = None
    """The `ExpertWeights`; None, as ``settings``: ``through`` has them."""
    settings: Any = None
    """The `Settings`."""
    gather: Callable[..., Gathered] = by_slot
    """How rows lie between the GEMMs: a function of `moe_ops.pipeline.gathering`."""
    between: Between | None = None
    """Adapters, or a gate that is a Python function; needs ``settings.rounds_product``."""
    exchange: Exchange | None = None
    """None: tokens stay on their rank."""
    through: Callable[..., Tensor] | None = None
    """Computes the experts in place of the lines of `forward`: a node of the graph of gradients,
    chunk by chunk, or experts of a caller's own. None: `forward` does."""


def forward(
    step: Pass,
    x_TH: Tensor,
    routing: Routing | Callable[[], Routing],
    *,
    scale: Tensor | None = None,
    meta: ExpertTokensMetadata | None = None,
    out: Tensor | None = None,
    record: list[Tensor | None] | None = None,
) -> Any:
    """Run tokens through the experts: ``(T, H)``, or what the exchange and the settings return.

    Rows are freed after the first GEMM if the caller holds no reference to them.

    Args:
        step: see `Pass`.
        x_TH: tokens, or with ``scale`` or ``meta`` rows that prepare has made of them.
        routing: the tokens' routing, or what makes it.
        scale: scales of rows that are quantized already.
        meta: row counts of the experts, in the Batched format.
        out: the tensor for the result; None: a new one.
        record: the list to which the first GEMM's product ``(R, N)`` and the plan are appended, for
            a backward pass. The kernel that applies the activation to the float32 sums stores the
            product, so that the result has the same bits with and without it.
    """
    weights, settings, gather, between, exchange, through = step
    if callable(routing):  # route
        routing = routing()
    if exchange is not None:  # send
        x_TH, scale, meta, routing = exchange.send(x_TH, routing)
    rows = Rows(x_TH, scale)
    del x_TH, scale
    if through is not None:
        held = [rows]  # the only reference, so that the rows can be freed
        del rows
        y_TH = through(held, meta, routing)
        return y_TH if exchange is None else exchange.send_back(y_TH)
    (w1, w2, a1_scale, a2_scale), scheme, dtype = weights, settings.scheme, settings.dtype
    key, summed, apart = settings.activation, settings.summed, settings.rounds_product
    quantizes, first = scheme.activation is not None, "" if apart else key
    rows, space, top_k, on_input = gather(rows, routing, weights, settings, meta)  # gather
    if quantizes and rows.scale is None:
        rows = quantized(rows.data, a1_scale, w1, space, scheme, top_k, first)
    if record is None or apart:  # GEMM, activate
        h_RI = product_RN = gemm(rows, w1, space, top_k, scheme, dtype, first, on_input)
    else:
        both = ops.activated_product
        h_RI, product_RN = gemm(rows, w1, space, top_k, scheme, dtype, first, on_input, both)
    del rows
    if record is not None:
        record += (product_RN, space.tiles.plan)
    if between is not None:
        h = between.activate(product_RN, space, step)
    elif apart:
        h = activated(product_RN, weights, space, scheme, key)
    else:
        h = quantized(h_RI, a2_scale, w2, space, scheme) if quantizes else Rows(h_RI)
    del h_RI, product_RN  # `h` is another tensor where it is quantized
    on_output = None if settings.on_input else routing.topk_weights
    if summed and not apart and sums_at_once(space, w2, scheme):  # GEMM, combine
        # After the launch of the first GEMM nothing is written but its results and `h`.
        y_TH = gemm_then_sum(h, w2, space, on_output, scheme, dtype, early=True)
        y_TH = y_TH if out is None else out.copy_(y_TH)
    else:
        y_RH = gemm(h, w2, space, 1, scheme, dtype)
        del h  # gone before the output is allocated: `workspace_nbytes` counts on it
        y_RH = y_RH if between is None else between.after(y_RH)
        y_TH = space.combine(y_RH, on_output, out) if summed else y_RH
    return y_TH if exchange is None else exchange.send_back(y_TH)  # return, sum

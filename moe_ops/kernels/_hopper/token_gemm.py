"""Launchers of Hopper's kernels of one token: its first GEMM, and its second with the sum."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.dispatch.tiles import device_facts
from moe_ops.kernels._hopper.boxes import Boxes, descriptor
from moe_ops.kernels._hopper.gemm import Operands, serves
from moe_ops.kernels._hopper.token import hopper_token_kernel, hopper_token_sum_kernel
from moe_ops.kernels._hopper.token_sizes import TokenGemm, TokenKey, token_gemm_of
from moe_ops.kernels._runtime.launch import Launch, last_kernel
from moe_ops.kernels._runtime.slots import dense, map_size
from moe_ops.scheme import get_scheme
from moe_ops.scheme.weights import rows_per_scale
from moe_ops.tensors import AnyTiles

REGISTERS = {False: 96, True: 160}
"""Of a thread of GEMM 1, and of GEMM 2: a program of either fits a processor, and two of GEMM 2 do
not, which would be put where programs of GEMM 1 have ended, two here and none there."""
ROUTED: dict[int, tuple[int, int | None]] = {}
"""By device: where the ids and the expert map lie that the last GEMM 1 of one token has read."""


class _Made:
    """A kernel, its constants and programs, and boxes of the weights that it has seen."""

    def __init__(self, launch: Launch, gemm: TokenGemm, programs: int) -> None:
        self.launch, self.gemm, self.programs = launch, gemm, programs
        self.boxes = Boxes(lambda w: _boxes(w, gemm) if serves(w.dtype, w) else None)


@lru_cache(maxsize=1024)
def _made(key: TokenKey) -> _Made | None:
    """None where these kernels do not serve."""
    facts = device_facts(key.device)
    gemm = token_gemm_of(key, facts)
    if gemm is None:
        return None
    kernel = hopper_token_sum_kernel if key.summed else hopper_token_kernel
    launch = Launch(kernel, G=gemm, num_warps=4, maxnreg=REGISTERS[key.summed])
    return _Made(launch, gemm, facts.processors)


def _boxes(w: Tensor, gemm: TokenGemm) -> TensorDescriptor:
    """Boxes of a weight; of gate and up rows, 8 of each, where there are both."""
    if not gemm.GATED:
        return descriptor(w, [1, gemm.BOX_ROWS, gemm.BLOCK_K])
    expert, row, _ = w.stride()
    shape = [w.shape[0], gemm.N // 8, 2, 8, gemm.K]
    strides = [expert, 8 * gemm.STEP * row, gemm.UP * row, gemm.STEP * row, 1]
    return descriptor(w, [1, 1, 2, 8, gemm.BLOCK_K], shape, strides)


def rows(
    out: Tensor,
    operands: Operands,
    input_weights: Tensor | None,
    tiles: AnyTiles,
    row_tiles: Sequence[int],
    activation: str,
    scheme: str,
) -> bool:
    """``out[j] = f(input_weights[j] * a @ w[e].T + bias[e])``, ``e = topk_ids[0, j]``.

    Returns:
        Whether it was launched; False: there is not one token, or the kernel does not serve.
    """
    _, topk_ids, expert_map = tiles
    one = topk_ids is not None and operands.a.shape[0] == topk_ids.shape[0] == 1
    if not one or out.shape[0] != topk_ids.shape[1] or len(row_tiles) == 1:
        return False
    return _run(out, operands, input_weights, (topk_ids, expert_map), activation, scheme, False)


def summed(
    out: Tensor,
    operands: Operands,
    topk_weights: Tensor | None,
    tiles: AnyTiles,
    row_tiles: Sequence[int],
    scheme: str,
) -> bool:
    """``out = sum_j topk_weights[j] * round(a[j] @ w[e].T + bias[e])``; returns as `rows` does."""
    _, topk_ids, expert_map = tiles
    if topk_ids.shape[0] != 1 or len(row_tiles) == 1:
        return False
    return _run(out, operands, topk_weights, (topk_ids, expert_map), None, scheme, True)


def _scale_rows(w: Tensor, w_scale: Tensor | None, scheme: str) -> int | None:
    """Weight rows that share a scale; None where scales are not float32."""
    if w_scale is None:
        return 1
    quant, weight = get_scheme(scheme).activation, get_scheme(scheme).weight
    if w_scale.dtype != torch.float32 or quant.scale_dtype != torch.float32:
        return None
    return rows_per_scale(w_scale, weight, w.shape[1])


def _lets_in(device: int, routed: tuple[int, int | None]) -> bool:
    """Whether GEMM 2 may read experts' numbers and scales before what is before it has ended.

    So it is right after GEMM 1, which has waited for the same routing: other kernels may be about
    to write one, among them those that copy what is not dense.
    """
    return last_kernel(device) is hopper_token_kernel and ROUTED.get(device) == routed


def _all_dense(*vectors: Tensor | None) -> bool:
    return all([x is None or x.is_contiguous() for x in vectors])


def _run(
    out: Tensor,
    operands: Operands,
    weights: Tensor | None,
    routing: tuple[Tensor, Tensor | None],
    activation: str | None,
    scheme: str,
    summed: bool,
) -> bool:
    a, a_scale, w, w_scale, bias, _ = operands
    (topk_ids, expert_map), scale_rows = routing, _scale_rows(w, w_scale, scheme)
    if scale_rows is None or (w_scale is None and a.dtype != w.dtype):
        return False
    how = (topk_ids.shape[1], activation, scheme, scale_rows, weights is not None)
    routed = (topk_ids.data_ptr(), None if expert_map is None else expert_map.data_ptr())
    early = summed and _lets_in(w.get_device(), routed)
    early = early and _all_dense(w_scale, topk_ids, expert_map)
    made = _made(TokenKey(w.shape, w.itemsize, *how, a.dtype == w.dtype, w.device, summed, early))
    boxes = None if made is None else made.boxes.of(w)
    if made is None or boxes is None:
        return False
    num_experts = w.shape[0]
    if not summed:
        ROUTED[w.get_device()] = routed
    made.launch(
        (made.programs,),
        a.contiguous(),
        topk_ids if a_scale is None else dense(a_scale),
        boxes,
        dense(bias),
        topk_ids if w_scale is None else dense(w_scale),
        out,
        topk_ids if weights is None else dense(weights),
        dense(topk_ids),
        dense(expert_map),
        map_size(expert_map, num_experts),
        num_experts,
    )
    return True

"""Layers of few tokens whose launchers run on fake tensors."""

from contextlib import contextmanager

import torch
from products import plain_product, scaled_product

from moe_ops.activation import formula
from moe_ops.dispatch.early import EARLY
from moe_ops.kernels import expert_product
from moe_ops.pipeline.row_spaces import SlotRows
from moe_ops.scheme import get_scheme
from moe_ops.tensors import ExpertWeight, Routing

BF16, F32 = torch.bfloat16, torch.float32


@contextmanager
def promised(early):
    """Operators inside may read early, or may not."""
    token = EARLY.set(early)
    yield
    EARLY.reset(token)


class Layer:
    """Both GEMMs of a layer of few tokens, by their launchers."""

    def __init__(self, empty, shape, scheme, dtype=BF16, **changes):
        self.empty, self.dtype, self.scheme = empty, dtype, get_scheme(scheme)
        self.experts, self.hidden, self.width, self.top_k = shape
        self.tokens = changes.get("tokens", 1)
        self.stored = changes.get("stored", False)
        self.invariant = changes.get("batch_invariant", False)
        ids = empty(self.tokens, self.top_k, dtype=changes.get("ids", torch.int32))
        expert_map = empty(2 * self.experts, dtype=torch.int32) if changes.get("mapped") else None
        self.weights = empty(self.tokens, self.top_k, dtype=F32)
        layer = (self.experts, self.scheme, dtype, self.invariant)
        self.tiles = [*SlotRows.of(Routing(self.weights, ids, expert_map), *layer).tiles]

    def operands(self, rows, n, k, has_bias):
        """Rows, a weight, their scales, and a bias."""
        quant, weight = self.scheme.activation, self.scheme.weight
        bias = self.empty(self.experts, n, dtype=self.dtype) if has_bias else None
        a, a_scale = self.empty(rows, k, dtype=self.dtype), None
        if weight is None:
            return a, None, self.empty(self.experts, n, k, dtype=self.dtype), None, bias
        if self.stored:
            a = self.empty(rows, k, dtype=quant.dtype)
            a_scale = self.empty(*quant.row_scale_shape(rows, k), dtype=F32)
        w_scale = self.empty(*weight.weight_scale_shape(self.experts, n, k), dtype=F32)
        return a, a_scale, self.empty(self.experts, n, k, dtype=weight.dtype), w_scale, bias

    def rows(self, activation="silu", has_bias=False):
        """GEMM 1."""
        n = self.width * (2 if formula(activation).gated else 1)
        a, a_scale, w, w_scale, bias = self.operands(self.tokens, n, self.hidden, has_bias)
        if w_scale is None:
            rest = (self.top_k, activation, True, self.invariant)
            plain_product(expert_product, a, w, bias, None, self.tiles, *rest)
        else:
            rest = (self.top_k, self.scheme.name, self.dtype, activation, self.invariant)
            scaled_product(expert_product, a, a_scale, w, w_scale, None, bias, self.tiles, *rest)

    def sum(self, has_bias=False, weighted=True, early=False):
        """GEMM 2, with the sum."""
        with promised(early):
            expert_product.expert_product_sum(*self.sum_arguments(has_bias, weighted))

    def sum_arguments(self, has_bias=False, weighted=True):
        """Of its launcher."""
        slots = self.tokens * self.top_k
        a, a_scale, w, w_scale, bias = self.operands(slots, self.hidden, self.width, has_bias)
        weights = self.weights if weighted else None
        flags = (self.scheme.weight is None, self.invariant)
        how = (weights, self.tiles, self.scheme.name, self.dtype, *flags)
        return a, a_scale, ExpertWeight(w, bias, w_scale), *how

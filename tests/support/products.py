"""Calls of the expert GEMMs with a weight's tensors one by one, in the order of a `QTensor`.

``leg`` is `moe_ops.ops`, or the module of the launchers or of the references.
"""

from moe_ops.tensors import ExpertWeight


def weight_of(q, bias=None):
    """A quantized weight with its bias, as operators take it."""
    data, *rest = q
    return ExpertWeight(data, bias, *rest)


def plain_product(leg, a, w, bias, weights, tiles, top_k, *how, **more):
    """The product of operands that are not quantized; ``how``: activation and flags."""
    given = (a, None, ExpertWeight(w, bias), weights, tiles, top_k, "unquantized", a.dtype)
    return leg.expert_product(*given, *how, **more)


def scaled_product(leg, *given, **more):
    """The product of two quantized operands."""
    a, a_scale, w, w_scale, factor, bias, tiles, top_k, scheme, dtype, *how = given
    activation, invariant = (*how, *("", False)[len(how) :])
    weight = ExpertWeight(w, bias, w_scale, None, factor)
    settings = (tiles, top_k, scheme, dtype, activation, False, invariant)
    return leg.expert_product(a, a_scale, weight, None, *settings, **more)


def stored_product(leg, *given, **more):
    """The product with a weight that alone is quantized."""
    a, w, scale, zeros, factor, bias, weights, tiles, top_k, scheme, *how = given
    activation, invariant = (*how, *("", False)[len(how) :])
    weight = ExpertWeight(w, bias, scale, zeros, factor)
    settings = (tiles, top_k, scheme, a.dtype, activation, False, invariant)
    return leg.expert_product(a, None, weight, weights, *settings, **more)


def stored_sum(leg, a, w, scale, zeros, factor, bias, *rest):
    """The sum over the slots of each token of a `stored_product`."""
    weights, tiles, scheme, *invariant = rest
    how = (weights, tiles, scheme, a.dtype, False, *invariant)
    return leg.expert_product_sum(a, None, ExpertWeight(w, bias, scale, zeros, factor), *how)

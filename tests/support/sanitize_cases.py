"""Small problems that reach every kernel in every way it is launched, and what they must give.

`sanitize.py` runs them under NVIDIA's compute-sanitizer. Inputs are made, and results judged, on
the CPU: the GPU runs next to nothing but the kernels of the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from gemm_rows import activated, exact_rows, exact_scaled_rows, numbers
from modular import EXPERTS, PREPARES, build_experts, build_prepare, fit, roundings, supported
from operator_cases import BF16, F16, F32, Case, assert_near, some
from plans import row_tile
from products import scaled_product, stored_product, stored_sum
from sanitize_operators import of_operators
from torch import Tensor

import moe_ops
from moe_ops import ops
from moe_ops.reference import align, expert_product, quantize
from moe_ops.reference.slots import local_experts
from moe_ops.scheme import (
    QTensor,
    dequantize_rows,
    dequantize_weight,
    get_scheme,
    pack_weight,
    quantize_weight,
)
from moe_ops.scheme.packed import widens_rows
from moe_ops.testing import (
    Problem,
    assert_layer_matches,
    assert_matches_reference,
    bounded_oracle,
    call,
    make_inputs,
    quantize_inputs,
    reference_experts,
)

# Layers, against the oracle

DIRECT = {"num_tokens": 2, "num_experts": 32, "hidden_size": 256, "intermediate_size": 128}
"""Few slots of many experts: no plan."""
TOKEN = {"num_tokens": 1, "num_experts": 32, "top_k": 4, "hidden_size": 272,
         "intermediate_size": 144}  # fmt: skip
"""One token: kernels of its own on Hopper."""
ELSEWHERE = {**TOKEN, "num_local_experts": 24, "top_k": 3}
"""Some of its experts are on other ranks."""
TAILS = {"num_tokens": 9, "num_experts": 4, "hidden_size": 352, "intermediate_size": 176}
"""Few rows an expert; neither tiles nor groups divide the sizes."""
STREAM = {"num_tokens": 25, "num_experts": 4, "hidden_size": 256, "intermediate_size": 128}
"""Few rows an expert, past which Hopper streams 8-bit weights."""
MANY = {"num_tokens": 140, "num_experts": 2, "top_k": 1, "hidden_size": 272,
        "intermediate_size": 144}  # fmt: skip
"""Enough rows an expert for Hopper to gather those of 8-bit numbers."""
PACKED = {**MANY, "num_tokens": 700, "hidden_size": 256, "intermediate_size": 128}
"""Enough for 16-bit numbers, too; in tiles of 128, whose rows Hopper fetches."""
WIDE = {**PACKED, "intermediate_size": 1600}
"""A first product that is too wide for that."""
SCHEMES = (
    "unquantized", "fp8_tensor_static", "fp8_tensor", "fp8_channel", "fp8_block128", "int8_channel",
    "int8_block128", "fp8_w8a16", "int8_w8a16", "int4_w4a16_g128", "int4_w4a16_g128_zp",
    "mxfp4_w4a16", "nvfp4_w4a16", "mxfp8", "mxfp4", "nvfp4", "int4_w4a8_g128",
)  # fmt: skip
EIGHT_BITS = (
    "fp8_tensor_static", "fp8_tensor", "fp8_channel", "fp8_block128", "int8_channel",
    "int8_block128",
)  # fmt: skip
TOKEN_SCHEMES = ("unquantized", "fp8_channel", "fp8_block128", "int8_channel", "int8_block128")
PLAIN: dict[str, dict[str, Any]] = {
    **{f"direct/{s}": {**DIRECT, "scheme": s} for s in SCHEMES},
    **{f"tails/{s}": {**TAILS, "scheme": s} for s in SCHEMES},
    **{f"many/{s}": {**MANY, "scheme": s} for s in SCHEMES},
    **{f"stream/{s}": {**STREAM, "scheme": s} for s in EIGHT_BITS},
    **{f"packed/{s}": {**PACKED, "scheme": s} for s in ("unquantized", *EIGHT_BITS)},
    **{f"direct/token/{s}": {**TOKEN, "scheme": s} for s in TOKEN_SCHEMES},
    **{f"direct/token/{s}/elsewhere": {**ELSEWHERE, "scheme": s} for s in TOKEN_SCHEMES},
    "direct/token/float16": {**TOKEN, "dtype": F16},
    "direct/one-slot": {**DIRECT, "num_tokens": 1, "top_k": 1},
    **{f"direct/{str(t)[6:]}": {**DIRECT, "dtype": t} for t in (F16, F32)},
    **{f"tails/{str(t)[6:]}": {**TAILS, "dtype": t} for t in (F16, F32)},
    **{f"many/{str(t)[6:]}": {**MANY, "dtype": t} for t in (F16, F32)},
    "packed/float16": {**PACKED, "dtype": F16},
    **{f"packed/wide/{s}": {**WIDE, "scheme": s} for s in ("unquantized", "fp8_channel")},
    "packed/skewed-tails": {**MANY, "num_tokens": 750, "num_experts": 3, "routing": "skewed"},
    "blocks-of-slots": {**TAILS, "num_tokens": 600},
}
SPECIAL = {
    "bias-swigluoai": {"has_bias": True, "activation": "swigluoai"},
    "gelu_no_mul": {"activation": "gelu_no_mul"},
    "on-input": {"on_input": True},
    "holes": {"routing": "holes"},
}
"""What is special in the beginning or the end of a kernel."""
EACH_KERNEL = (
    "direct/unquantized", "direct/fp8_channel", "tails/unquantized", "tails/int8_channel",
    "tails/int4_w4a16_g128", "tails/mxfp4", "stream/fp8_channel", "many/fp8_channel",
    "packed/unquantized", "direct/token/unquantized", "direct/token/fp8_channel",
)  # fmt: skip
"""Every form of the expert GEMMs."""


def layers() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and problems: plain ones, and for each kernel what is special, and an expert map."""
    yield from PLAIN.items()
    for base in EACH_KERNEL:
        for name, change in SPECIAL.items():
            yield f"{base}/{name}", {**PLAIN[base], **change}
        mapped = {**PLAIN[base], "num_local_experts": PLAIN[base]["num_experts"] - 1}
        if base.startswith("direct/"):  # so few slots that the others' number is enough
            mapped |= {"num_tokens": 1, "top_k": 3}
        yield f"{base}/expert-map", mapped


def layer_case(name: str, settings: dict[str, Any], **more: Any) -> Case:
    """`moe_ops.fused_experts` on a problem."""
    problem = Problem(**{"dtype": BF16, **settings})

    def run(quantized: Any) -> Tensor:
        how = {"quant_config": quantized.config, **more}
        return call(moe_ops.fused_experts, problem, quantized.inputs, **how)

    def check(quantized: Any, actual: Tensor) -> None:
        exact = bounded_oracle(problem, quantized.exact, quantized.config)
        if problem.dtype == F32:  # the CPU's order of sums is no measure of another one's error
            assert_near(actual, exact.value.float())
            return
        expected = reference_experts(problem, quantized.inputs, quantized.config)
        assert_layer_matches(actual, exact, expected)

    return Case(name, lambda: quantize_inputs(problem, make_inputs(problem)), run, check)


def layer_cases() -> Iterator[Case]:
    """Standard layers, and some in batch-invariant mode."""
    for name, settings in layers():
        yield layer_case(f"layer/{name}", settings)
    for scheme in ("unquantized", "fp8_channel", "int4_w4a16_g128"):
        name = f"layer/batch-invariant/{scheme}"
        yield layer_case(name, {**TAILS, "scheme": scheme}, batch_invariant=True)


def routed_case(tokens: int, experts: int) -> Case:
    """`moe_ops.fused_moe`: routing, and with few tokens alignment in the same launch."""
    problem = Problem(tokens, experts, 2, 64, 48, BF16)

    def inputs() -> Any:
        return make_inputs(problem), some(tokens, experts)

    def run(given: Any) -> Any:
        (x, w1, w2, *_), logits = given
        return moe_ops.fused_moe(x, w1, w2, logits, 2), moe_ops.fused_topk(x, logits, 2, True)

    def check(given: Any, result: Any) -> None:
        actual, (weights, ids) = result
        routed = given[0]._replace(topk_weights=weights, topk_ids=ids)
        expected = reference_experts(problem, routed)
        assert_layer_matches(actual, bounded_oracle(problem, routed), expected)

    return Case(f"layer/routed/{tokens}x{experts}", inputs, run, check)


# Other formats of rows: permuted, batched


def format_case(experts: type, scheme: str) -> Case:
    """A modular kernel of a class of experts."""
    problem = Problem(11, 6, 2, 160, 136, BF16, routing="holes", scheme=scheme)

    def run(quantized: Any) -> Tensor:
        (x, w1, w2, weights, ids, *_), config, _ = quantized
        part = build_prepare(next(p for p in PREPARES if fit(experts, p)), problem)
        kernel = moe_ops.FusedMoEKernel(part, build_experts(experts, problem, config, x.device))
        return kernel.apply(x, w1, w2, weights, ids, problem.activation, problem.num_experts)

    def check(quantized: Any, actual: Tensor) -> None:
        where = roundings(experts, problem)
        config = quantized.config
        expected = reference_experts(problem, quantized.inputs, config, where)
        exact = bounded_oracle(problem, quantized.exact, config, where)
        assert_layer_matches(actual, exact, expected)

    name = f"format/{experts.__name__}/{scheme}"
    return Case(name, lambda: quantize_inputs(problem, make_inputs(problem)), run, check)


# GEMMs whose rows are quantized as they are packed


PACKED_AT_ONCE = ("fp8_channel", "fp8_block128", "fp8_tensor_static")


def packing_case(scheme: str, tile: int) -> Case:
    """A gated GEMM of many rows that are not quantized yet."""
    problem = Problem(
        **{**PACKED, "num_tokens": 400, "hidden_size": 1040}, dtype=BF16, scheme=scheme
    )
    quant = get_scheme(scheme).activation

    def inputs() -> Any:
        x, w, _, _, ids, *_ = make_inputs(problem)
        given = torch.tensor([0.02]) if quant.static else None
        with row_tile(tile, portable_only=False):
            plan = align.plan_slots(ids, None, problem.num_experts, scheme, BF16)
        return x, given, *quantize_weight(w, scheme)[:2], None, None, [plan, ids, None]

    tail = (problem.top_k, scheme, BF16, "silu")

    def check(operands: Any, actual: Tensor) -> None:
        x, given, w, w_scale, _, _, (_, ids, _) = operands
        rows = quantize.moe_quantize(x, given, None, None, None, 1, quant.key)
        expert = local_experts(ids, None, problem.num_experts)
        product = numbers(*rows, scheme, problem.top_k)
        exact = exact_scaled_rows(product, w, w_scale, None, expert, scheme)
        exact = activated(exact, "silu").rounded(BF16)
        with row_tile(tile):
            expected = scaled_product(expert_product, *rows, *operands[2:], *tail)
        assert_matches_reference(actual, exact, expected)

    def run(operands: Any) -> Tensor:
        with row_tile(tile, portable_only=False):
            return scaled_product(ops, *operands, *tail)

    return Case(f"gemm/quantized-as-packed/{scheme}/{tile}", inputs, run, check)


# GEMMs with packed weights, which Hopper's kernels decode


def packed_case(scheme: str, tile: int | None) -> Case:
    """A gated GEMM with a packed weight; without a row tile, of few slots and many experts."""
    tokens, experts = (1, 32) if tile is None else (64, 5)
    problem = Problem(tokens, experts, 2, 192, 128, BF16, routing="holes", has_bias=True)
    tail = (problem.top_k, scheme, "silu")

    def inputs() -> Any:
        x, w, _, weights, ids, _, bias, _ = make_inputs(problem)
        with row_tile(tile, portable_only=False):
            plan = align.plan_slots(ids, None, problem.num_experts, scheme, BF16)
        q = pack_weight(quantize_weight(w, scheme), scheme)
        return x, *q, bias, weights, [plan, ids, None]

    def check(operands: Any, actual: Tensor) -> None:
        x, *stored, bias, weights, (_, ids, _) = operands
        w = dequantize_weight(QTensor(*stored), scheme)
        exact = exact_rows(x, w, bias, weights, ids, problem.top_k, None, BF16)
        with row_tile(tile):
            expected = stored_product(expert_product, *operands, *tail)
        exact = activated(exact, "silu").rounded(BF16)
        mine = local_experts(ids, None, problem.num_experts) >= 0
        assert_matches_reference(actual[mine], exact[mine], expected[mine])

    def run(operands: Any) -> Tensor:
        with row_tile(tile, portable_only=False):
            return stored_product(ops, *operands, *tail)

    return Case(f"gemm/packed-weight/{scheme}/{tile}", inputs, run, check)


def packed_under_rows_case(scheme: str, tile: int) -> Case:
    """A gated GEMM with a packed weight, and rows that the operator quantizes or dequantizes."""
    problem = Problem(64, 5, 2, 192, 128, BF16, routing="holes", has_bias=True)
    tail, quant = (problem.top_k, scheme, BF16, "silu"), get_scheme(scheme).activation

    def inputs() -> Any:
        x, w, _, _, ids, _, bias, _ = make_inputs(problem)
        with row_tile(tile, portable_only=False):
            plan = align.plan_slots(ids, None, problem.num_experts, scheme, BF16)
        q, rows = pack_weight(quantize_weight(w, scheme), scheme), (x, None)
        if not widens_rows(get_scheme(scheme)):
            rows = quantize.moe_quantize(x, None, None, None, None, 1, quant.key)
        return *rows, q.data, q.scale, q.global_scale, bias, [plan, ids, None]

    def check(operands: Any, actual: Tensor) -> None:
        *rows, data, scale, factor, bias, (_, ids, _) = operands
        w = dequantize_weight(QTensor(data, scale, None, factor), scheme).double()
        if rows[1] is None:
            rows = quantize.moe_quantize(rows[0], None, None, None, None, 1, quant.key)
        stood_for = dequantize_rows(*rows, quant).double()
        exact = exact_rows(stood_for, w, bias, None, ids, problem.top_k)
        with row_tile(tile):
            expected = scaled_product(expert_product, *operands, *tail)
        exact = activated(exact, "silu").rounded(BF16)
        mine = local_experts(ids, None, problem.num_experts) >= 0
        assert_matches_reference(actual[mine], exact[mine], expected[mine])

    def run(operands: Any) -> Tensor:
        with row_tile(tile, portable_only=False):
            return scaled_product(ops, *operands, *tail)

    return Case(f"gemm/packed-weight/{scheme}/{tile}", inputs, run, check)


def packed_sum_case(scheme: str, top_k: int) -> Case:
    """The second GEMM of one token with a packed weight, and the weighted sum."""
    problem = Problem(top_k, 5, 1, 320, 128, BF16, "silu_no_mul", has_bias=True)

    def inputs() -> Any:
        x, w, _, weights, ids, _, bias, _ = make_inputs(problem)
        weights, ids = weights.view(1, top_k), ids.view(1, top_k)
        plan = align.plan_slots(ids, None, problem.num_experts, scheme, BF16)
        q = pack_weight(quantize_weight(w, scheme), scheme)
        return x, *q, bias, weights, [plan, ids, None], scheme

    def check(operands: Any, actual: Tensor) -> None:
        x, *stored, bias, weights, (_, ids, _), _ = operands
        w = dequantize_weight(QTensor(*stored), scheme)
        exact = exact_rows(x, w, bias, None, ids, 1, None, BF16).rounded(BF16)
        exact = exact.unflatten(1, top_k).weighted_sum(weights.double()).rounded(BF16)
        expected = stored_sum(expert_product, *operands)
        assert_matches_reference(actual, exact, expected)

    def run(operands: Any) -> Tensor:
        return stored_sum(ops, *operands)

    return Case(f"gemm/packed-weight-sum/{scheme}/{top_k}", inputs, run, check)


def cases() -> list[Case]:
    """All of them."""
    formats = ("unquantized", "fp8_channel", "fp8_block128", "int8_tensor", "int4_w4a16_g128")
    modular = [e for e in EXPERTS if not e.is_monolithic()]
    return [
        *of_operators(),
        *layer_cases(),
        *(routed_case(*sizes) for sizes in ((1, 16), (5, 8), (40, 8))),
        *(format_case(e, s) for e in modular for s in formats if supported(e, s, "silu")),
        *(packing_case(scheme, tile) for scheme in PACKED_AT_ONCE for tile in (64, 128)),
        *(
            packed_case(s, tile)
            for s in ("mxfp4_w4a16", "int8_w8a16_g128")
            for tile in (None, 16, 128)
        ),
        *(packed_under_rows_case(s, t) for s in ("int4_w4a8_g128", "mxfp8") for t in (16, 128)),
        *(packed_sum_case(s, k) for s in ("mxfp4_w4a16", "int8_w8a16_g128") for k in (1, 10)),
    ]

"""Quantization schemes: named values, and the storage formats of weights in them."""

from moe_ops.scheme.capability import schemes_instead, what_lacks
from moe_ops.scheme.exact_fp8 import ExactRows, as_fp8, exact_fp8_scheme, exact_rows, from_fp8
from moe_ops.scheme.limits import refusal
from moe_ops.scheme.named import (
    SCHEMES,
    UNQUANTIZED,
    Scheme,
    as_scheme,
    get_scheme,
    scheme_of,
)
from moe_ops.scheme.packed import is_packed, pack_weight, packs, unpack_weight
from moe_ops.scheme.quant_config import TENSORS, FusedMoEQuantConfig
from moe_ops.scheme.values import (
    FLOAT4_E2M1_MAX,
    FLOAT8_E4M3_MAX,
    WHOLE,
    Element,
    Group,
    Quant,
    min_capability,
    parse_quant,
)
from moe_ops.scheme.weights import QTensor, dequantize_rows, dequantize_weight, quantize_weight

__all__ = [
    "FLOAT4_E2M1_MAX",
    "FLOAT8_E4M3_MAX",
    "SCHEMES",
    "TENSORS",
    "UNQUANTIZED",
    "WHOLE",
    "Element",
    "ExactRows",
    "FusedMoEQuantConfig",
    "Group",
    "QTensor",
    "Quant",
    "Scheme",
    "as_fp8",
    "as_scheme",
    "dequantize_rows",
    "dequantize_weight",
    "exact_fp8_scheme",
    "exact_rows",
    "from_fp8",
    "get_scheme",
    "is_packed",
    "min_capability",
    "pack_weight",
    "packs",
    "parse_quant",
    "quantize_weight",
    "refusal",
    "scheme_of",
    "schemes_instead",
    "unpack_weight",
    "what_lacks",
]

"""Schemes and weights that have a packed form."""

import torch
from own_schemes import OWN

from moe_ops import SCHEMES, QTensor, get_scheme, packs
from moe_ops.scheme.packed import widens_rows

ALL_PACKABLE = [name for name in SCHEMES if packs(name, 64, 64)]
PACKABLE = [name for name in ALL_PACKABLE if get_scheme(name).activation is None]
UNDER_FP8 = [name for name in ALL_PACKABLE if widens_rows(get_scheme(name))]
"""Schemes whose rows are fp8 with one scale each, and become bf16 as they are quantized."""
UNDER_GROUPS = [
    name for name in ALL_PACKABLE if name not in PACKABLE and get_scheme(name).activation.local
]
"""Schemes whose rows have scales along K, and are dequantized to bf16."""
UNDER_ONE = [name for name in ALL_PACKABLE if name not in (*PACKABLE, *UNDER_FP8, *UNDER_GROUPS)]
"""Schemes whose rows have one scale together."""
WIDENED_ROWS = [*UNDER_FP8, "int4_w4a8_g32", "fp8:1x*:pow2|fp4:1x16:e4m3:global_scale"]
"""Schemes whose rows the operator quantizes, if they are not stored."""
ROWS_SERVED = [
    *WIDENED_ROWS, *UNDER_GROUPS, *UNDER_ONE, "int8:1x*:float32|fp4:1x32:e8m0",
    "int8:*x*:float32|fp4:1x16:e4m3:global_scale",
]  # fmt: skip
"""All kinds of quantized rows under packed weights."""
MORE = [
    "int4_w4a16_g16", "int4_w4a16_g32_zp", "int4_w4a16_g64_zp", "int8_w8a16_g32_zp",
    "|int4:1x32:e8m0", "|fp8:1x64:float32",
]  # fmt: skip
OWN_ROWS = OWN["zero points of rows"].key
SERVED = [*PACKABLE, *(name for name in MORE if "float32" not in name)]
"""Schemes whose packed weights Hopper's kernels decode for rows in bf16."""
HALF = [name for name in SERVED if name.startswith("int") or name == "fp8_w8a16"]
"""The same for rows in fp16."""


def random_weight(scheme, n, k, experts=2, seed=0, device="cpu"):
    """A stored weight in the plain form whose bytes are random, scales and zero points too."""
    scheme = get_scheme(scheme)
    quant, generator = scheme.weight, torch.Generator().manual_seed(seed)

    def bytes_of(shape, dtype):
        shape = (*shape[:-1], shape[-1] * dtype.itemsize)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)

    dtype = torch.bfloat16 if quant.scale == "input" else quant.scale_dtype
    return QTensor(
        *(
            None if shape is None else bytes_of(shape, stored).to(device)
            for shape, stored in (
                ((experts, n, quant.data_width(k)), quant.dtype),
                (quant.weight_scale_shape(experts, n, k), dtype),
                (quant.zero_point_shape(experts, n, k) if quant.zero_point else None, torch.uint8),
                (_global_shape(quant, experts, n), torch.float32),
            )
        )
    )


def _global_shape(quant, experts, n):
    if not quant.global_scale:
        return None
    return (experts, n) if quant.channel_scale else (experts,)


def assert_same_bits(actual, expected):
    """The fields of two `QTensor` are the same bits, with the same dtypes, shapes and strides."""
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))

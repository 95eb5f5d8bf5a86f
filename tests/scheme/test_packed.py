"""pack_weight and unpack_weight: every bit comes back, and lies where the kernels read it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_weights import (
    MORE,
    OWN_ROWS,
    PACKABLE,
    UNDER_FP8,
    UNDER_GROUPS,
    UNDER_ONE,
    assert_same_bits,
    random_weight,
)
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ops import (
    SCHEMES,
    dequantize_weight,
    get_scheme,
    pack_weight,
    packs,
    quantize_weight,
    unpack_weight,
)
from moe_ops.scheme.packed import pack_weight_, widens_rows

ALL = [*PACKABLE, *UNDER_FP8, *UNDER_GROUPS, *UNDER_ONE, *MORE, OWN_ROWS]


def test_packable_schemes():
    weight_only = {n for n, s in SCHEMES.items() if s.weight is not None and s.activation is None}
    assert weight_only - {*PACKABLE} == {"fp8_w8a16_block128"}
    assert {*PACKABLE} < weight_only
    assert UNDER_FP8 == ["mxfp4_w4a8_token", "int4_w4a8_g128"]
    assert UNDER_GROUPS == ["mxfp8", "mxfp4", "mxfp4_mxfp8", "nvfp4"]
    assert UNDER_ONE == ["mxfp4_w4a8"]
    assert not widens_rows(get_scheme("fp8_channel"))
    for key in (
        "int4_w4a8_g32", "fp8:1x*:pow2|fp6_e2m3:1x32:e8m0", "int8:1x*:float32|fp4:1x32:e8m0",
    ):  # fmt: skip
        assert packs(key, 64, 64)
    for other in ("fp8_channel", "int8_channel", "fp4:1x*:float32|fp4:1x32:e8m0"):
        assert not packs(other, 64, 64)
    assert packs("mxfp4_w4a16", 64, 128) and packs(get_scheme("int8_w8a16"), 2880, 2880)
    assert not packs("mxfp4_w4a16", 32, 128) and not packs("mxfp4_w4a16", 64, 96)
    assert not packs("fp8_block128", 64, 64) and not packs("unquantized", 64, 64)


@given(
    scheme=st.sampled_from(ALL),
    n=st.sampled_from((64, 128, 704, 1408)),
    k=st.sampled_from((64, 192, 640, 2880)),
    experts=st.integers(1, 3),
)
def test_round_trip(scheme, n, k, experts, device):
    q = random_weight(scheme, n, k, experts, device=device)
    packed = pack_weight(q, scheme)
    quant = get_scheme(scheme).weight
    assert packed.data.dtype == torch.int32 and packed.data.is_contiguous()
    assert packed.data.shape == (experts, n, k * quant.element.stored_bits // 32)
    assert packed.global_scale is q.global_scale
    for name in ("scale", "zero_point"):
        plain, own = getattr(q, name), getattr(packed, name)
        if plain is not None and plain.dim() == 3:
            assert own.is_contiguous()
            assert_same_bits([own.transpose(1, 2).contiguous()], [plain])
        else:
            assert own is plain
    assert_same_bits(unpack_weight(packed, scheme), q)


def number(q, quant, expert, row, column):
    """The stored bits of one number of the plain form."""
    if quant.element.values_per_byte == 2:
        return q.data[expert, row, column // 2].item() >> (4 * (column % 2)) & 15
    return q.data[expert].view(torch.uint8)[row, column].item()


PLACES = ([6, 7, 8, 15], [0, 1, 2, 9], [10, 11, 12, 19], [4, 5, 14, 13])
"""Places in a word of the bits of a 4-bit float, for each register, in the first of two halves."""


def packed_number(words, bits, k, row, column, *, float4=False):
    """The same bits, found in one expert's words as a kernel's thread finds them."""
    r, c = row % 64, column % 64
    warp, lane, tile, half = r // 16, r % 16 // 2 * 4 + c % 8 // 2, c // 16, c % 2
    register = r % 2 + 2 * (c % 16 // 8)
    chunk = (row // 64 * (k // 64) + column // 64) * 64 * 64 * bits // 32
    if bits == 4:
        word, bit = (warp * 32 + lane) * 4 + tile, 4 * register + 16 * half
        if float4:
            found = words[chunk + word]
            places = enumerate(PLACES[register])
            return sum((found >> (place + 16 * half) % 32 & 1) << i for i, place in places)
    else:
        word = tile // 2 * 512 + (warp * 32 + lane) * 4 + tile % 2 * 2 + register // 2
        bit = 8 * (register % 2) + 16 * half
    return words[chunk + word] >> bit & (2**bits - 1)


@pytest.mark.parametrize("scheme", ["int4_w4a16_g128", "fp8_w8a16", "mxfp6_e3m2", "nvfp4_w4a16"])
def test_places_of_numbers(scheme):
    """Every number of one chunk, and some of the others."""
    n, k, quant = 192, 128, get_scheme(scheme).weight
    q = random_weight(scheme, n, k)
    words = pack_weight(q, scheme).data.flatten(1).tolist()
    places = [(1, 64 + r, 64 + c) for r in range(64) for c in range(64)]
    places += [(e, r, c) for e in (0, 1) for r in range(0, n, 13) for c in range(0, k, 7)]
    for expert, row, column in places:
        bits, float4 = quant.element.stored_bits, quant.element.name == "fp4"
        found = packed_number(words[expert], bits, k, row, column, float4=float4)
        assert found == number(q, quant, expert, row, column)


def test_places_by_hand():
    """Row 1, number 1 of the first tile is in the first lane's first word, bits 4 + 16."""
    data = torch.zeros(1, 64, 32, dtype=torch.uint8)
    data[0, 1, 0] = 0xD0
    data[0, 18, 36 // 2] = 0x0E
    q = random_weight("int4_w4a16_channel", 64, 64, experts=1)._replace(data=data)
    words = pack_weight(q, "int4_w4a16_channel").data.flatten()
    # Row 18 is the second pair of warp 1, number 36 the third pair of tile 2.
    expected = {0: 0xD << 20, (32 + 4 + 2) * 4 + 2: 0xE}
    assert {i: word for i, word in enumerate(words.tolist()) if word} == expected


@pytest.mark.parametrize("scheme", ALL)
def test_dequantized_alike(scheme, device):
    q = quantize_weight(torch.randn(2, 128, 192, device=device), scheme)
    packed = pack_weight(q, scheme)
    for dtype in (torch.float32, torch.bfloat16):
        expected = dequantize_weight(q, scheme, dtype)
        assert torch.equal(dequantize_weight(packed, scheme, dtype), expected)


@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 128), (2, 1, 1), (2, 2, 1)])
def test_scales_of_whole_rows(shape):
    """Scales that tensors or halves share keep their shapes, except for a trailing axis."""
    q = random_weight("fp8_w8a16", 128, 64)._replace(scale=torch.rand(shape))
    packed = pack_weight(q, "fp8_w8a16")
    assert packed.scale.shape == (shape if len(shape) < 3 else (2, 1, shape[1]))
    assert_same_bits(unpack_weight(packed, "fp8_w8a16"), q)


@pytest.mark.parametrize("scheme", ["int4_w4a16_g128_zp", "nvfp4_w4a16", "int8_w8a16"])
def test_meta(scheme):
    q = random_weight(scheme, 128, 192, device="meta")
    packed, real = pack_weight(q, scheme), pack_weight(random_weight(scheme, 128, 192), scheme)
    for a, b, c in zip(packed, real, unpack_weight(packed, scheme), strict=True):
        assert a is None or (a.is_meta and a.shape == b.shape and a.dtype == b.dtype and c.is_meta)


def test_strided_data():
    q = random_weight("mxfp4_w4a16", 64, 128)
    strided = q._replace(data=q.data.transpose(1, 2).contiguous().transpose(1, 2))
    want = pack_weight(q, "mxfp4_w4a16")
    for pack in (pack_weight, pack_weight_):
        assert_same_bits(pack(strided, "mxfp4_w4a16"), want)


class Allocations(TorchDispatchMode):
    """Counts tensors that operators return in memory of their own."""

    def __init__(self):
        super().__init__()
        self.kept = []  # so that no two have one address

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        addresses = {x.untyped_storage().data_ptr() for x in tensors}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in addresses:
            self.kept.append(out)
        return out


def there_and_back(q, scheme):
    return unpack_weight(pack_weight(q, scheme), scheme)


@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "int4_w4a16_g128_zp", "int8_w8a16"])
@pytest.mark.parametrize("convert", [pack_weight_, there_and_back])
def test_no_memory_for_each_expert(scheme, convert):
    """Experts share memory: an engine's allocator may not find a block of the one before again."""
    counts = []
    for experts in (1, 5):
        q = random_weight(scheme, 128, 256, experts)
        with Allocations() as allocations:
            convert(q, scheme)
        counts.append(len(allocations.kept))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("scheme", "n", "k", "error", "message"),
    [
        ("fp4:1x*:float32|fp4:1x32:e8m0", 64, 64, NotImplementedError, "8 bits or scales along K"),
        ("fp8_channel", 64, 64, NotImplementedError, "must dequantize weights.*got fp8_channel"),
        ("fp8_w8a16_block128", 128, 128, NotImplementedError, "must have one row .*rows=128"),
        ("mxfp4_w4a16", 96, 64, ValueError, "multiples of 64 if q.data .*N = 96 and K = 64"),
        ("int8_w8a16", 64, 48, ValueError, "multiples of 64 if q.data .*N = 64 and K = 48"),
    ],
)
def test_weights_without_a_packed_form(scheme, n, k, error, message):
    assert not packs(scheme, n, k)
    with pytest.raises(error, match=message):
        pack_weight(random_weight(scheme, n, k), scheme)


def test_errors():
    name = "int4_w4a16_g32_zp"
    q = random_weight(name, 64, 128)
    packed = pack_weight(q, name)
    for convert, good in ((pack_weight, q), (unpack_weight, packed)):
        with pytest.raises(TypeError, match="q must be a QTensor, got Tensor"):
            convert(good.data, name)
        with pytest.raises(NotImplementedError, match="must quantize weights, got unquantized"):
            convert(good, "unquantized")
        with pytest.raises(ValueError, match="q.data must have 3 axes"):
            convert(good._replace(data=good.data[0]), name)
        with pytest.raises(TypeError, match="q.scale must be a Tensor, got NoneType"):
            convert(good._replace(scale=None), name)
        with pytest.raises(ValueError, match="q.zero_point must have shape"):
            convert(good._replace(zero_point=good.zero_point[:, :1]), name)
    with pytest.raises(TypeError, match="q.data must have a dtype of .*uint8.*got torch.int32"):
        pack_weight(packed, name)
    with pytest.raises(TypeError, match="q.data must have a dtype of .*int32.*got torch.uint8"):
        unpack_weight(q, name)
    with pytest.raises(ValueError, match=r"q.scale must have shape \(2, 4, 64\), got \(2, 64, 4\)"):
        unpack_weight(packed._replace(scale=q.scale), name)
    with pytest.raises(ValueError, match="q.data must be contiguous in the packed form"):
        unpack_weight(packed._replace(data=packed.data.mT.contiguous().mT), name)

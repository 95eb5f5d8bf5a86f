"""Dequantize packed weights (`scheme.packed`) in registers, as the first operand of WGMMA.

A packed word holds numbers that one thread multiplies: 4-bit ones of a k16 tile of 64 weight rows
(pairs of neighbours along K, of two neighbouring rows and both halves of the tile), or 8-bit ones
of half of the tile. Words are decoded as pairs of 16-bit lanes.

The bits of small floats are moved to their places and multiplied by the bias correction.

Integers up to eight bits need no conversion in bf16: a lane of which the other bits are masked off
is the float ``integer * 2 ** -133``, since the smallest floats are equally spaced. So one
multiply-add subtracts the offset and multiplies by the scale, and rounds once. Zero points, whose
products with scales bf16 does not hold, are subtracted before. The range of fp16 is too small for
that: there integers go into the mantissa of 1024, from which a constant or the zero point is
subtracted.

The correction is part of the scale, with an exponent that is less by SHIFT so that bf16 holds it.
`restoring` undoes that on the sums. For the scales that this serves exactly see `pack_weight`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels._hopper.lanes import (
    constant_lanes,
    flipped_lanes,
    lane_twice,
    masked_lanes,
    multiply_add_lanes,
    multiply_lanes,
    power_of_two,
    spread_bytes,
    subtract_lanes,
)
from moe_ops.kernels._hopper.memory import reinterpret

UNIT = gl.constexpr(64)
"""Weight rows, and numbers along K, of a packed chunk."""
SHIFT = gl.constexpr(64)
"""Scales multiply weights with this exponent less than they have."""
SPACING = gl.constexpr(133)
"""The smallest floats of bf16 are multiples of 2 ** -SPACING."""


@gluon.constexpr_function
def equally_spaced(C):
    """Whether integers are taken as they lie, as the smallest floats of bf16."""
    return C.EXPONENT == 0 and not C.HALF


@gluon.constexpr_function
def correction(C):
    """Exponent of the correction of decoded numbers; 0: there is none."""
    if equally_spaced(C):
        return SPACING
    return (16 if C.HALF else 128) - 2 ** (C.EXPONENT - 1) if C.EXPONENT > 0 else 0


@gluon.constexpr_function
def corrects_scales(C):
    """Whether scales of one byte get the correction, so that numbers need no other."""
    return C.COLS > 0 and C.SCALE_BITS == 8


@gluon.constexpr_function
def restoring(C):
    """The factor by which sums are too small."""
    if C.FP8:
        return 2.0**9  # see `fp8_fragments`
    return 2.0**SHIFT if corrects_scales(C) or equally_spaced(C) else 1.0


@gluon.constexpr_function
def words_layout(WARPS):
    """Layout of words ``(warp, row pair, column pair, k16 tile)``: a thread has four neighbours."""
    return gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def pairs_layout(WARPS):
    """Layout of one number for each row of 16 a warp, ``(warp, row pair, row of the pair)``."""
    warps = [[2**i, 0, 0] for i in range(WARPS.bit_length() - 1)]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout([[0, 0, 1]], lanes, warps, [], [WARPS, 8, 2])


WORDS = gl.constexpr(words_layout(4))
PAIRS = gl.constexpr(pairs_layout(4))
"""Both layouts for a warp group, whose warps have the 64 rows of a unit."""


@gluon.jit
def nibble_lanes(word, Q: gl.constexpr, C: gl.constexpr):
    """Register Q of a word of 4-bit integers, in the form that `integers` takes.

    Odd ones of the smallest floats lie four bits higher.
    """
    if C.HALF:
        value = masked_lanes(word >> (4 * Q), 0xF, 0x6400)
    else:
        moved = word if Q < 2 else word >> 8
        value = moved & (0x00F000F0 if Q % 2 == 1 else 0x000F000F)
    return value


@gluon.jit
def integers(value, ODD: gl.constexpr, factor, less, C: gl.constexpr):
    """Numbers from integers of even or odd rows: minus offset or zero point, times scale.

    ``value``: the integers as the smallest floats, or added to 1024 in fp16. ``factor``: what they
    are multiplied by, or None. ``less``: what is subtracted before, or with the smallest floats and
    without zero points, added after; None: a constant.
    """
    if equally_spaced(C):
        if factor is None:
            factor = constant_lanes(power_of_two(correction(C) - SHIFT - high_bits(ODD, C)), value)
            if less is None:
                less = constant_lanes(half_range(False, C), value)
        value, factor = gl.broadcast(value, factor)
        value, less = gl.broadcast(value, less)
        if C.ZERO_BYTES > 0:
            value = multiply_lanes(subtract_lanes(value, less, False), factor, False)
        else:
            value = multiply_add_lanes(value, factor, less)
    else:
        if less is None:
            less = constant_lanes(0x6400 + (1 << (C.BITS - 1)), value)
        value, less = gl.broadcast(value, less)
        value = subtract_lanes(value, less, True)
        if factor is not None:
            value, factor = gl.broadcast(value, factor)
            value = multiply_lanes(value, factor, True)
    return value


@gluon.constexpr_function
def high_bits(ODD, C):
    """How many bits higher the integers of even or odd rows lie than at the end of a lane."""
    return 4 if ODD and C.BITS == 4 and not C.HALF else 0


@gluon.jit
def float_lanes(word, Q: gl.constexpr, C: gl.constexpr):
    """Register Q of a word of 4-bit floats, still to be multiplied by the bias correction.

    Packed bits lie so that sign and magnitude move together: see `scheme.packed`.
    """
    if Q == 0:
        value = word & -0x7E3F7E40
    elif Q == 1:
        value = (word << 6) & -0x7E3F7E40
    elif Q == 2:
        bits = word.to(gl.uint32, bitcast=True)
        value = ((bits >> 4) | (bits << 28)).to(gl.int32, bitcast=True) & -0x7E3F7E40
    else:
        value = ((word << 2) & -0x7F3F7F40) | ((word >> 6) & 0x01000100)
    if C.HALF:
        value = (value & -0x7FFF8000) | ((value & 0x01C001C0) << 3)
    return value


@gluon.jit
def byte_lanes(word, J: gl.constexpr, C: gl.constexpr):
    """Bytes J of both lanes: floats still to be corrected, or integers as `integers` takes them."""
    if C.EXPONENT > 0:
        DOWN: gl.constexpr = (5 if C.HALF else 8) - C.EXPONENT
        LIFT: gl.constexpr = 16 - C.STORED
        UP: gl.constexpr = LIFT - 8 * J
        MAGNITUDE: gl.constexpr = ((1 << (C.STORED - 1)) - 1) << (LIFT - DOWN)
        lifted = word << UP if UP >= 0 else word >> -UP
        moved = word << (UP - DOWN) if UP >= DOWN else word >> (DOWN - UP)
        value = (lifted & -0x7FFF8000) | (moved & (MAGNITUDE | (MAGNITUDE << 16)))
    else:
        value = flipped_lanes(word >> (8 * J), 0xFF, 0x80 if C.OFFSET == 0 else 0)
        if C.HALF:
            value |= 0x64006400
    return value


@gluon.jit
def scale_lanes(stored, C: gl.constexpr):
    """Scales of two rows in the lanes of a word; one-byte scales include the correction.

    ``stored``: from `load_pairs`.
    """
    LIFT: gl.constexpr = correction(C) - SHIFT
    if C.SCALE == "e8m0":  # multiplied: a sum of exponents may overflow into the sign
        word = spread_bytes(stored) << 7
        word = multiply_lanes(word, constant_lanes(power_of_two(LIFT), word), False)
    elif C.SCALE == "e4m3":  # its bits as bf16 are 2 ** 120 times too small
        word = spread_bytes(stored) << 4
        word = multiply_lanes(word, constant_lanes(power_of_two(120), word), False)
        word = multiply_lanes(word, constant_lanes(power_of_two(LIFT), word), False)
    else:
        word = stored
    return word


@gluon.jit
def load_pairs(memory, at, COUNT: gl.constexpr, BITS: gl.constexpr, WARPS: gl.constexpr):
    """What each two neighbouring rows of a group have, as one integer of BITS bits.

    ``memory`` holds COUNT groups of 16 rows a warp; ``at``: the group.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    DTYPE: gl.constexpr = pair_type(BITS)
    view = reinterpret(memory, DTYPE, [COUNT, WARPS, 8], FLAT)
    return view.index(at).load(gl.SliceLayout(2, pairs_layout(WARPS)))


@gluon.constexpr_function
def pair_type(BITS):
    """The unsigned integers of 8 or 16 bits, or int32."""
    return {8: gl.uint8, 16: gl.uint16, 32: gl.int32}[BITS]


@gluon.constexpr_function
def chunk_groups(C):
    """Groups of a weight row in a chunk; 1 where chunks share them."""
    return max(1, C.STAGE_GROUPS // 2)


@gluon.jit
def spread_scales(stored, C: gl.constexpr):
    """What the numbers of each word are multiplied by, and for the smallest floats what is added.

    Lanes: of the even rows, of the odd rows.
    """
    GROUPS: gl.constexpr = chunk_groups(C)
    LIFTED: gl.constexpr = correction(C) - SHIFT if C.SCALE == "input" else 0
    LOW: gl.constexpr = power_of_two(LIFTED)
    HIGH: gl.constexpr = power_of_two(LIFTED - high_bits(True, C))
    HALF: gl.constexpr = half_range(C.SCALE != "input", C)
    factors, offsets = (), ()
    for group in gl.static_range(GROUPS):
        factor = scale_lanes(stored[group], C)
        if equally_spaced(C):
            offsets += (multiply_lanes(factor, constant_lanes(HALF, factor), False),)
            if LOW != HIGH or LIFTED != 0:
                factor = multiply_lanes(factor, constant_lanes(LOW, factor, HIGH), False)
        factors += (factor,)
    spread = (spread_groups(factors, GROUPS),)
    if equally_spaced(C):
        spread += (spread_groups(offsets, GROUPS),)
    return spread


@gluon.constexpr_function
def half_range(SMALLEST, C):
    """Minus half of the integers' range, as one of the SMALLEST floats or corrected."""
    return 0x8000 | (1 << (C.BITS - 1) if SMALLEST else power_of_two(C.BITS - 1 - SHIFT))


@gluon.jit
def spread_groups(x, GROUPS: gl.constexpr):
    """The words of each group of a chunk, for each word of numbers."""
    if GROUPS == 1:
        words = spread_rows(x[0])
    elif GROUPS == 2:
        words = spread_tiles(x[0], x[0], x[1], x[1])
    else:
        words = spread_tiles(x[0], x[1], x[2], x[3])
    return words


@gluon.jit
def scale_rows(stored, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The scale of each row of a unit's sums, in a stage that has one scale per row.

    ``stored``: from `load_pairs`, as the only group.
    """
    rows = numbers(stored[0], DTYPE).to(gl.float32).permute((0, 2, 1)).reshape((UNIT,))
    return gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT), assert_trivial=True)


@gluon.jit
def spread_zeros(stored, C: gl.constexpr):
    """The zero points of each group of a chunk for each word: of the even rows, of the odd rows."""
    GROUPS: gl.constexpr = chunk_groups(C)
    lanes = ()
    for group in gl.static_range(GROUPS):
        lanes += (zero_lanes(stored[group], C),)
    return spread_groups(lanes, GROUPS)


@gluon.jit
def zero_lanes(stored, C: gl.constexpr):
    """A group's zero points of two rows in the lanes of a word, in the form of the integers."""
    if C.BITS == 4:
        both = stored.to(gl.int32)
        word = (both & 15) | ((both & 0xF0) << (12 + high_bits(True, C)))
    else:
        word = spread_bytes(stored)
    MAGIC: gl.constexpr = 0x64006400 if C.HALF else 0
    return word | MAGIC


@gluon.jit
def spread_rows(x):
    """One number per row pair, for each word."""
    LAYOUT: gl.constexpr = words_layout(x.shape[0])
    OF_ROWS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))
    x = gl.convert_layout(x, OF_ROWS, assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(x, 2), 3)


@gluon.jit
def spread_tiles(t0, t1, t2, t3):
    """One number per row pair and k16 tile, for each word."""
    WARPS: gl.constexpr = t0.shape[0]
    LAYOUT: gl.constexpr = gl.SliceLayout(2, words_layout(WARPS))
    both = gl.join(gl.join(t0, t2), gl.join(t1, t3)).reshape((WARPS, 8, 4))
    x = gl.convert_layout(both, LAYOUT, assert_trivial=True)
    return gl.expand_dims(x, 2)


@gluon.jit
def corrected(value, factor, C: gl.constexpr):
    """Floats times the bias correction and their scales, whichever there are."""
    if C.EXPONENT > 0 and not corrects_scales(C):
        BITS: gl.constexpr = (correction(C) + 15) << 10 if C.HALF else power_of_two(correction(C))
        value = multiply_lanes(value, constant_lanes(BITS, value), C.HALF)
    if factor is not None:
        value, factor = gl.broadcast(value, factor)
        value = multiply_lanes(value, factor, C.HALF)
    return value


@gluon.jit
def numbers(word, DTYPE: gl.constexpr):
    """The two lanes of each word, along a new last axis."""
    low = (word & 0xFFFF).to(gl.int16).to(DTYPE, bitcast=True)
    high = (word >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def decode_nibbles(words, factor, less, DTYPE: gl.constexpr, DOT: gl.constexpr, C: gl.constexpr):
    """A chunk of 4-bit weights as WGMMA's first operand."""
    r = ()
    for q in gl.static_range(4):
        times = None if factor is None else lane_twice(factor, q % 2 == 1)
        if C.EXPONENT > 0:
            r += (corrected(float_lanes(words, q, C), times, C),)
        else:
            minus = None if less is None else lane_twice(less, q % 2 == 1)
            r += (integers(nibble_lanes(words, q, C), q % 2 == 1, times, minus, C),)
    word = gl.join(gl.join(r[0], r[1]), gl.join(r[2], r[3]))
    both = numbers(word, DTYPE)  # (warp, pair, column, tile, row, half of the tile, k)
    chunk = both.permute((0, 4, 1, 3, 5, 2, 6)).reshape((16 * words.shape[0], 64))
    return gl.convert_layout(chunk, DOT, assert_trivial=True)


@gluon.jit
def bytes_of_row(left, right, factor, less, J: gl.constexpr, DTYPE: gl.constexpr, C: gl.constexpr):
    """The 8-bit weights of row J of each pair, in the words of a chunk's two halves."""
    both = gl.join(byte_lanes(left, J, C), byte_lanes(right, J, C))
    WARPS: gl.constexpr = left.shape[0]
    word = both.reshape((WARPS, 8, 4, 2, 2, 2))  # (warp, pair, column, tile, half of it, half)
    LAYOUT: gl.constexpr = word.type.layout
    times = None if factor is None else lane_twice(spread_halves(factor, LAYOUT), J == 1)
    if C.EXPONENT > 0:
        value = corrected(word, times, C)
    else:
        minus = None if less is None else lane_twice(spread_halves(less, LAYOUT), J == 1)
        value = integers(word, J == 1, times, minus, C)
    return numbers(value, DTYPE)


@gluon.jit
def decode_bytes(
    left, right, factor, less, DTYPE: gl.constexpr, DOT: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """A chunk of 8-bit weights, in the words of its two halves, as WGMMA's first operand."""
    even = bytes_of_row(left, right, factor, less, 0, DTYPE, C)
    odd = bytes_of_row(left, right, factor, less, 1, DTYPE, C)
    ROWS: gl.constexpr = 16 * left.shape[0]
    chunk = gl.join(even, odd).permute((0, 7, 1, 5, 3, 4, 2, 6)).reshape((ROWS, 64))
    return gl.convert_layout(chunk, DOT, assert_trivial=True)


@gluon.jit
def spread_halves(x, LAYOUT: gl.constexpr):
    """One number per row pair, or per row pair and k16 tile, for the words of both halves."""
    WARPS: gl.constexpr = x.shape[0]
    if x.shape[3] == 1:
        cube = x.reshape((WARPS, 8, 1, 1, 1, 1))
    else:
        cube = x.reshape((WARPS, 8, 1, 2, 2)).permute((0, 1, 2, 4, 3))
        cube = cube.reshape((WARPS, 8, 1, 2, 1, 2))
    return gl.convert_layout(cube, LAYOUT, assert_trivial=True)


@gluon.jit
def dequantized(chunk, DTYPE: gl.constexpr, DOT: gl.constexpr, C: gl.constexpr):
    """The weights of a loaded chunk as the first operand of a product.

    ``chunk``: its words, its scales and its zero points, as they are stored; () for none.
    """
    words, scale, zero = chunk
    factor, less = None, None
    if C.SCALED == "weights":
        spread = spread_scales(scale, C)
        factor = spread[0]
        if equally_spaced(C):
            less = spread[1]
    if C.ZERO_BYTES > 0:
        less = spread_zeros(zero, C)
    if C.BITS == 4:
        values = decode_nibbles(words[0], factor, less, DTYPE, DOT, C)
    else:
        values = decode_bytes(words[0], words[1], factor, less, DTYPE, DOT, C)
    return values

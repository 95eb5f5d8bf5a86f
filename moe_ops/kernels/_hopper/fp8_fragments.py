"""Packed 4-bit integers as fp8 fragments of WGMMA, and the scales of their groups along K.

From -8 to 7 integers are exact in e4m3, whose smallest numbers are equally spaced: a byte from 0 to
15 is that many times 2 ** -9. So the magnitude of an integer is an fp8 number as it lies. Sums are
too small by that factor, which `fragments.restoring` undoes.

WGMMA takes 16 numbers along K from four lanes: lane c has the places 4c to 4c + 3, and its word
holds the columns 2c, 2c + 8, 2c + 1 and 2c + 9 of the weight. So column x is multiplied at place
``2 * (x % 8) + x // 8``, and rows have their columns in that order: see `pack`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels._hopper.fragments import numbers
from moe_ops.kernels._hopper.lanes import (
    constant_lanes,
    multiply_lanes,
    power_of_two,
    selected_bits,
    spread_bytes,
)


@gluon.jit
def signed_bytes(word):
    """The integers of a word's even and of its odd row, as four fp8 bytes each.

    All eight are turned into signs and magnitudes at once: the negative ones, whose bit 3 is not
    set, are subtracted from 8, by a complement and an addition that carries no further.
    """
    signs = ~word & -0x77777778
    ones = (signs.to(gl.uint32, bitcast=True) >> 3).to(gl.int32, bitcast=True)
    sizes = ((word & 0x77777777) ^ (signs - ones)) + ones
    even = selected_bits(sizes, 0x0F0F0F0F, signs << 4)
    odd = selected_bits(sizes >> 4, 0x0F0F0F0F, signs)
    return even, odd


@gluon.jit
def byte_numbers(word):
    """The four fp8 numbers of each word, along two new last axes."""
    b = ()
    for i in gl.static_range(4):
        b += ((word >> (8 * i)).to(gl.int8).to(gl.float8e4nv, bitcast=True),)
    return gl.join(gl.join(b[0], b[2]), gl.join(b[1], b[3]))


@gluon.jit
def fp8_chunk(words, DOT: gl.constexpr):
    """A chunk of 4-bit integers as WGMMA's first operand in fp8, 2 ** -9 times what they are."""
    even, odd = signed_bytes(words)
    both = byte_numbers(gl.join(even, odd))  # (warp, pair, column, tile, row, k, k)
    chunk = both.permute((0, 4, 1, 3, 2, 5, 6)).reshape((16 * words.shape[0], 64))
    return gl.convert_layout(chunk, DOT, assert_trivial=True)


@gluon.jit
def group_scales(stored):
    """The e4m3 scale of each row of a unit's sums, in float32; ``stored``: from `load_pairs`."""
    word = spread_bytes(stored) << 4  # as bf16, 2 ** 120 times too small
    word = multiply_lanes(word, constant_lanes(power_of_two(120), word), False)
    rows = numbers(word, gl.bfloat16).to(gl.float32).permute((0, 2, 1))
    return rows.reshape((16 * stored.shape[0],))

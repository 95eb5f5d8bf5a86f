"""Triton kernel that restores the plain form of packed weights (`scheme.packed`).

A program restores the columns of some chunks, 64 rows each. Every output word has neighbours along
K from threads of one warp whose lanes follow one another: from four words of 4-bit numbers, or from
two of 8 bits. Reads of the same word by other rows hit the cache.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.kernels._runtime.dependent import take_turn
from moe_ops.kernels._runtime.launch import Launch
from moe_ops.scheme import Quant
from moe_ops.scheme.packed import CHUNK, PLACES, bits_spread

CHUNKS = 4
"""Chunks along K of a program."""


@triton.constexpr_function
def _bit_places(bit):
    """Places of a bit of a 4-bit float, four bits for each register."""
    return sum(places[bit] << (4 * register) for register, places in enumerate(PLACES))


@triton.jit
def _integers(word, register):
    """The 4-bit integers of a register, one in each half of a word."""
    return (word >> (4 * register)) & 0x000F000F


@triton.jit
def _floats(word, register):
    """The 4-bit floats of a register, one in each half of a word."""
    both = word * 0
    for bit in tl.static_range(4):
        place = (_bit_places(bit) >> (4 * register)) & 15
        bits = (word >> place) & 0x00010001
        if bit == 3:  # register 2 has its signs in the other halves
            bits = tl.where(register == 2, bits >> 16 | (bits & 1) << 16, bits)
        both |= bits << bit
    return both


@triton.jit
def _unpack_kernel(
    words, out, num_chunks,
    BITS: tl.constexpr, SPREAD: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Restore ROWS rows of CHUNKS chunks; ``num_chunks`` are along K."""
    take_turn()
    EACH: tl.constexpr = ROWS * BITS // 32  # words of a row in a chunk
    place, row = tl.arange(0, CHUNKS * EACH)[None, :], tl.arange(0, ROWS)[:, None]
    chunk, word = tl.program_id(1) * CHUNKS + place // EACH, place % EACH
    inside = chunk < num_chunks
    first = tl.program_id(0).to(tl.int64) * num_chunks * (ROWS * EACH)
    thread = row // 16 * 32 + row % 16 // 2 * 4
    source = words + first + chunk * (ROWS * EACH)
    value = tl.zeros((ROWS, CHUNKS * EACH), tl.int32)
    if BITS == 4:  # columns 8 * word to 8 * word + 7
        register = row % 2 + 2 * (word % 2)
        for pair in tl.static_range(4):
            loaded = tl.load(source + (thread + pair) * 4 + word // 2, mask=inside, other=0)
            both = _floats(loaded, register) if SPREAD else _integers(loaded, register)
            value |= ((both & 15) | (both >> 12) & 240) << (8 * pair)
    else:  # columns 4 * word to 4 * word + 3
        tile, half = word // 4, word % 4 // 2
        for pair in tl.static_range(2):
            lane = thread + word % 2 * 2 + pair
            at = tile // 2 * 512 + lane * 4 + tile % 2 * 2 + half
            both = tl.load(source + at, mask=inside, other=0) >> (8 * (row % 2))
            value |= ((both & 255) | (both >> 8) & 65280) << (16 * pair)
    at = first + row * (num_chunks * EACH) + chunk * EACH + word
    tl.store(out + at, value, mask=inside)


@lru_cache(maxsize=64)
def _unpack_launch(bits: int, spread: bool) -> Launch:
    sizes = {"ROWS": CHUNK, "CHUNKS": CHUNKS, "num_warps": 4}
    return Launch(_unpack_kernel, BITS=bits, SPREAD=spread, **sizes)


def plain_data(words: Tensor, quant: Quant) -> Tensor:
    """Restore the data ``(E, N, K)`` of a packed weight, without its scales.

    Args:
        words: int32 ``(E, N, K * bits / 32)``.
        quant: how the weight is quantized.
    """
    experts, n, width = words.shape
    bits = quant.element.stored_bits
    out = torch.empty_like(words)
    num_chunks = width * words.dtype.itemsize * 8 // bits // CHUNK
    grid = (experts * n // CHUNK, cdiv(num_chunks, CHUNKS))
    if grid[0] and grid[1]:
        _unpack_launch(bits, bits_spread(quant))(grid, words, out, num_chunks)
    return out.view(quant.dtype)

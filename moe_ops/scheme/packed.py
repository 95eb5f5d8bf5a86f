"""The packed form of a weight, for kernels that dequantize fragments in registers.

A packed weight holds the same bits as the plain form that `quantize_weight` returns, in the order
in which threads of a warp hold the operand of a 64 x 64 matrix product. It is recognised by its
dtype: int32. ``data`` is ``(E, N, K * bits / 32)``, whose memory is ``(E, N/64, K/64, chunk)``: a
chunk has 64 rows and 64 numbers along K, in 512 words (4 bits) or 1024 words (8 bits). For row r
and number c of a chunk::

    warp = r // 16                            tile = c // 16
    lane = r % 16 // 2 * 4 + c % 8 // 2       half = c % 2
    register = r % 2 + 2 * (c % 16 // 8)

    4 bits: bit 4 * register + 16 * half of word (warp * 32 + lane) * 4 + tile
    8 bits: bit 8 * (register % 2) + 16 * half
            of word tile // 2 * 512 + (warp * 32 + lane) * 4 + tile % 2 * 2 + register // 2

The bits of a 4-bit float do not stay together: `PLACES` says where they lie in a half of the word.
A shift and a mask then move sign and magnitude of both halves to the bits of bf16 numbers at once.

Scales and zero points with an axis for groups have it before the rows: ``(E, G, N)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moe_ops import checks
from moe_ops.scheme.named import Scheme, as_scheme
from moe_ops.scheme.values import Quant
from moe_ops.tensors import QTensor

PACKED_DTYPE = torch.int32
"""Dtype of packed weights, and of no plain ones."""
PACKED_DTYPES = (PACKED_DTYPE,)
"""Dtypes of all packed forms."""
CHUNK = 64
"""Rows of a chunk, and its numbers along K."""
_ROWS = (4, 8, 2)
"""Axes of a chunk's rows: ``warp, pair, odd``."""
_COLS = {4: (2, 2, 2, 4), 8: (2, 2, 2, 4, 2)}
"""Axes of the bytes of a chunk's row, for each number of stored bits: ``pair of tiles, tile,
register pair, two columns, half``. Four bits of both halves share a byte."""
_ORDER = {4: (0, 4, 1, 2, 8, 5, 6, 7, 3), 8: (0, 4, 5, 1, 2, 8, 6, 7, 9, 3)}
"""Order in memory, for each number of stored bits, of the axes ``(N/64, *_ROWS, K/64, *_COLS)``."""

PLACES = ((6, 7, 8, 15), (0, 1, 2, 9), (10, 11, 12, 3), (4, 5, 14, 13))
"""Places in a half of a word of the bits of a 4-bit float, mantissa first and sign last, for each
register. (The sign of register 2 lies in the other half, where a rotation takes it from.)"""


def is_packed(w: Tensor) -> bool:
    """Whether a weight is in the packed form.

    Returns:
        True for `pack_weight`'s dtype, int32.
    """
    return w.dtype in PACKED_DTYPES


def packs(scheme: str | Scheme, n: int, k: int) -> bool:
    """Whether weights ``(E, N, K)`` of a scheme have a packed form; see `pack_weight`.

    Returns:
        True if `pack_weight` takes weights of these sizes.

    Raises:
        TypeError, ValueError, NotImplementedError: not a scheme, as `pack_weight`.
    """
    return _refusal("w", as_scheme(scheme), n, k) is None


def splits_chunks(n: int, *, gated: bool, interleaved: bool) -> bool:
    """Whether gate and up rows share a chunk, which kernels that apply the activation do not read.

    Args:
        n: N, the rows of the weight.
        gated: whether the weight has gate and up rows.
        interleaved: whether these alternate.
    """
    return gated and not interleaved and n % (2 * CHUNK) != 0


def pack_weight(q: QTensor, scheme: str | Scheme) -> QTensor:
    """Convert a weight to the packed form, which operators take like the plain form.

    Kernels for Hopper decode it in registers; they read e8m0 scales from 2**-55 to 2**63 exactly,
    smaller ones as (almost) 0; bf16 scales of groups of integers from 2**-62 to 2**58 exactly,
    smaller ones nearly; and larger ones of both exactly or as infinity. They take e4m3 scales for
    positive, and read fp8 numbers and e4m3 scales that are NaN as 480. `unpack_weight` restores
    every bit.
    Besides input and output, memory is needed for three experts only. Axis 0 stays the expert.

    Args:
        q: as `quantize_weight` returns it.
        scheme: a name, a key or a `Scheme`.

    Returns:
        A `QTensor`: ``data`` int32 ``(E, N, K * bits / 32)`` with 4 or 8 stored bits per number;
        scales ``(E, G, N)``, zero points ``(E, G, N)`` or, for 4-bit elements, ``(E, G, N / 2)``.
        Scales without an axis for groups and the global scale are as in ``q``.

    Raises:
        TypeError, ValueError: data or scales of another dtype or shape; N or K that is not a
            multiple of 64.
        NotImplementedError: a scheme whose weight scales are shared by several rows, or whose
            weights or activations kernels do not dequantize (see `dequantizes_rows`).
    """
    quant = _checked(q, scheme, fragments=False)
    experts, n, width = q.data.shape
    shape = (experts, n, width * q.data.itemsize // PACKED_DTYPE.itemsize)
    words = _packed_into(q.data.new_empty(shape, dtype=PACKED_DTYPE), q.data, quant)
    return QTensor(words, swapped(q.scale), swapped(q.zero_point), q.global_scale)


def pack_weight_(q: QTensor, scheme: str | Scheme) -> QTensor:
    """As `pack_weight`, in the memory of ``q`` if its data is contiguous: ``q`` is lost."""
    if not q.data.is_contiguous():
        return pack_weight(q, scheme)
    quant = _checked(q, scheme, fragments=False)
    words = _packed_into(q.data.view(PACKED_DTYPE), q.data, quant)
    return QTensor(words, _swapped_(q.scale), _swapped_(q.zero_point), q.global_scale)


def _packed_into(words: Tensor, data: Tensor, quant: Quant) -> Tensor:
    """Pack expert after expert into ``words``, which may be the memory of ``data``."""
    if data.is_meta:  # there is nothing to pack
        return words
    ordered = words.new_empty(words.shape[1:])
    move = _Moves(_rearranged(quant).there, ordered)
    for source, target in zip(data, words, strict=True):
        view = _in_order(source, quant)
        ordered.view(torch.uint8).view(view.shape).copy_(view)
        move(ordered, target)
    return words


def unpack_weight(q: QTensor, scheme: str | Scheme) -> QTensor:
    """Convert a packed weight to the plain form: the inverse of `pack_weight`.

    Args:
        q: as `pack_weight` returns it.
        scheme: a name, a key or a `Scheme`.

    Returns:
        The weight as `quantize_weight` returns it, bit for bit.

    Raises:
        TypeError, ValueError, NotImplementedError: as `pack_weight`.
    """
    quant = _checked(q, scheme, fragments=True)
    experts, n, width = q.data.shape
    shape = (experts, n, width * PACKED_DTYPE.itemsize // quant.dtype.itemsize)
    stored = q.data.new_empty(shape, dtype=quant.dtype)
    ordered = q.data.new_empty(q.data.shape[1:])
    move = _Moves(_rearranged(quant).back, ordered)
    for source, target in zip(q.data, stored, strict=True):
        move(source, ordered)
        view = _in_order(target, quant)
        view.copy_(ordered.view(torch.uint8).view(view.shape))
    return QTensor(stored, swapped(q.scale), swapped(q.zero_point), q.global_scale)


def groups_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The packed form's shape of scales or zero points, from that of the plain form."""
    return (shape[0], shape[2], shape[1]) if len(shape) == 3 else shape


def swapped(x: Tensor | None) -> Tensor | None:
    """Swap rows and groups of scales or zero points that have both axes."""
    return x if x is None or x.dim() != 3 else x.transpose(1, 2).contiguous()


def _swapped_(x: Tensor | None) -> Tensor | None:
    """Swap rows and groups as `swapped` does, expert after expert in the memory of ``x``."""
    if x is None or x.dim() != 3 or not x.is_contiguous():
        return swapped(x)
    out = x.view(groups_first(tuple(x.shape)))
    held = torch.empty_like(out[0])
    for source, target in zip(x, out, strict=True):
        held.copy_(source.t())
        target.copy_(held)
    return out


def bits_spread(quant: Quant) -> bool:
    """Whether the bits of a number do not stay together."""
    return quant.element.bits == 4 and quant.element.exponent > 0


def dequantizes_rows(scheme: Scheme) -> bool:
    """Whether kernels of packed weights dequantize the scheme's activations too, to bf16.

    Scales along K multiply the numbers, exactly. Numbers of 8 bits with one scale per row, or one
    of all rows, are multiplied as they are (by int4 weights in fp8 if there are many rows with a
    scale each), and the scales multiply the sums.
    """
    both, quant = scheme.dequantizes_both, cast(Quant, scheme.activation)
    return both and (quant.local or quant.element.bits == 8)


def widens_rows(scheme: Scheme) -> bool:
    """Whether operators with packed weights quantize rows themselves: to fp8, held in bf16."""
    quant = scheme.activation
    fp8 = quant is not None and quant.per_row and quant.element.name == "fp8"
    return fp8 and scheme.dequantizes_both


def check_packed(name: str, w: Tensor, scheme: Scheme, n: int, k: int) -> None:
    """Check that a weight of ``(E, N, K)`` numbers, called ``name``, has a packed form.

    Raises:
        ValueError, NotImplementedError: it has none, or is packed and not contiguous.
    """
    refused = _refusal(name, scheme, n, k)
    if refused is not None:
        error, text = refused
        raise error(text)
    if is_packed(w) and not w.is_contiguous():
        raise ValueError(f"{name} must be contiguous in the packed form, got strides {w.stride()}")


def _refusal(name: str, scheme: Scheme, n: int, k: int) -> tuple[type[Exception], str] | None:
    """Why a weight ``(E, N, K)`` has no packed form: the exception to raise, and its text."""
    quant, to_pack = scheme.weight, f"if {name} is packed (see pack_weight)"
    if quant is None or not (scheme.activation is None or dequantizes_rows(scheme)):
        rows = "rows, if quantized, have 8 bits or scales along K"
        rule = f"scheme must dequantize weights, and its {rows}, {to_pack}"
        return NotImplementedError, f"{rule}, got {scheme.name}"
    if quant.group.rows != 1:
        rule = f"scheme.weight.group must have one row {to_pack}"
        return NotImplementedError, f"{rule}, got {quant.group} in scheme {scheme.name!r}"
    if n % CHUNK or k % CHUNK:
        rule = f"N and K must be multiples of {CHUNK} {to_pack}"
        return ValueError, f"{rule}, got N = {n} and K = {k}"
    return None


def _checked(q: QTensor, scheme: str | Scheme, *, fragments: bool) -> Quant:
    """How a weight is quantized; raises unless it is in the given form and has the other too."""
    if not isinstance(q, QTensor):
        raise TypeError(f"q must be a QTensor, got {type(q).__name__}")
    scheme = as_scheme(scheme)
    quant = scheme.weight
    if quant is None:
        raise NotImplementedError(f"scheme must quantize weights, got {scheme.name}")
    dtype = PACKED_DTYPE if fragments else quant.dtype
    checks.tensor("q.data", q.data, 3, (dtype,))
    experts, n, width = q.data.shape
    k = width * quant.numbers_per_entry(dtype)
    check_packed("q.data", q.data, scheme, n, k)
    if quant.local:
        _check_groups(
            "q.scale", q.scale, quant.weight_scale_shape(experts, n, k), fragments=fragments
        )
    if quant.zero_point:
        shape = quant.zero_point_shape(experts, n, k)
        _check_groups("q.zero_point", q.zero_point, shape, fragments=fragments)
    return quant


def _check_groups(name: str, x: Any, shape: tuple[int, ...], *, fragments: bool) -> None:
    """Check the shape of scales or zero points; ``shape`` is that of the plain form."""
    checks.tensor(name, x, 3, None)
    wanted = groups_first(shape) if fragments else shape
    if tuple(x.shape) != wanted:
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")


def _in_order(stored: Tensor, quant: Quant) -> Tensor:
    """A view of one expert's bytes in the order in which the packed form has them."""
    bits = quant.element.stored_bits
    rows = stored.view(torch.uint8).unflatten(1, (-1, *_COLS[bits])).unflatten(0, (-1, *_ROWS))
    return rows.permute(_ORDER[bits])


class _Rearranged(NamedTuple):
    """From words of bytes in order to words of the packed form, and back; None: they are equal."""

    there: Callable[[Tensor], Tensor] | None
    back: Callable[[Tensor], Tensor] | None


class _Moves:
    """A function that moves bits within words, looked up by the bytes of each word.

    All memory is taken once and not for every expert: an engine's allocator may not find blocks of
    a few MB again (vLLM's does not while it loads a model).

    Args:
        function: the function; None moves nothing.
        like: words of one expert.
    """

    def __init__(self, function: Callable[[Tensor], Tensor] | None, like: Tensor) -> None:
        self.tables: list[Tensor] = []
        if function is not None:
            values = torch.arange(256, dtype=like.dtype, device=like.device)
            self.tables = [function(values << shift) for shift in (0, 8, 16, 24)]
            self.byte, self.moved = torch.empty_like(like).view(-1), torch.empty_like(like)

    def __call__(self, words: Tensor, out: Tensor) -> None:
        """Move the bits of ``words`` into ``out``, which is other memory."""
        if not self.tables:
            out.copy_(words)
            return
        out.zero_()
        for number, table in enumerate(self.tables):
            torch.bitwise_right_shift(words.view(-1), 8 * number, out=self.byte)
            self.byte &= 255
            torch.index_select(table, 0, self.byte, out=self.moved.view(-1))
            out |= self.moved


def _rearranged(quant: Quant) -> _Rearranged:
    """How bits move in words of a quantization, whose elements have 4 or 8 stored bits."""
    if bits_spread(quant):
        return _Rearranged(
            lambda words: _moved_bits(_split_bytes(words)),
            lambda words: _join_bytes(_moved_bits(words, back=True)),
        )
    whole = {4: _Rearranged(_split_bytes, _join_bytes), 8: _Rearranged(None, None)}
    return whole[quant.element.stored_bits]


def _split_bytes(words: Tensor) -> Tensor:
    """The low four bits of a word's bytes in its low half, and the high ones in its high half."""
    moved = torch.zeros_like(words)
    for register in range(4):
        byte = words >> 8 * register
        moved |= (byte & 15) << 4 * register | (byte >> 4 & 15) << (16 + 4 * register)
    return moved


def _join_bytes(words: Tensor) -> Tensor:
    """The inverse of `_split_bytes`."""
    moved = torch.zeros_like(words)
    for register in range(4):
        low, high = words >> 4 * register & 15, words >> (16 + 4 * register) & 15
        moved |= (low | high << 4) << 8 * register
    return moved


def _moved_bits(words: Tensor, *, back: bool = False) -> Tensor:
    """Move the bits of 4-bit floats in each word to their `PLACES`, or back."""
    moved = torch.zeros_like(words)
    for *places, crosses in _moves():
        source, target = reversed(places) if back else places
        bits = words >> source & 0x00010001
        moved |= (_exchanged(bits) if crosses else bits) << target
    return moved


def _moves() -> Iterator[tuple[int, int, bool]]:
    """For each bit in a half of a word: from, to, and whether it goes to the other half."""
    for register, places in enumerate(PLACES):
        for bit, place in enumerate(places):
            yield 4 * register + bit, place, (register, bit) == (2, 3)


def _exchanged(bits: Tensor) -> Tensor:
    """The two halves of words, of which only the lowest bits are set, exchanged."""
    return bits >> 16 | (bits & 1) << 16

"""Turns tensors of checkpoints into this library's canonical form, before ranks cut them.

The canonical form of one expert's projection of N rows and K columns: weights ``(N, K)`` or packed
``(N, K / 2)``; scales ``(N, 1)``, ``(N,)``, one per block of the layer's size, or ``()`` for a
whole tensor; zero points unpacked, ``(N, G)``; biases ``(N,)``; single numbers ``()``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.dispatch.tiles import cdiv
from moe_ops.loading.derived import FLOATS
from moe_ops.loading.names import DIVISORS, CheckpointLayout
from moe_ops.scheme import WHOLE, Quant
from moe_ops.scheme.formats import e8m0_value, join_nibbles

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of the columns 0, 1, 2, ... in an AWQ word."""
_BYTES = (torch.uint8, torch.int8)
_BYTE_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


class PlainWeightError(TypeError):
    """An unquantized weight for a quantized layer."""


class Form(NamedTuple):
    """The form in which a projection is stored."""

    n: int
    k: int
    dtype: torch.dtype
    """Dtype of the parameter that takes the tensor."""
    quant: Quant | None
    """How checkpoints of the layer's scheme store it."""
    own: Quant | None
    """How the layer stores it: likewise, or in smaller blocks."""
    layout: CheckpointLayout

    def quants(self, what: str, x: Tensor) -> tuple[Quant, Quant]:
        """Return ``quant`` and ``own``; TypeError about ``x`` for a layer without a scheme."""
        if self.quant is None or self.own is None:
            raise TypeError(f"{what} must be left out for a layer without a scheme, got {x.dtype}")
        return self.quant, self.own


def canonical(kind: str, x: Tensor, suffix: str, form: Form) -> Tensor:
    """Return ``x`` in canonical form.

    Args:
        kind: a kind of `ParameterSpec`.
        x: a tensor of a checkpoint, without an axis for experts.
        suffix: the end of the tensor's name.
        form: the form that is wanted.

    Raises:
        ValueError: a wrong shape, or numbers that are not finite or not in the scheme's form.
        TypeError: a wrong dtype, or a form that tools write for other elements only.
        PlainWeightError: an unquantized weight for a quantized layer.
    """
    return _RULES[kind](x, suffix, form)


def _expect(x: Tensor, *shapes: tuple[int, ...]) -> None:
    if tuple(x.shape) not in shapes:
        names = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"shape must be {names}, got {tuple(x.shape)}")


def _expect_dtype(x: Tensor, *dtypes: torch.dtype) -> None:
    if x.dtype not in dtypes:
        raise TypeError(f"dtype must be one of {list(dtypes)}, got {x.dtype}")


def _weight(x: Tensor, suffix: str, form: Form) -> Tensor:
    n, k, quant = form.n, form.k, form.quant
    if quant is None:
        _expect_dtype(x, *FLOATS)
        _expect(x, (n, k))
        return within(x, form.dtype)
    if x.dtype in FLOATS:
        raise PlainWeightError(f"dtype must be that of a quantized weight, got {x.dtype}")
    _expect_element(x, suffix, quant)
    bits = quant.element.stored_bits
    per_word = 32 // bits
    if suffix == "qweight":
        return _qweight(x, quant, form)
    if suffix == "blocks":  # (N, K / 32, 16)
        x = x.flatten(-2)
    if x.dtype == torch.int32 and quant.element.name != "fp8":
        _expect(x, (n, cdiv(k, per_word)))
        words = x.contiguous().view(torch.uint8)[:, : k * bits // 8]
        return _signed(words) if quant.dtype == torch.int8 else words
    _expect(x, (n, k * bits // 8))
    if quant.element.offset == 128 and x.dtype == torch.int8:
        return x.view(torch.uint8) ^ 128
    if quant.element.values_per_byte == 2:
        _expect_dtype(x, *_BYTES)
        return x.view(torch.uint8)
    _expect_dtype(x, quant.dtype)
    if quant.element.bits == 6 and bool((x >= 64).any()):
        raise ValueError("codes must be numbers of 6 bits, got some that are larger")
    return x


def _expect_element(x: Tensor, suffix: str, quant: Quant) -> None:
    """Raise TypeError for a form of weight that tools write for other elements only."""
    element = quant.element
    words = suffix == "qweight" or x.dtype == torch.int32
    if words and element.exponent:
        raise TypeError(f"weights of {element.name} must not be in words of integers, got {suffix}")
    if suffix == "blocks" and element.name != "fp4":
        raise TypeError(f"weights of {element.name} must not be blocks of MXFP4, got {suffix}")


def within(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast ``x`` if ``dtype`` has a smaller range; ValueError if a number becomes infinite."""
    if torch.finfo(x.dtype).max <= torch.finfo(dtype).max:
        return x
    converted = x.to(dtype)
    lost = int((converted.isinf() & x.isfinite()).sum())
    if lost:
        raise ValueError(f"numbers must be finite in {dtype}, got {lost} that are not")
    return converted


def _qweight(x: Tensor, quant: Quant, form: Form) -> Tensor:
    """Unpack int32 words of AWQ, ``(K, N / 8)``, or GPTQ, ``(K / 8, N)``, and pack them again."""
    bits = quant.element.stored_bits
    per_word = 32 // bits
    _expect_dtype(x, torch.int32)
    awq = form.layout.awq
    if awq is None:  # the shape says it
        awq = x.shape[0] == form.k
    _expect(x, (form.k, form.n // per_word) if awq else (form.k // per_word, form.n))
    codes = awq_codes(x, bits).t() if awq else _words(x.t(), bits)
    if bits == 4:
        return join_nibbles(codes, 1)
    codes = codes.contiguous()
    return _signed(codes) if quant.dtype == torch.int8 else codes


def _signed(codes: Tensor) -> Tensor:
    """Return int8 numbers that are stored as uint8 with an offset of 128."""
    return (codes ^ 128).view(torch.int8)


def _words(x: Tensor, bits: int) -> Tensor:
    """Unpack int32 words along the last axis into uint8 numbers, the lowest bits first."""
    shift = torch.arange(0, 32, bits, dtype=x.dtype, device=x.device)
    return (x[..., None] >> shift & (2**bits - 1)).flatten(-2).to(torch.uint8)


def awq_codes(x: Tensor, bits: int) -> Tensor:
    """Unpack AWQ words ``(.., rows, words)`` into ``(.., rows, columns)``."""
    words = _words(x, bits).unflatten(-1, (-1, 32 // bits))
    order = AWQ_ORDER if bits == 4 else range(32 // bits)
    return words[..., list(order)].flatten(-2)


def _scale(x: Tensor, suffix: str, form: Form) -> Tensor:
    n, k, (quant, own) = form.n, form.k, form.quants("scales", x)
    x = _scale_numbers(x, quant, form.dtype)
    if quant.per_tensor:
        return _single(x)
    shape = quant.weight_scale_shape(1, n, k)[1:]
    if suffix == "scales" and quant.scale == "input" and tuple(x.shape) == shape[::-1]:
        x = x.t()  # AWQ and GPTQ: (G, N); gpt-oss calls its own, (N, G), the same
    if len(shape) == 1:
        _expect(x, (n,), (n, 1), *([(1, n)] if suffix == "scales" else []))  # the last is GPTQ's
        return x.reshape(n)
    _expect(x, shape, *([shape[:1]] if shape[1] == 1 else []))
    x = x.reshape(shape)
    for axis, length in ((0, n), (1, k)):
        x = _regrouped(x, axis, length, quant, own)
    return x


def _scale_numbers(x: Tensor, quant: Quant, dtype: torch.dtype) -> Tensor:
    """Return scales in the parameter's dtype; check that they are finite and have an allowed sign.

    Blocks of zeros may have an e4m3 scale of 0. Scales of integers may also be 0 (by underflow) or
    negative: AutoRound gives the element of the largest magnitude the code -8.
    """
    if quant.scale == "e8m0":
        _expect_dtype(x, *_BYTE_EXPONENTS)
        x = x.view(torch.uint8)
        good, rule = x != 255, "finite"
    elif quant.scale == "e4m3":
        _expect_dtype(x, torch.float8_e4m3fn)
        good, rule = x.float().isfinite() & (x.float() >= 0), "finite and not negative"
    else:
        # Tools store fp8 scales as exponents too; beside integers, exponents would mean MXFP4.
        exponents = _BYTE_EXPONENTS if quant.element.name == "fp8" else ()
        _expect_dtype(x, *FLOATS, *exponents)
        x = (e8m0_value(x) if x.dtype in exponents else x).to(dtype)
        good, rule = x.isfinite(), "finite"
        if quant.scale != "input":
            good, rule = good & (x > 0), "finite and positive"
        if quant.scale == "pow2" and good.all():
            good, rule = x.view(torch.int32) & 0x7FFFFF == 0, "powers of two"
    if not good.all():
        raise ValueError(f"scales must be {rule}, got {int((~good).sum())} that are not")
    return x


def _regrouped(x: Tensor, axis: int, length: int, quant: Quant, own: Quant) -> Tensor:
    """Repeat scales along ``axis`` if the layer's blocks are smaller; merge equal ones if larger.

    Raises:
        ValueError: scales that differ within a block of the layer.
    """
    old, new = quant.group[axis], own.group[axis]
    if old == new or WHOLE in (old, new):
        return x
    if old < new:
        merged = x[(slice(None),) * axis + (slice(None, None, new // old),)]
        if not torch.equal(_regrouped(merged, axis, length, own, quant), x):
            raise ValueError(f"scales of blocks of {old} must be equal within blocks of {new}")
        return merged
    return x.repeat_interleave(old // new, axis).narrow(axis, 0, cdiv(length, new))


def _zero_point(x: Tensor, suffix: str, form: Form) -> Tensor:
    n, (quant, own) = form.n, form.quants("zero points", x)
    bits, groups = quant.element.stored_bits, quant.weight_scale_shape(1, n, form.k)[2]
    per_word = 32 // bits
    if suffix == "qzeros":
        _expect_dtype(x, torch.int32)
        _expect(x, (groups, n // per_word))
        if form.layout.awq is None:
            raise ValueError(
                "qzeros must come with a layout that says awq (load_checkpoint), got none"
            )
        if form.layout.awq:
            x = awq_codes(x, bits).t()
        else:  # zero point 0 less one wraps to the largest code
            x = _words(x, bits).t() + int(form.layout.zeros_plus_one is not False) & 2**bits - 1
    elif x.dtype == torch.int32:
        _expect(x, (cdiv(n, per_word), groups))
        x = _words(x.t(), bits).t()[:n]
    elif x.dtype == torch.int8:  # unpacked and signed
        _expect(x, (n, groups))
        x = (x.int() + quant.element.offset).to(torch.uint8)
    else:
        _expect_dtype(x, torch.uint8)
        pairs = [(cdiv(n, 2), groups)] if bits == 4 else []
        _expect(x, (n, groups), *pairs)
        if tuple(x.shape) != (n, groups):
            x = torch.stack((x & 15, x >> 4), 1).flatten(0, 1)[:n]
    return _regrouped(x, 1, form.k, quant, own)


def check_symmetric(words: Tensor, offset: int, layout: CheckpointLayout) -> None:
    """Check that zero points of a symmetric scheme are the offset; GPTQ may store one less.

    Raises:
        ValueError: other zero points.
    """
    values = words.contiguous().flatten().view(torch.uint8)
    codes = torch.stack((values & 15, values >> 4)) if offset == 8 else values
    offsets = [offset]
    if layout.zeros_plus_one is not False and not layout.awq:
        offsets.append(offset - 1)
    if not any(bool((codes == number).all()) for number in offsets):
        raise ValueError(f"zero points must all be {offset} for a scheme without them")


def _multiplier(x: Tensor, suffix: str, form: Form) -> Tensor:
    """Return one number that multiplies, also if the checkpoint stores its reciprocal."""
    _expect_dtype(x, *FLOATS)
    value = _single(x).to(form.dtype)
    if suffix in DIVISORS:
        value = 1 / value
    if not (value.isfinite() and value > 0):
        raise ValueError(f"the scale must be positive and finite, got {x.item()}")
    return value


def _channel_scale(x: Tensor, suffix: str, form: Form) -> Tensor:
    _expect_dtype(x, *FLOATS)
    _expect(x, (form.n,), (form.n, 1))
    x = x.to(form.dtype)
    if not x.isfinite().all():
        raise ValueError(f"scales must be finite, got {int((~x.isfinite()).sum())} that are not")
    return x.reshape(form.n)


def _single(x: Tensor) -> Tensor:
    if x.numel() != 1:
        raise ValueError(f"shape must be that of one number, got {tuple(x.shape)}")
    return x.reshape(())


def _bias(x: Tensor, suffix: str, form: Form) -> Tensor:
    _expect_dtype(x, *FLOATS)
    _expect(x, (form.n,))
    return within(x, form.dtype)


_RULES = {
    "weight": _weight,
    "scale": _scale,
    "zero_point": _zero_point,
    "global_scale": _multiplier,
    "channel_scale": _channel_scale,
    "input_scale": _multiplier,
    "bias": _bias,
}

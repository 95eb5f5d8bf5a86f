"""Triton's interpreter, mended: bf16 and fp8 values behave as on the GPU.

The interpreter keeps bf16 as uint16 and fp8 as uint8 bit patterns. It multiplies those patterns in
`tl.dot`, truncates float32 -> bf16, and rounds float32 -> fp8 wrongly. Here conversions go through
torch (round to nearest even; fp8 saturates, as the hardware's satfinite conversions do), and
arithmetic on bf16 runs in float32 and is rounded back. Products of float32 lose what TF32 does,
unless they ask for IEEE.

Only for processes started with TRITON_INTERPRET=1: `install` also registers the Triton launchers
for CPU tensors, so that every operator runs its kernel.
"""

from __future__ import annotations

import importlib

import numpy as np
import quick_interpreter
import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

from moe_ops.scheme.formats import code_values, split_nibbles
from moe_ops.scheme.values import ELEMENTS

BITS = {
    tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8, np.uint8),
}
PLAIN = {tl.float16: torch.float16, tl.float32: torch.float32, tl.float64: torch.float64}
LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}


def _to_float(data: np.ndarray, dtype: tl.dtype) -> torch.Tensor:
    if dtype in BITS:
        real, bits, _ = BITS[dtype]
        signed = np.int16 if bits is torch.int16 else np.uint8
        return torch.from_numpy(np.ascontiguousarray(data).view(signed)).view(real).float()
    return torch.from_numpy(np.ascontiguousarray(data))


def _from_float(value: torch.Tensor, dtype: tl.dtype) -> np.ndarray:
    if dtype in BITS:
        real, bits, stored = BITS[dtype]
        if dtype in LARGEST:
            value = value.float().clamp(-LARGEST[dtype], LARGEST[dtype])
        return value.to(real).view(bits).numpy().view(stored)
    return value.to(PLAIN[dtype]).numpy()


def _patch_casts(builder: type) -> None:
    """Casts of bf16 and fp8 through torch: Triton 3.6 to 3.9 do not round to the nearest."""
    cast, fp_to_fp = builder.cast_impl, builder.create_fp_to_fp

    def convert(src, dst_type, otherwise):
        source, target = src.dtype.scalar, dst_type.scalar
        if source in BITS or target in BITS:
            value = _to_float(src.data, source)
            if target in BITS or target in PLAIN:
                return interpreter.TensorHandle(_from_float(value, target), target)
            as_float = interpreter.TensorHandle(value.numpy(), tl.float32)  # bf16 -> an integer
            return cast(builder_of[0], as_float, dst_type)
        return otherwise()

    builder_of = [None]

    def cast_impl(self, src, dst_type):
        builder_of[0] = self
        return convert(src, dst_type, lambda: cast(self, src, dst_type))

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        builder_of[0] = self
        return convert(src, dst_type, lambda: fp_to_fp(self, src, dst_type, rounding_mode))

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp


def _float32(handle):
    if handle.dtype.scalar not in BITS:
        return handle
    return interpreter.TensorHandle(_to_float(handle.data, handle.dtype.scalar).numpy(), tl.float32)


def tf32(x: np.ndarray) -> np.ndarray:
    """float32 as TF32 matrix units read it: 10 bits of mantissa, the rest cut off."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _operand(handle, precision):
    """An operand of a product as matrix units read it."""
    if handle.dtype.scalar == tl.float32 and precision == ir.INPUT_PRECISION.TF32:
        return interpreter.TensorHandle(tf32(handle.data), handle.dtype)
    return _float32(handle)


def _patch_arithmetic(builder: type) -> None:
    """Arithmetic of bf16 and fp8 in float32: Triton 3.6 to 3.9 compute with the bits."""
    dot, binary, unary = builder.create_dot, builder.binary_op, builder.unary_op

    def create_dot(self, a, b, d, *rest):
        """Row by row: numpy's BLAS, unlike matrix units, adds by a row's place in the tile."""
        a, b = _operand(a, rest[0]), _operand(b, rest[0])
        rows, sums = (interpreter.TensorHandle(h.data[:, None], h.dtype) for h in (a, d))
        product = dot(self, rows, b, sums, *rest)
        return interpreter.TensorHandle(product.data[:, 0], product.dtype)

    def rounded(result, operand):
        if result.data.dtype == np.bool_:
            result.dtype = tl.int1  # the operands' type, of which Triton 3.9 refuses masks
            return result
        if operand.dtype.scalar not in BITS:
            return result
        narrow = operand.dtype.scalar
        value = torch.from_numpy(np.asarray(result.data, dtype=np.float32))
        return interpreter.TensorHandle(_from_float(value, narrow), narrow)

    def binary_op(self, lhs, rhs, op):
        return rounded(binary(self, _float32(lhs), _float32(rhs), op), lhs)

    def unary_op(self, arg, op):
        return rounded(unary(self, _float32(arg), op), arg)

    builder.create_dot, builder.binary_op, builder.unary_op = create_dot, binary_op, unary_op


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """``x * y + z`` of float32, rounded once: float64 holds products, and sums rounded to odd."""
    product, z = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)
    inexact = np.isfinite(total) & (error != 0) & (total.view(np.int64) % 2 == 0)
    total = np.where(inexact, np.nextafter(total, np.copysign(np.inf, error)), total)
    return total.astype(np.float32)


def _patch_fma(builder: type) -> None:
    """Round sums of products once: Triton 3.6 to 3.8 round twice."""
    twice = builder.create_fma

    def create_fma(self, x, y, z):
        if z.dtype.scalar != tl.float32:
            return twice(self, x, y, z)
        with np.errstate(all="ignore"):
            return interpreter.TensorHandle(fma(x.data, y.data, z.data), tl.float32)

    builder.create_fma = create_fma


def _patch_maxima(builder: type) -> None:
    """Extremes of a NaN and a number are the number, unless NaN is asked for (fixed in 3.8)."""
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)


def _patch_constants() -> None:
    """A constant and a tensor make a tensor: Triton 3.7 to 3.9 see a constant in it."""
    operators = "add sub mul truediv floordiv mod and or xor lshift rshift eq ne lt le gt ge"

    def deferring(method):
        def patched(self, other):
            return NotImplemented if isinstance(other, tl.tensor) else method(self, other)

        return patched

    for name in (f"__{operator}__" for operator in operators.split()):
        setattr(tl.constexpr, name, deferring(getattr(tl.constexpr, name)))


def _patch_loop_bounds() -> None:
    """Run-time loop bounds under numpy >= 2.4 (fixed in Triton 3.7)."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched


def _patch_scaled_products() -> None:
    """`tl.dot_scaled`: numbers times scales, exact, added up in float32.

    Triton 3.6 and 3.7 have none; 3.8 and 3.9 read scales in e4m3 as powers of two.
    """

    def dot_scaled(self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, acc, *rest):
        x = _scaled(lhs, lhs_scale, lhs_format)
        y = _scaled(self.permute(rhs, (1, 0)), rhs_scale, rhs_format)
        value = (torch.from_numpy(acc.handle.data) + x @ y.t()).numpy()
        return tl.tensor(interpreter.TensorHandle(value, tl.float32), acc.type)

    interpreter.TritonSemantic.dot_scaled = dot_scaled


def _scaled(operand: tl.tensor, scale: tl.tensor, form: str) -> torch.Tensor:
    """The numbers of an operand (rows, K) times the scales of its groups, in float32."""
    codes = torch.from_numpy(np.ascontiguousarray(operand.handle.data).view(np.uint8))
    scales = torch.from_numpy(np.ascontiguousarray(scale.handle.data).view(np.uint8))
    if form == "e2m1":
        numbers = code_values(split_nibbles(codes, 1), ELEMENTS["fp4"])
    else:
        numbers = codes.view(torch.float8_e4m3fn).float()
    in_e4m3 = scale.dtype.scalar == tl.float8e4nv
    factor = scales.view(torch.float8_e4m3fn if in_e4m3 else torch.float8_e8m0fnu).float()
    group = 16 if in_e4m3 else 32
    if numbers.shape[1] != group * factor.shape[1]:
        raise ValueError(f"{tuple(factor.shape)} scales for {tuple(numbers.shape)} numbers")
    return numbers * factor.repeat_interleave(group, 1)


def install() -> torch.library.Library:
    """Mend the interpreter and run every operator's Triton launcher on CPU tensors.

    The reference is back once the returned library is destroyed.
    """
    from moe_ops.ops import STAGES

    _patch_casts(interpreter.InterpreterBuilder)
    _patch_arithmetic(interpreter.InterpreterBuilder)
    if _version() < (3, 9):
        _patch_fma(interpreter.InterpreterBuilder)
    if _version() < (3, 8):
        _patch_maxima(interpreter.InterpreterBuilder)
    _patch_constants()
    if _version() < (3, 7):
        _patch_loop_bounds()
    _patch_scaled_products()
    quick_interpreter.install()
    library = torch.library.Library("moe_ops", "IMPL")
    for qualified, stage in STAGES.items():
        module = importlib.import_module(f"moe_ops.kernels.{stage}")
        library.impl(qualified, getattr(module, qualified.replace(".", "_")), "CPU")
    return library


def _version() -> tuple[int, int]:
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)

"""Triton's interpreter, quicker: the same values in three quarters of the time.

Most of the time of a kernel's test goes into questions of types and shapes whose answers repeat.
What `interpreter.py` mends changes values; what stands here changes none. All of it is for the
interpreters of Triton 3.6 to 3.9.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

INTEGERS = {tl.int1, tl.int8, tl.int16, tl.int32, tl.int64}
UNSIGNED = {tl.uint8, tl.uint16, tl.uint32, tl.uint64}
FLOATS = {tl.float16, tl.bfloat16, tl.float32, tl.float64}
WIDE = {id(dtype) for dtype in (*INTEGERS, *UNSIGNED, tl.float32)}
"""Types that every operator computes in, by identity: hashing a type takes longer."""
NUMPY = {id(tl.int32): np.int32, id(tl.int64): np.int64, id(tl.float32): np.float32}
"""numpy's types of those that are computed in one step, by identity."""
SHAPES: dict[tuple[int, int], Any] = {}
"""The shape that two shapes make, by their identity: see `_patch_lazy_types`."""
NARROW = {id(tl.float16), id(tl.bfloat16)}
"""Types that are computed in float32 where they are divided."""


def _skip_overflow_checks() -> None:
    """Compute no sum twice: without its debug mode the interpreter drops what the check says."""
    builder = interpreter.interpreter_builder
    if builder.options.debug:
        raise RuntimeError("overflow checks are of use in debug mode")
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_numpy_types() -> None:
    """Look dtypes up in one table: the interpreter makes a dictionary of all of them each time."""
    numpy_type = functools.cache(interpreter._get_np_dtype)
    pointer = np.dtype(np.uint64)

    def get_np_dtype(dtype: tl.dtype) -> np.dtype:
        scalar = dtype.scalar
        return pointer if scalar.is_ptr() else numpy_type(scalar)

    interpreter._get_np_dtype = get_np_dtype


def _patch_handles() -> None:
    """Compare the sizes of a handle's numbers and of their type in one step."""
    handle, check = interpreter.TensorHandle, interpreter.TensorHandle.__post_init__
    sizes = {id(dtype): dtype.primitive_bitwidth // 8 for dtype in (*INTEGERS, *UNSIGNED, *FLOATS)}
    sizes[id(tl.int1)] = 1

    def check_size(self):
        if self.data.itemsize > sizes.get(id(self.dtype), 0):
            check(self)

    handle.__post_init__ = check_size


def _patch_lazy_types() -> None:
    """Name a block's type, and type a tuple, when somebody asks: for most values nobody does.

    Shapes are few: blocks of one shape, and their types, share it. By its identity it is found in
    half the time.
    """
    core = tl.core

    @functools.lru_cache(maxsize=None, typed=True)  # a size of 4.0 is no size
    def sizes_of_type(*shape):
        sizes = core.tuple(shape)
        entry = sizes, core.validate_block_shape(sizes), sizes_of_tensor(*shape)
        by_identity[id(sizes)] = by_identity[id(entry[2][0])] = entry
        return entry

    @functools.cache
    def sizes_of_tensor(*shape):
        return core.tuple([core.constexpr(s) for s in shape]), core.constexpr(math.prod(shape))

    by_identity = {}

    def init_block_type(self, element_ty, shape):
        entry = by_identity.get(id(shape))
        self.element_ty = element_ty
        self.shape, self.numel, self.of_tensor = entry or sizes_of_type(
            *map(core._unwrap_if_constexpr, shape)
        )

    def init_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else of_scalar

    def init_tuple(self, args, type=None):
        self.values = list(args)
        known = type is None or isinstance(type, core.tuple_type)
        self._type = type if known else core.tuple_type(type)

    def type_of_tuple(self):
        if self._type is None:
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    core.block_type.__init__ = init_block_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = init_tensor
    core.tuple.__init__ = init_tuple
    core.tuple.type = property(type_of_tuple, lambda self, type: setattr(self, "_type", type))
    of_scalar = sizes_of_tensor()  # made last: Triton 3.9 asks it for its type


def _patch_common_cases() -> None:
    """Return at once what is no constant, what is a tensor or of a type, and that a type is itself.

    Such questions took a fifth of the time.
    """
    core, semantic = tl.core, interpreter.TritonSemantic
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    convert, make = semantic.cast, semantic.to_tensor
    types = (core.tensor, core.dtype, core.block_type, core.pointer_type)
    plain = {int, float, bool, str, type(None), *types}

    def unwrap_if_constexpr(o):
        kind = type(o)
        if kind in plain:
            return o
        return o.value if kind is core.constexpr else unwrap(o)

    def dtype_eq(self, other):
        return self is other or equal(self, other)

    def cast(self, input, dst_ty, fp_downcast_rounding=None):
        if input.dtype is dst_ty:
            return input
        return convert(self, input, dst_ty, fp_downcast_rounding)

    def to_tensor(self, x, check_type=True):
        return x if type(x) is core.tensor else make(self, x, check_type)

    def patch_attr(obj, name, member, builder, scope):
        """Call the function itself: its wrapper checks for the argument that is passed here."""
        function, own = getattr(member, "__wrapped__", member), semantic(builder)

        def called(*args, _semantic=None, **kwargs):
            return function(*args, **kwargs, _semantic=own)

        scope.set_attr(obj, name, called)

    semantic.cast, semantic.to_tensor = cast, to_tensor
    interpreter._patch_attr = patch_attr
    core._unwrap_if_constexpr = unwrap_if_constexpr
    core.dtype.__eq__ = dtype_eq


def _patch_shapes() -> None:
    """Remember which shape two shapes make: the interpreter goes through them axis by axis."""
    semantic, core = interpreter.TritonSemantic, tl.core
    broadcast = semantic.broadcast_impl_value

    def spread(self, x, shape):
        if x.shape is shape:
            return x
        whole = core.block_type(x.dtype, shape)
        if x.type.is_block():
            sizes = [size.value for size in shape]
            return self.tensor(self.builder.create_broadcast(x.handle, sizes), whole)
        return self.tensor(self.builder.create_splat(whole, x.handle), whole)

    def broadcast_impl_value(self, lhs, rhs):
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = (id(lhs.shape), id(rhs.shape))
        if key not in SHAPES:
            lhs, rhs = broadcast(self, lhs, rhs)
            SHAPES[key] = lhs.shape
        return spread(self, lhs, SHAPES[key]), spread(self, rhs, SHAPES[key])

    semantic.broadcast_impl_value = broadcast_impl_value


def _keeps(one: tl.dtype, other: tl.dtype, pointers: bool, division: bool) -> bool:
    """Whether an operator takes operands of these types without a conversion."""
    if one is other:
        return id(one) in WIDE or not division and id(one) in NARROW
    return pointers and type(one) is tl.pointer_type and other in INTEGERS


def _patch_operands() -> None:
    """Take operands of one type as they are, and remember numbers as tensors.

    The interpreter derives the type of each result, and makes one tensor of a number and then
    another of that type: a fifth of the time.
    """
    core, semantic = tl.core, interpreter.TritonSemantic
    checked, constants = semantic.binary_op_type_checking_impl, {}

    def constant(self, number, like):
        """The number as a tensor of the type of ``like``; as it is where rules ask for its size."""
        dtype, whole = like.dtype, type(number) is int and -(2**31) <= number < 2**31
        if not (dtype is tl.float32 or whole and (dtype is tl.int32 or dtype is tl.int64)):
            return number
        key = (number, type(number), id(dtype), id(like.shape))
        if key not in constants:
            alone = self.scalar_constant(number, dtype)
            constants[key] = self.broadcast_impl_value(like, alone)[1]
            constants[key].handle.data.flags.writeable = False
        return constants[key]

    def as_tensors(self, lhs, rhs, arithmetic):
        if type(lhs) is core.tensor and type(rhs) in (int, float):
            return lhs, constant(self, rhs, lhs) if arithmetic or lhs.dtype is tl.int32 else rhs
        if type(rhs) is core.tensor and type(lhs) in (int, float) and arithmetic:
            return constant(self, lhs, rhs), rhs
        return lhs, rhs

    def check(self, lhs, rhs, lhs_ptr=False, rhs_ptr=False, arithmetic=True, division=False):
        x, y = as_tensors(self, lhs, rhs, arithmetic)
        if type(x) is type(y) is core.tensor and _keeps(x.dtype, y.dtype, lhs_ptr, division):
            return self.broadcast_impl_value(x, y)
        return checked(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic, division)

    semantic.binary_op_type_checking_impl = check


def _patch_reductions() -> None:
    """Combine whole slices along the axis, in its order.

    The interpreter calls the function once for every number: a third of the time of tests that
    sort.
    """

    def generic_reduce(self, input):
        parts, axis = self.unravel(input, self.axis)
        dtypes = [part.dtype for part in parts]
        slices = [np.moveaxis(part.handle.data, axis, 0) for part in parts]
        shape = slices[0].shape[1:]

        def numbers(value):
            data = value.handle.data if isinstance(value, tl.tensor) else np.asarray(value)
            return np.broadcast_to(data, shape) if shape else data.reshape(-1)[0]

        def tensors(values):
            return tuple(map(self.to_tensor, values, dtypes))

        total = tensors(x[0] for x in slices)
        for i in range(1, len(slices[0])):
            found = self.combine_fn.fn(*total, *tensors(x[i] for x in slices))
            total = tensors(map(numbers, found if isinstance(found, tuple) else (found,)))
        results = map(numbers, total)
        return [*tensors(np.expand_dims(x, axis) if self.keep_dims else x for x in results)]

    interpreter.ReduceOps.generic_reduce = generic_reduce


def _patch_language_once() -> None:
    """Patch `triton.language` for good, not in every call of a kernel or a function of one.

    The interpreter looks through all members of five modules each time, which took half the time
    of these tests.
    """
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda fn: nothing


@functools.lru_cache(maxsize=None, typed=True)
def _array(number: float, dtype: type) -> np.ndarray:
    return np.array([number], dtype=dtype)


def _data_of(other: Any, like: tl.tensor) -> np.ndarray | None:
    """What numpy computes with; None if the operand becomes one of another type, or raises."""
    kind, dtype = type(other), like.dtype
    if kind is tl.tensor:
        known = other.shape is like.shape or (id(like.shape), id(other.shape)) in SHAPES
        return other.handle.data if other.dtype is dtype and known else None
    whole = kind is int and -(2**31) <= other < 2**31
    if whole or kind is float and dtype is tl.float32:
        return _array(other, NUMPY[id(dtype)]) if id(dtype) in NUMPY else None
    return None


def _patch_operators() -> None:
    """Compute ``x + y`` of int32, int64 or float32, and its like, in one step.

    The interpreter takes ten calls for it. Operands of other types, or of types that differ, take
    the way that has been patched so far.
    """
    core, handle = tl.core, interpreter.TensorHandle
    bits = {id(tl.int1), id(tl.int32), id(tl.int64)}

    def patch(name, compute, types, swapped=False, compares=False):
        slow = getattr(core.tensor, name)

        def operator(self, other):
            data = _data_of(other, self) if id(self.dtype) in types else None
            if data is None:
                return slow(self, other)
            mine = self.handle.data
            result = compute(data, mine) if swapped else compute(mine, data)
            dtype, type_ = self.dtype, self.type
            shape = getattr(other, "shape", self.shape)
            if shape is not self.shape:
                type_ = core.block_type(dtype, SHAPES[id(self.shape), id(shape)])
            if compares:
                dtype = tl.int1
                type_ = core.block_type(dtype, type_.shape) if type_.is_block() else dtype
            return core.tensor(handle(result, dtype), type_)

        setattr(core.tensor, name, operator)

    for name, compute in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        patch(f"__{name}__", compute, NUMPY)
        patch(f"__r{name}__", compute, NUMPY, swapped=True)
    for name, compute in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        patch(f"__{name}__", compute, bits)
        patch(f"__r{name}__", compute, bits, swapped=True)
    comparisons = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    for name, compute in {**comparisons, "eq": np.equal, "ne": np.not_equal}.items():
        patch(f"__{name}__", compute, NUMPY, compares=True)


def _patch_pointers() -> None:
    """Add offsets to pointers in one step, too."""
    core, slow = tl.core, tl.core.tensor.__add__

    def add(self, other):
        if type(self.dtype) is not core.pointer_type or type(other) is not core.tensor:
            return slow(self, other)
        shape = self.shape
        if other.shape is not shape:
            shape = SHAPES.get((id(shape), id(other.shape)))
        if shape is None or not (other.dtype is tl.int32 or other.dtype is tl.int64):
            return slow(self, other)
        at = self.handle
        size = max(1, at.get_element_ty().primitive_bitwidth // 8)
        data = at.data + size * other.handle.data.astype(np.uint64)
        whole = self.type if shape is self.shape else core.block_type(self.dtype, shape)
        return core.tensor(interpreter.TensorHandle(data, at.dtype), whole)

    core.tensor.__add__ = add


def install() -> None:
    """Patch the interpreter of this process, after what mends it."""
    _skip_overflow_checks()
    _patch_numpy_types()
    _patch_handles()
    _patch_lazy_types()
    _patch_common_cases()
    _patch_shapes()
    _patch_operands()
    _patch_reductions()
    _patch_language_once()  # it takes what is patched so far
    _patch_operators()
    _patch_pointers()

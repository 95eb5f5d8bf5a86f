"""Runs the Gluon kernels of `moe_ops.kernels._hopper` on the CPU.

Triton's interpreter does not know Gluon. Here a kernel's own Python runs on torch tensors: every
function that it calls is copied with globals of its own, in which Gluon's language means what is
below. Each partition of a warp-specialised kernel is a thread, which runs until it waits for a
barrier. Barriers in shared memory count arrivals and bytes as the hardware does, so that a wrong
count of bytes hangs (and fails) here too. Layouts mean nothing here: compiling for sm_90 checks
them.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from gluon_values import (
    TURN,
    Barrier,
    Barriers,
    Pointer,
    Shared,
    Value,
    as_slot,
    plain,
    torch_dtype,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from moe_ops.kernels._runtime import launch

LOCAL = threading.local()
"""The program that this thread runs: its number, and the number of programs; the threads of its
partition; and what has failed in partitions of the program."""


def load(pointer: Any, mask: Any = None, other: Any = 0, **how: Any) -> Value:
    if not isinstance(pointer, Pointer):
        raise TypeError(f"load needs a pointer, got {pointer!r}")
    offset = torch.as_tensor(pointer.offset)
    inside = torch.ones_like(offset, dtype=torch.bool)
    if mask is not None:
        inside, offset = torch.broadcast_tensors(torch.as_tensor(plain(mask)), offset)
    used = offset[inside]
    assert used.numel() == 0 or (used.min() >= 0 and used.max() < pointer.memory.numel())
    found = torch.full(offset.shape, plain(other), dtype=pointer.memory.dtype)
    found[inside] = pointer.memory[used.long()]
    return Value(found)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    parts = [torch.as_tensor(pointer.offset), torch.as_tensor(plain(value))]
    parts += [torch.as_tensor(True if mask is None else plain(mask))]
    offset, value, inside = torch.broadcast_tensors(*parts)
    used = offset[inside]
    assert used.numel() == 0 or (used.min() >= 0 and used.max() < pointer.memory.numel())
    pointer.memory[used.long()] = value[inside].to(pointer.memory.dtype)


def atomic_add(pointer: Pointer, value: Any, sem: str = "") -> Value:
    old = pointer.memory[pointer.offset].clone()
    pointer.memory[pointer.offset] += plain(value)
    return Value(old)


def inline_asm(
    asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int
) -> Value:
    if asm.startswith("{"):  # one lane in both
        word = args[0].data
        lane = word >> 16 if asm.endswith("{odd, odd};}") else word
        return Value((lane & 0xFFFF) | (lane << 16))
    name, *kinds = asm.split()[0].split(".")
    if name == "prmt":
        assert asm.endswith(" $1, 0, 0x4140;"), "two bytes as lanes"
        return Value((args[0].data & 0xFF) | ((args[0].data & 0xFF00) << 8))
    if name == "lop3":
        word, mask, bits = (a.data for a in args)
        tables = {
            "0xEA;": (word & mask) | bits,
            "0x6A;": (word & mask) ^ bits,
            "0xE2;": (word & mask) | (bits & ~mask),
        }
        return Value(tables[asm.split()[-1]])
    lanes = LANES[kinds[-1]]
    x, y, *z = (a.data.contiguous().view(lanes) for a in args)
    if name == "fma":  # exact in float64, but for the last rounding
        return Value((x.double() * y.double() + z[0].double()).to(lanes).view(torch.int32))
    done = {"mul": torch.mul, "sub": torch.sub}[name](x.float(), y.float())
    return Value(done.to(lanes).view(torch.int32))


LANES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
"""Dtypes of the lanes of a word, as PTX names them."""


def allocate(dtype: Any, shape: Any, layout: Any = None, value: Any = None) -> Any:
    if isinstance(layout, Barriers):
        return Barriers(math.prod(shape))
    return Shared(torch.zeros(tuple(shape), dtype=torch_dtype(dtype)))


def box_of(desc: Any, at: Any) -> torch.Tensor:
    """The box of a TMA descriptor; zeros outside of the tensor."""
    memory = memory_of(desc.base, desc.shape, desc.strides)
    found = torch.zeros(desc.block_shape, dtype=memory.dtype)
    source, target = [], []
    for first, length, size in zip(at, desc.block_shape, desc.shape, strict=True):
        first = int(first)
        inside = max(0, min(size - first, length)) if first >= 0 else 0
        source.append(slice(first, first + inside))
        target.append(slice(0, inside))
    found[tuple(target)] = memory[tuple(source)]
    return found


def memory_of(base: Any, shape: Any, strides: Any) -> torch.Tensor:
    """The tensor at an address."""
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    buffer = (ctypes.c_char * (count * base.dtype.itemsize)).from_address(base.data_ptr())
    return torch.frombuffer(buffer, dtype=base.dtype).as_strided(tuple(shape), tuple(strides))


def load_box(desc: Any, at: Any, barrier: Any, to: Shared, pred: Any = True) -> None:
    if bool(pred):
        found = box_of(desc, at)
        assert to.data.storage_offset() * to.data.element_size() % 128 == 0, "TMA aligns to 128"
        to.data.copy_(found.view(to.data.shape))
        as_slot(barrier).barrier.update(0, -found.numel() * found.element_size())


def expect(barrier: Any, nbytes: Any, pred: Any = True) -> None:
    if bool(pred):
        as_slot(barrier).barrier.update(0, int(nbytes))
        as_slot(barrier).barrier.update(1, 0)


def load_rows(to: Shared, pointer: Pointer, mask: Any = None) -> None:
    to.data.copy_(load(pointer, mask).data)


def product(a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    inside = torch.float32
    if torch.int8 in (a.data.dtype, b.data.dtype):  # sums in int32 alone, as the hardware has them
        assert a.data.dtype == b.data.dtype and acc.data.dtype == torch.int32
        inside = torch.int32
    done = a.data.to(inside) @ b.data.to(inside)
    return Value(acc.data + done if use_acc else done)


def product_of_warps(a: Value, b: Value, acc: Value) -> Value:
    return Value(acc.data + a.data.float() @ b.data.float())


def wait_for_products(outstanding: int, deps: Any) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def specialize(partitions: Any, warps: Any, registers: Any) -> None:
    """Run every partition in a thread of its own; they take turns, see `TURN`."""
    program, failures = LOCAL.program, []

    def run(function: Any, arguments: Any, threads: int) -> None:
        LOCAL.program, LOCAL.threads, LOCAL.failures = program, threads, failures
        try:
            with TURN:
                function(*arguments)
        except BaseException as failure:  # noqa: BLE001
            failures.append(failure)

    counts = [32 * count for count in (4, *warps)]  # launches have four warps
    threads = [
        threading.Thread(target=run, args=(*part, count), daemon=True)
        for part, count in zip(partitions, counts, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _unary(function: Any) -> Any:
    return lambda x: Value(function(torch.as_tensor(plain(x))))


def _binary(function: Any) -> Any:
    def compute(x: Any, y: Any, **how: Any) -> Value:
        return Value(function(torch.as_tensor(plain(x)), torch.as_tensor(plain(y))))

    return compute


def _where(condition: Any, x: Any, y: Any) -> Value:
    parts = [torch.as_tensor(plain(part)) for part in (condition, x, y)]
    return Value(torch.where(*parts))


def _broadcast(x: Value, y: Value) -> tuple[Value, Value]:
    both = torch.broadcast_tensors(x.data, y.data)
    return Value(both[0]), Value(both[1])


def _assert(condition: Any, message: str = "") -> None:
    assert condition, message


def _fma(x: Value, y: Any, z: Value) -> Value:
    """float32 ``x * y + z``; float64 holds the product, and rounds the sum far below float32."""
    a, b, c = (torch.as_tensor(plain(part)).double() for part in (x, y, z))
    return Value((a * b + c).float())


def _full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Value:
    dtype = torch_dtype(dtype)
    return Value(torch.as_tensor(plain(value)).to(dtype).expand(tuple(shape)).clone())


LANGUAGE = SimpleNamespace(
    **{name: getattr(gluon_language, name) for name in (
        "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "float16", "bfloat16",
        "float32", "float8e4nv",
    )},
    constexpr=lambda x: x,
    program_id=lambda axis: Value(torch.tensor(LOCAL.program[0])),
    num_programs=lambda axis: Value(torch.tensor(LOCAL.program[1])),
    to_tensor=lambda x: x if isinstance(x, Value) else Value(torch.as_tensor(x)),
    arange=lambda start, end, layout=None: Value(torch.arange(start, end)),
    full=_full,
    static_range=range,
    load=load, store=store, atomic_add=atomic_add,
    where=_where, minimum=_binary(torch.minimum), maximum=_binary(torch.maximum),
    PropagateNan=triton.language.PropagateNan,
    static_assert=_assert, erf=_unary(torch.erf), math=SimpleNamespace(erf=_unary(torch.erf)),
    cdiv=lambda x, y: -(-x // y),
    div_rn=_binary(torch.true_divide), fma=_fma,
    exp=_unary(torch.exp), abs=_unary(torch.abs), sigmoid=_unary(torch.sigmoid),
    max=lambda x, axis=0: Value(x.data.max(axis).values if x.data.dim() else x.data),
    sum=lambda x, axis: Value(x.data.sum(axis)),
    join=lambda x, y: Value(torch.stack((x.data, y.data), -1)),
    expand_dims=lambda x, axis: Value(x.data.unsqueeze(axis)),
    broadcast=_broadcast,
    convert_layout=lambda x, layout, assert_trivial=False: x,
    inline_asm_elementwise=inline_asm,
    allocate_shared_memory=allocate,
    warp_specialize=specialize,
    thread_barrier=lambda: None, barrier=lambda: None,
    **{name: lambda *args, **how: None for name in (
        "BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "NVMMASharedLayout",
        "NVMMADistributedLayout", "DotOperandLayout", "DistributedLinearLayout",
    )},
)  # fmt: skip
"""Gluon's language."""
MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: Barriers(0),
    init=lambda slot, count: as_slot(slot).put(Barrier(count)),
    wait=lambda slot, phase: as_slot(slot).barrier.wait(int(phase) & 1, LOCAL.failures),
    arrive=lambda slot, count=1: as_slot(slot).barrier.update(count, 0),
    expect=expect,
)


def copies_arrive(slot: Any, increment_count: bool) -> None:
    """Each thread of the copying partition arrives."""
    as_slot(slot).barrier.update(LOCAL.threads, 0)


MEANINGS: dict[str, Any] = {
    "gl": LANGUAGE, "mbarrier": MBARRIER, "load_box": load_box, "load_rows": load_rows,
    "async_copy": SimpleNamespace(
        mbarrier_arrive=copies_arrive, commit_group=lambda: None, wait_group=lambda count: None
    ),
    "mma_v2": product_of_warps, "warpgroup_mma": product, "warpgroup_mma_wait": wait_for_products,
    "warpgroup_mma_init": lambda x: x, "fence_async_shared": lambda: None,
    "take_turn": lambda LONG=False, ROOM=False: None, "gdc_wait": lambda: None,
    "gdc_launch_dependents": lambda: None,
    "wait_for_group": lambda: None, "reinterpret": Shared.reinterpret,
}  # fmt: skip
"""What names mean in a kernel's functions, besides their own functions and constants."""


def translated(value: Any, known: dict[int, Any]) -> Any:
    """A global of a kernel's function, as this interpreter runs it."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, gluon_language.constexpr):
        return value.value
    if getattr(value, "__triton_aggregate__", False):
        return _aggregate(value, known)
    raw = getattr(value, "fn", None)
    if isinstance(value, JITFunction) or (
        raw is not None and callable(value) and isinstance(raw, FunctionType)
    ):
        return _function(value, raw, known)
    return value


def _function(value: Any, raw: FunctionType, known: dict[int, Any]) -> Any:
    names: dict[str, Any] = {}
    copy = FunctionType(raw.__code__, names, raw.__name__, raw.__defaults__, raw.__closure__)
    copy.__kwdefaults__ = raw.__kwdefaults__
    known[id(value)] = copy
    names["__builtins__"] = raw.__globals__["__builtins__"]
    for name in _names(raw.__code__):
        if name in MEANINGS:
            names[name] = MEANINGS[name]
        elif name == "tl":
            names[name] = LANGUAGE
        elif name in raw.__globals__:
            names[name] = translated(raw.__globals__[name], known)
    return copy


def _names(code: Any) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            found |= _names(constant)
    return found


def _aggregate(value: Any, known: dict[int, Any]) -> Any:
    names = value.__new__.__code__.co_freevars
    own = value.__new__.__closure__[names.index("cls")].cell_contents
    init = translated(own.__init__, known)

    def make(*args: Any) -> Any:
        init(instance := SimpleNamespace(), *args)
        return instance

    return make


def argument(x: Any) -> Any:
    """An argument of a launch as the kernel's function takes it."""
    if isinstance(x, torch.Tensor):
        memory = x.as_strided(
            (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,)
        )
        return Pointer(memory)
    if isinstance(x, TensorDescriptor):
        facts = (x.base, x.shape, x.strides, x.block_shape)
        names = ("base", "shape", "strides", "block_shape")
        return SimpleNamespace(
            dtype=x.base.dtype, layout=None, **dict(zip(names, facts, strict=True))
        )
    return Value(torch.tensor(x)) if type(x) is int else x


def run(kernel: JITFunction, programs: int, arguments: Any, constants: dict[str, Any]) -> None:
    """Run every program of a launch, one after the other."""
    function = translated(kernel, {})
    for program in range(programs):
        LOCAL.program = (program, programs)
        function(*map(argument, arguments), **constants)


@contextlib.contextmanager
def interpreted(programs: int | None = None):
    """Launches of Gluon kernels inside run here, with at most so many ``programs``."""
    launched = []
    call = launch.Launch.__call__

    def here(self: Any, grid: Any, *arguments: Any) -> Any:
        if not isinstance(self.kernel, gluon._runtime.GluonJITFunction):
            return call(self, grid, *arguments)
        launched.append(self.kernel.fn.__name__)
        count = grid[0] if programs is None else min(grid[0], programs)
        names = {p.name for p in self.kernel.params}
        constants = {name: value for name, value in self.constants.items() if name in names}
        return run(self.kernel, count, arguments, constants)

    with mock.patch.object(launch.Launch, "__call__", here):
        yield launched

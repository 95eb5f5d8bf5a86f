"""Compile what a launcher would launch, for any GPU architecture, without a GPU.

The launcher runs on fake CUDA tensors against a driver that only names its target, so heuristics,
specialisation and tile choice are the real ones; nothing is launched.
"""

from __future__ import annotations

import importlib
import io
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import quick_compiler
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from moe_ops.dispatch.device import Device, assumed
from moe_ops.inspect.devices import TARGETS
from moe_ops.kernels import symmetric, symmetric_batched
from moe_ops.kernels._runtime import launch
from moe_ops.ops import STAGES
from moe_ops.windows import FAILED, Window, WindowLayout

KNOWN = [target.facts for target in TARGETS.values() if target.facts is not None]
SHARED_MEMORY = {facts.arch: facts.shared_memory for facts in KNOWN}
SHARED_MEMORY[103] = SHARED_MEMORY[100]
"""Shared memory of a block, in bytes, by architecture."""

RELEASE = ".".join(triton.__version__.split(".")[:2])
"""Triton's, such as 3.6: machine code differs between releases."""

WAIT = re.compile(r"griddepcontrol\.wait|tt\.grid_dependency_wait")
"""The wait for the kernel before in TTGIR: an instruction as text, or from Triton 3.9 on an
operation."""

REPORT = "ptxas.txt"
"""The file beside a kernel in Triton's cache with what ptxas said of it."""


class TargetOnly:
    """A driver that knows an architecture and has no device."""

    utils = None
    launcher_cls = None

    def __init__(self, arch: int, until: str = "") -> None:
        self.target = GPUTarget("cuda", arch, 32)
        self.device = arch, until  # kernels of one device serve its next launches

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> tuple[int, str]:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


class Forgetful(dict):
    """No launch finds its binary, so that every one compiles."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Forget."""


class FakeWindow(Window):
    """The window of the last rank, without memory: its parts are fresh tensors."""

    timeout_ns = 30 * 10**9

    @property
    def rank(self) -> int:
        return self.layout.ranks - 1

    @property
    def peers(self) -> torch.Tensor:
        return self.own

    @property
    def state(self) -> torch.Tensor:
        return self.own.new_empty(FAILED + 1, dtype=torch.int32)

    @property
    def live(self) -> torch.Tensor | None:
        ranks = self.layout.ranks + 1
        return self.own.new_empty(ranks, dtype=torch.int64) if self.layout.masked else None

    def part(self, offset: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return self.own.new_empty(shape, dtype=dtype)


class FakeHostMemory:
    """Memory of the host that no GPU reads."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.size = size

    def take(self, size: int) -> torch.Tensor:
        """Return bytes of their own."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def device_address(self, x: torch.Tensor) -> int:
        """Return any address."""
        return 0


def fake_windows(layout: WindowLayout, device: torch.device, timeout: float) -> list[FakeWindow]:
    """Stands for `moe_ops.pipeline.exchange.memory.allocate_here` of one rank."""
    return [FakeWindow(layout, torch.empty(2, dtype=torch.int64, device=device))]


def fake_window(peers: torch.Tensor) -> FakeWindow:
    """A window with room for the largest problem that is compiled."""
    return FakeWindow(WindowLayout(peers.shape[0] - 1, 8192, 8192, 64, 4, 512), peers)


def forget_kernels(*modules: ModuleType) -> None:
    """Kernels cached for one architecture must not serve the next."""
    for module in modules:
        for value in vars(module).values():
            if hasattr(value, "device_caches"):
                value.device_caches.clear()


@contextmanager
def stopping_after(stage: str) -> Iterator[None]:
    """Kernels are compiled up to a stage, such as ``ttgir``, where nothing reads what follows.

    They lie in a folder of their own of Triton's cache, as their keys are those of whole kernels.
    """
    add_stages = CUDABackend.add_stages

    def skip(module: Any, metadata: dict[str, Any]) -> bytes:
        if module and "name" not in metadata:
            metadata |= {"name": module.get_entry_func_name(), "shared": 0}
        return b""

    def add(self: CUDABackend, stages: dict[str, Any], options: Any, language: Any) -> None:
        add_stages(self, stages, options, language)
        names = list(stages)
        stages.update(dict.fromkeys(names[names.index(stage) + 1 :], skip))

    with mock.patch.object(CUDABackend, "add_stages", add), triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(Path(triton.knobs.cache.dir) / f"until_{stage}")
        yield


@contextmanager
def compiling(
    gpu: int | Device, name: str = "", *, nth: int | None = None, until: str = ""
) -> Iterator[list[Any]]:
    """Every launch inside compiles for a GPU, or an architecture, and lands in the list.

    ``name``: by which tuned tiles are found for an architecture; without one there are none.
    ``nth``: only that launch of each kernel does, counted from 0.
    ``until``: the last stage that is compiled, if it is not the last one.
    """
    facts = gpu if isinstance(gpu, Device) else Device(gpu, SHARED_MEMORY[gpu], 132, name)
    compiled: list[Any] = []
    run = JITFunction.run

    launches: Counter[str] = Counter()

    def compile_only(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        launches[self.__name__] += 1
        if nth is not None and launches[self.__name__] != nth + 1:
            return None
        kwargs |= {"warmup": True, "sanitize_overflow": False}  # its checks are dropped anyway
        with redirect_stdout(io.StringIO()) as said:
            kernel = run(self, *args, **kwargs)
        if "registers" in said.getvalue():
            get_cache_manager(kernel.metadata.hash).put(said.getvalue(), REPORT, binary=False)
        compiled.append(kernel)
        return kernel

    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(TargetOnly(facts.arch, until))
    try:
        with ExitStack() as patches:
            if until:
                patches.enter_context(stopping_after(until))
            patches.enter_context(assumed(facts))
            patches.enter_context(quick_compiler.quicker())
            patches.enter_context(triton.knobs.nvidia.scope())
            triton.knobs.nvidia.dump_ptxas_log = True
            patches.enter_context(triton.knobs.compilation.scope())
            triton.knobs.compilation.disable_line_info = True  # takes time, and changes no code
            patches.enter_context(mock.patch.object(launch, "COMPILED", Forgetful()))
            # Nothing is launched, and a build with CUDA would ask the driver for a stream.
            patches.enter_context(mock.patch.object(launch, "_current_stream", None))
            patches.enter_context(mock.patch.object(JITFunction, "run", compile_only))
            for stage in (symmetric, symmetric_batched):
                patches.enter_context(mock.patch.object(stage, "windows_of", fake_window))
            yield compiled
    finally:
        triton.runtime.driver._active = previous


class OnKernels(TorchDispatchMode):
    """Operators are their launchers, also on fake tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call the CUDA leg of an operator of the library, and any other operator as it is."""
        kwargs = kwargs or {}
        if func.namespace != "moe_ops":
            return func(*args, **kwargs)
        qualified = func.name().split("::")[1]
        module = importlib.import_module(f"moe_ops.kernels.{STAGES[qualified]}")
        return getattr(module, qualified.replace(".", "_"))(*args, **kwargs)


def compile_launch(
    arch: int | Device,
    launch: Callable[[Callable[..., torch.Tensor]], Any],
    gpu: str = "",
    *,
    nth: int | None = None,
    until: str = "",
) -> list[Any]:
    """The kernels of ``launch(empty)``; ``empty(*shape, dtype=..)`` makes a fake CUDA tensor.

    ``nth``: only that launch of each kernel.
    ``until``: the last stage whose result is read, such as ``ttgir``; machine code unless given.
    """

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with compiling(arch, gpu, nth=nth, until=until) as compiled, fake:
        launch(empty)
    return compiled


def launched(
    arch: int, launch: Callable[[Callable[..., torch.Tensor]], Any]
) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Names, arguments and constants of what `compile_launch` would compile; nothing is."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def note(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        calls.append((self.__name__, args, kwargs))

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    nothing = mock.patch.object(JITFunction, "run", note)
    with compiling(arch), nothing, FakeTensorMode(allow_non_fake_inputs=True):
        launch(empty)
    return calls


def launched_names(arch: int, launch: Callable[[Callable[..., torch.Tensor]], Any]) -> list[str]:
    """The names of the kernels that `compile_launch` would compile; none is compiled."""
    return [name for name, *_ in launched(arch, launch)]


def rewrites_operands(kernel: Any) -> bool:
    """Whether registers that a matrix instruction still reads may be written again.

    So it is in Triton 3.6 on Hopper where a product's first operand was computed in registers and
    more products than none are under way when it is next computed.
    """
    code = kernel.asm["ttgir"]
    from_registers = re.search(r"warp_group_dot %.*? : tensor<", code)
    waits = re.findall(r"warp_group_dot_wait.*?pendings = (\d+)", code)
    return bool(from_registers) and any(pending != "0" for pending in waits)


def overwrites_operands(kernel: Any) -> bool:
    """Whether a register of an operand is written while a product that reads it is under way."""
    return overwritten(_instructions(kernel))


def overwritten(code: list[str]) -> bool:
    """The same of instructions in their order.

    Products are counted in groups that end with ``gsb0``; a ``DEPBAR.LE gsb0, n`` waits until n
    groups are left.
    """
    groups: list[set[int]] = [set()]
    for line in code:
        if product := re.match(r"[HQ]GMMA\S* R\d+, R(\d+), gdesc", line):
            groups[-1] |= set(range(int(product[1]), int(product[1]) + 4))
            if "gsb0" in line:
                groups.append(set())
        elif wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)", line):
            groups = groups[max(0, len(groups) - 1 - int(wait[1], 0)) :]
        elif set().union(*groups) & _written(line):
            return True
    return False


def releases_unread(kernel: Any) -> bool:
    """Whether a stage is released while a load of what mma.sync multiplies may be under way."""
    return unread(_instructions(kernel))


def unread(code: list[str]) -> bool:
    """Whether a load from shared memory is not waited for before an arrival or its block's end.

    An instruction waits for a load by naming one of its registers, a fence for all loads. Blocks
    without products may end before.
    """
    under_way: list[set[int]] = []
    multiplied = False
    for line in code:
        ends = re.match(r"(?:@\S+ )?(BRA|EXIT)\b", line)
        if under_way and (line.startswith("ARRIVES") or (ends and multiplied)):
            return True
        product = re.match(r"HMMA\S* R\d+, R(\d+), R(\d+)", line)
        named = {int(number) for number in re.findall(r"\bR(\d+)", line)} | _written(line)
        if product:
            left, right = int(product[1]), int(product[2])
            named |= {*range(left, left + 4), right + 1}
        under_way = [loaded for loaded in under_way if not loaded & named]
        if line.startswith("LDS"):
            under_way.append(_written(line))
        multiplied = bool(product or multiplied) and not ends
        if ends or line.startswith("FENCE.VIEW.ASYNC"):
            under_way = []
    return False


def releases_one_stage(kernel: Any) -> bool:
    """Whether an arrival of a loop is at a barrier that the loop does not choose.

    Triton takes a variable of a loop for constant if its first pass leaves the value there that it
    has before, though another variable brings that value. So a stage that is remembered is lost.
    """
    loops, chosen, barriers = [0], {}, {}
    for line in kernel.asm["ttgir"].splitlines():
        depth = len(line) - len(line.lstrip())
        while len(loops) > 1 and depth <= loops[-1] and line.lstrip().startswith("}"):
            loops.pop()
        if "scf.for" in line:
            loops.append(depth)
            values = re.findall(r"(%[\w.]+) = ", line.split("scf.for")[1])
            chosen |= dict.fromkeys(values, len(loops))
        elif defined := re.match(r"\s*(%[\w.]+)(?::\d+)? = (.*)", line):
            chosen[defined[1]] = len(loops)
            if index := re.match(r"ttg\.memdesc_index %[\w.]+\[(%[\w.]+)", defined[2]):
                barriers[defined[1]] = index[1]
        if arrival := re.search(r"async_copy_mbarrier_arrive (%[\w.]+)", line):
            at = barriers[arrival[1]]
            if chosen.get(at, 1) < len(loops):
                return True
    return False


def _written(line: str) -> set[int]:
    """Registers that an instruction writes: of its first operand, if that is a register."""
    found = re.match(r"(?:@\S+ )?([A-Z][\w.]*) R(\d+),", line)
    if found is None or found[1].startswith(("HGMMA", "QGMMA")):
        return set()
    bits, parts = re.search(r"\.(64|128)\b", found[1]), re.search(r"\.M88\.(\d)", found[1])
    first, count = int(found[2]), int(bits[1]) // 32 if bits else 1
    count = int(parts[1]) if parts else count
    count = 2 if ".WIDE" in found[1] else count
    return set(range(first, first + count))


def _instructions(kernel: Any) -> list[str]:
    """The machine code of a kernel, without addresses."""
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", disassembled(kernel))
    return [line.strip() for line in lines]


def disassembled(kernel: Any) -> str:
    """The machine code of a kernel."""
    return _disassembled(kernel.asm["cubin"])


@lru_cache(maxsize=2)
def _disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", "-ndf", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def packs_garbage(kernel: Any) -> bool:
    """Whether 8-bit floats that are known to be equal are packed with what a register has left.

    So ptxas of Triton 3.6 does it for conversions of zeros that are zeros by their masks. The
    machine code is looked at if there are such conversions.
    """
    if not re.search(r"cvt\.\S*e\dm\dx2", kernel.asm["ptx"]):
        return False
    code = disassembled(kernel)
    return bool(re.search(r"F2FP\S*MERGE_C R\d+, (R\d+), \1, ", code))


def resources(kernel: Any, arch: int) -> dict[str, int]:
    """Registers, spilled bytes and serialised-wgmma warnings, as ptxas reports them."""
    report = _report(kernel, arch)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    registers = re.search(r"Used (\d+) registers", report)
    if registers is None:
        raise RuntimeError(f"ptxas says nothing of registers: {report}")
    return {
        "registers": int(registers[1]),
        "spilled": sum(spills),
        "serialized": report.count("C75"),
        "shared": kernel.metadata.shared,
    }


def _report(kernel: Any, arch: int) -> str:
    """What ptxas said as the kernel was compiled, or says now if others have compiled it."""
    cache = get_cache_manager(kernel.metadata.hash)
    if kept := cache.get_file(REPORT):
        return Path(kept).read_text()
    cache.put(report := _assemble(kernel, arch), REPORT, binary=False)
    return report


def _assemble(kernel: Any, arch: int) -> str:
    suffix = "a" if arch >= 90 else ""
    command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}{suffix}", "/dev/stdin"]
    done = subprocess.run(
        [*command, "-o", "/dev/null"], input=kernel.asm["ptx"], text=True, capture_output=True
    )
    return done.stdout + done.stderr

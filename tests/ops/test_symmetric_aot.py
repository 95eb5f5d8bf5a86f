"""Kernels of windows compiled for every architecture, without a GPU."""

import re

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
from aot_launches import ARCHITECTURES  # noqa: E402
from stage_launches import exchange  # noqa: E402

from moe_ops.kernels import symmetric, symmetric_batched  # noqa: E402
from moe_ops.scheme import get_scheme  # noqa: E402
from moe_ops.windows import FAILED  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
TOP_K, EXPERTS, TOKENS = 8, 256, 64
SCHEMES = ("unquantized", "fp8_channel", "fp8_block128", "mxfp4_mxfp8", "nvfp4")
SHAPES = [(2048, 8), (2880, 2), (7168, 8)]
"""H and ranks."""
FOR_ONE = 80 * 1024
"""Shared memory of a program where an SM of sm_80 or sm_90 runs two."""
WIDE_STORE = re.compile(r"st(\.\w+)*\.global(\.\w+)*\.v4\.[bu]32")


@pytest.fixture(autouse=True)
def no_other_driver():
    aot.forget_kernels(symmetric, symmetric_batched)


def launch(scheme, hidden, ranks, on_input=False, sharded=True):
    """A send of rank ``ranks - 1``, and a return if rows are not quantized."""
    quant = get_scheme(scheme).activation

    def run(empty):
        k = 1 if on_input else TOP_K
        where = (empty(ranks + 1, dtype=torch.int64), empty(FAILED + 1, dtype=torch.int32))
        holders = empty(EXPERTS, dtype=torch.int32) if sharded else None
        weights, ids = empty(TOKENS, k, dtype=torch.float32), empty(TOKENS, k, dtype=torch.int32)
        one = empty(1, dtype=torch.float32) if quant is not None and quant.global_scale else None
        key = "" if quant is None else quant.key
        rest = (*where, TOKENS, EXPERTS, on_input, key)
        symmetric.symmetric_send(empty(TOKENS, hidden), one, weights, ids, holders, *rest)
        if quant is None:
            symmetric.symmetric_return(empty(ranks * TOKENS, hidden), holders, *where, k)

    return run


def compiled(arch, run):
    """The kernels, by name.

    ptxas spills up to eight words that live across their loops, although it takes far fewer
    registers than a program may have. A row that did not fit would be thousands of bytes. Only
    sums that return are loaded ahead, into shared memory; of these kernels an SM runs two programs.
    """
    kernels = aot.compile_launch(arch, run)
    for kernel in kernels:
        used, name = aot.resources(kernel, arch), kernel.metadata.name
        ahead = name == "_return_kernel"
        assert used["shared"] <= (FOR_ONE if ahead else 8192), (name, used)
        assert used["spilled"] <= 32 and used["registers"] <= 160, (name, used)
        registers = used["registers"] * 32 * kernel.metadata.num_warps
        assert not ahead or registers <= 32768, (name, used)
    return {kernel.metadata.name: kernel for kernel in kernels}


def wide_stores(kernel):
    """The instructions that store 16 bytes of a thread."""
    return [line for line in kernel.asm["ptx"].splitlines() if WIDE_STORE.search(line)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("hidden", "ranks"), SHAPES)
def test_a_row_stays_in_registers(arch, scheme, hidden, ranks):
    if scheme != "unquantized" and arch < 89:
        pytest.skip("e4m3 does not exist on this architecture")
    assert compiled(arch, launch(scheme, hidden, ranks))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("hidden", "ranks"), SHAPES)
def test_rows_of_16_bits_are_stored_16_bytes_at_a_time(arch, hidden, ranks):
    kernels = compiled(arch, launch("unquantized", hidden, ranks))
    send, back = kernels["_send_kernel"], kernels["_return_kernel"]
    assert wide_stores(back) and not re.search(r"st\S*\.global\S*16 ", back.asm["ptx"])
    assert re.search(r"cp\.async\.cg\S* .*, 0x10", back.asm["ptx"]), "rows are not loaded ahead"
    assert wide_stores(send) and not re.search(r"st\S*\.global\S*16 ", send.asm["ptx"])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("hidden", "scheme"), [(2048, "unquantized"), (2880, "fp8_channel"), (7168, "fp8_block128")]
)
def test_a_row_of_a_slot_stays_in_registers(arch, hidden, scheme):
    """In the Batched format, with and without router weights."""
    if scheme != "unquantized" and arch < 89:
        pytest.skip("e4m3 does not exist on this architecture")
    quant = get_scheme(scheme).activation
    local, key = 32, "" if quant is None else quant.key

    def run(empty):
        where = (empty(3, dtype=torch.int64), empty(FAILED + 1, dtype=torch.int32), TOKENS)
        placement = empty(2, 2 * local, dtype=torch.int32), empty(local, dtype=torch.int32)
        for on_input in (False, True):
            routing = (empty(TOKENS, 8, dtype=torch.float32), empty(TOKENS, 8, dtype=torch.int32))
            given = (empty(TOKENS, hidden), None, *routing, *placement, *where)
            symmetric_batched.symmetric_send_batched(*given, on_input, key)

    kernels = aot.compile_launch(arch, run)
    assert len(kernels) == 2
    for kernel in kernels:
        used = aot.resources(kernel, arch)
        assert used["spilled"] <= 32 and used["registers"] <= 160, used
        assert scheme != "unquantized" or wide_stores(kernel)


def test_a_mask_of_live_ranks(monkeypatch):
    """Kernels of windows with a mask read it, and fit; those of others do not have it."""

    def masked(peers):
        window = fake_window(peers)
        window.layout = window.layout._replace(masked=True)
        return window

    fake_window, plain = aot.fake_window, aot.compile_launch(90, exchange)
    monkeypatch.setattr(aot, "fake_window", masked)
    for kernel, other in zip(aot.compile_launch(90, exchange), plain, strict=True):
        loads = [k.asm["ptx"].count("ld.global.b64") for k in (kernel, other)]
        used, name = aot.resources(kernel, 90), kernel.metadata.name
        assert loads[0] > loads[1] and name == other.metadata.name
        assert used["spilled"] <= 32 and used["registers"] <= 160, (name, used)


def test_rows_that_go_everywhere():
    for on_input in (False, True):
        for scheme in ("unquantized", "fp8_channel"):
            compiled(90, launch(scheme, 2048, 2, on_input=on_input, sharded=False))


def test_rows_that_are_quantized_already():
    """Bytes of a row, and the bytes of its scales."""

    def run(empty):
        where = (empty(9, dtype=torch.int64), empty(FAILED + 1, dtype=torch.int32))
        routing = empty(TOKENS, 8, dtype=torch.float32), empty(TOKENS, 8, dtype=torch.int64)
        rest = (None, *where, TOKENS, EXPERTS, False, "")
        for scale in (torch.uint8, torch.float8_e4m3fn, torch.float32):
            x = empty(TOKENS, 4096, dtype=torch.float8_e4m3fn)
            symmetric.symmetric_send(x, empty(TOKENS, 32, dtype=scale), *routing, *rest)

    kernels = aot.compile_launch(90, run, until="ptx")
    assert len(kernels) == 3 and all(wide_stores(kernel) for kernel in kernels)

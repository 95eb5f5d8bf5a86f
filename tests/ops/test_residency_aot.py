"""The kernels for experts in host memory, compiled for every architecture."""

import pytest
import torch
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402
from aot_launches import ARCHITECTURES, check_resources  # noqa: E402

from moe_ops.kernels import residency  # noqa: E402
from moe_ops.kernels._gemm import rows  # noqa: E402
from moe_ops.residency.state import StateLayout  # noqa: E402

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_decisions_and_copies(arch):
    """Few experts and many; copies take 16 bytes a thread at once."""
    aot.forget_kernels(residency, rows)

    def launch(empty):
        for experts, slots in ((128, 32), (512, 300)):
            state = empty(StateLayout(experts, slots).length, dtype=torch.int64)
            table = empty(10, 4, dtype=torch.int64)
            for dtype in (torch.int32, torch.int64):
                ids = empty(8, 8, dtype=dtype)
                residency.make_resident(ids, None, state, experts, slots)
            residency._copy_launch(experts, slots, 10, True)((256,), table, state, 0)
            held = empty(experts, dtype=torch.int32)
            rows.map_in_rows(empty(experts, dtype=torch.int64), held)
            rows.plan_in_rows(empty(3000, dtype=torch.int32), held)

    kernels = aot.compile_launch(arch, launch)
    check_resources(kernels, arch)
    copies = [k for k in kernels if k.metadata.name == "_copy_experts_kernel"]
    assert copies and all(k.asm["ptx"].count(".v4.b32") >= 8 for k in copies)

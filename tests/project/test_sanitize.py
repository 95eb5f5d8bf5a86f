"""What runs under compute-sanitizer: right on the CPU, complete, and recorded as it went."""

import json
import shutil
import sys
import time
from unittest import mock

import pytest
import sanitizer_record
import torch
from conftest import HAS_CUDA, INTERPRETED
from operator_cases import copied_cases
from sanitize import SPECIALIZED, chosen, kernels_of, launches, part_of, run_case
from sanitize_cases import EACH_KERNEL, PLAIN, TOKEN_SCHEMES, cases
from sanitizer_findings import Findings, parse, supported
from sanitizer_record import How, Run, command, merged, run
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_map_only

from moe_ops.ops import STAGES

CASES = cases()
CHECKED = {case.name for case in copied_cases()}
"""Cases of which `ops/test_ops.py` has compared the values."""
MINE = [c for c in CASES if c.name not in CHECKED and (HAS_CUDA or not c.name.startswith("op/"))]
"""On the CPU operators are what they are compared with."""


@pytest.mark.parametrize("case", MINE, ids=lambda case: case.name)
def test_values(case, device):
    assert run_case(case, device).wrong is None


def test_names():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {n.split("/")[1] for n in names if n.startswith("op/")} == set(STAGES)
    assert set(EACH_KERNEL) <= set(PLAIN)


def test_a_wrong_value_and_an_exception_are_seen(device):
    case = CASES[0]
    silent = case._replace(run=lambda given: tree_map_only(torch.Tensor, torch.zeros_like, given))
    assert run_case(silent, device).wrong is not None
    raising = case._replace(run=lambda given: given.missing)
    assert run_case(raising, device).wrong.startswith("AttributeError")


def test_parts_are_all_cases():
    names = [c.name for part in ((1, 3), (2, 3), (3, 3)) for c in chosen((), part)]
    assert sorted(names) == sorted(case.name for case in CASES)
    assert {c.name for c in chosen(("layer/stream",), (1, 1))} < set(names)
    assert part_of("2/3") == (2, 3)
    for wrong in ("0/2", "3/2", "1", "a/b"):
        with pytest.raises(Exception, match="a part must be i/n with 1 <= i <= n, got"):
            part_of(wrong)


@pytest.mark.skipif(INTERPRETED, reason="names compiled kernels")
@pytest.mark.filterwarnings("ignore")  # of addresses of fake tensors
def test_hopper_runs_every_kernel():
    """What a Hopper GPU would be asked to launch, without one: nothing is compiled."""
    pytest.importorskip("triton")
    import aot
    from triton.runtime.jit import JITFunction

    def fake(t):
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")

    reached = {}
    nothing = mock.patch.object(JITFunction, "run", lambda self, *a, **k: None)
    windows = mock.patch("windows_here.allocate_here", aot.fake_windows)
    store = mock.patch("moe_ops.pipeline.host_experts.HostMemory", aot.FakeHostMemory)
    mirror = mock.patch("moe_ops.residency.slots.HostMemory", aot.FakeHostMemory)
    with aot.compiling(90), nothing, windows, store, mirror:
        for case in CASES:
            inputs = case.inputs()
            with FakeTensorMode(allow_non_fake_inputs=True), launches() as names, aot.OnKernels():
                try:
                    case.run(tree_map_only(torch.Tensor, fake, inputs))
                except DynamicOutputShapeException:  # a case compares only rows that are used
                    pass
                except RuntimeError as error:  # PyTorch's own arithmetic, in builds without CUDA
                    assert "not linked with support for cuda" in str(error)
            reached[case.name] = names
    assert set().union(*reached.values()) == kernels_of(90)
    for name, kernel in (
        ("layer/direct/fp8_channel", "scaled_gemm_slot_kernel"),
        ("layer/stream/fp8_block128", "hopper_stream_kernel"),
        ("layer/many/fp8_channel", "hopper_gemm_kernel"),
        ("layer/packed/unquantized", "_pack_kernel"),
        ("gemm/quantized-as-packed/fp8_channel/64", "_quantize_pack_kernel"),
        ("layer/blocks-of-slots", "_align_blocks_kernel"),
        ("op/expert_product_sum/larger0", "hopper_token_sum_kernel"),
        ("op/expert_wgrad/larger0", "hopper_wgrad_kernel"),
        ("op/expert_wgrad.out/larger0", "hopper_wgrad_kernel"),
        *(
            (f"layer/direct/token/{end}", kernel)
            for end in (
                *TOKEN_SCHEMES,
                "unquantized/holes",
                "fp8_block128/elsewhere",
                "fp8_channel/bias-swigluoai",
                "fp8_channel/expert-map",
                "float16",
            )
            for kernel in ("hopper_token_kernel", "hopper_token_sum_kernel")
        ),
    ):
        assert kernel in reached[name]


def test_kernels_of_architectures():
    pytest.importorskip("triton")
    assert "hopper_gemm_kernel" not in kernels_of(80) and "_align_kernel" in kernels_of(80)
    assert kernels_of(100) - kernels_of(80) == {"block_scaled_gemm_kernel"}


CLEAN = """========= COMPUTE-SANITIZER
layer/one: ok (12 ms) _align_kernel
========= ERROR SUMMARY: 0 errors
"""
MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at hopper_stream_kernel+0x1c0 in hopper_stream.py:60
=========     by thread (0,0,0) in block (3,0,0)
=========     Address 0x7f2c00200 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch [0x20f] in cuda_utils.so
=========
layer/one: ok (12 ms) _align_kernel
========= Invalid __global__ read of size 16 bytes
=========     at 0x160 in hopper_stream.py:60:hopper_stream_kernel
=========     by thread (1,0,0) in block (3,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _align_kernel+0x130 in plan.py:39
=========     and Read access at _align_kernel+0x420 in plan.py:50 [4 hazards]
=========
========= Warning: Race reported between Read access at 0xe0 in a.py:3:hopper_gemm_kernel
=========     and Write access at 0x1e0 in a.py:4:hopper_gemm_kernel [1088 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
SYNCCHECK = """========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block
=========     at void at::native::reduce_kernel<(int)512>(T1)+0xf0
=========     by thread (33,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""


def test_what_tools_print():
    assert parse(CLEAN) == Findings()
    read = {"hopper_stream_kernel": {"Invalid __global__ read of size 16 bytes": 2}}
    assert parse(MEMCHECK) == Findings(errors=2, by_kernel=read)
    races = parse(RACECHECK)
    assert (races.errors, races.warnings) == (1, 1)
    assert set(races.by_kernel) == {"_align_kernel", "hopper_gemm_kernel"}
    assert set(parse(SYNCCHECK).by_kernel) == {"reduce_kernel"}
    assert parse("Killed\n") == Findings(aborted=1)
    total = Findings()
    for text in (MEMCHECK, MEMCHECK, "", RACECHECK):
        total.add(parse(text))
    assert (total.errors, total.warnings, total.aborted) == (5, 1, 1)
    assert list(total.by_kernel["hopper_stream_kernel"].values()) == [4]
    assert supported(MEMCHECK) and not supported("========= Error: Device not supported. See\n")


def test_kernels_that_are_not_judged():
    """What is said of them is counted apart, and the rest stays."""
    races = parse(RACECHECK)
    rest, apart = races.without(SPECIALIZED)
    assert (rest.errors, rest.warnings, set(rest.by_kernel)) == (1, 0, {"_align_kernel"})
    assert [sum(said.values()) for said in apart.values()] == [1] and set(apart) <= SPECIALIZED
    assert races.without(()) == (races, {})


def test_a_clean_run_says_nothing():
    def clean(**found):
        return Run(1, [], {}, [], Findings(**found), 1.0).clean

    assert clean()
    assert not (clean(errors=1) or clean(warnings=1) or clean(aborted=1))
    assert not clean(by_kernel={"unknown": {"Internal Sanitizer Error": 1}})
    assert not Run(1, ["late"], {}, [], Findings(), 1.0).clean
    assert not Run(1, [], {"case": "AssertionError"}, [], Findings(), 1.0).clean


def test_parts_merge_into_a_record():
    pytest.importorskip("triton")
    header = {"commit": "a", "arch": 90}
    kernels = sorted(kernels_of(90))
    first = Run(3, [], {}, kernels[:5], Findings(), 2.0)
    second = Run(4, [], {}, kernels[5:], Findings(), 3.0)
    half = merged({}, header, "memcheck", "1/2", first)
    assert not half["tools"]["memcheck"]["clean"] and half["tools"]["memcheck"]["never_ran"] is None
    whole = merged(half, header, "memcheck", "2/2", second)["tools"]["memcheck"]
    assert whole["clean"] and whole["never_ran"] == [] and whole["kernels"] == kernels
    assert (whole["cases"], whole["seconds"]) == (7, 5.0)
    missing = merged(half, header, "memcheck", "2/2", first)["tools"]["memcheck"]
    assert not missing["clean"] and missing["never_ran"] == kernels[5:]
    found = second
    found.findings.errors = 1
    assert not merged(half, header, "memcheck", "2/2", found)["tools"]["memcheck"]["clean"]
    raced = merged(half, header, "racecheck", "1/1", first)
    assert set(raced["tools"]) == {"memcheck", "racecheck"}
    assert json.loads(json.dumps(raced)) == raced
    other = merged(half, {**header, "commit": "b"}, "racecheck", "1/1", first)
    assert set(other["tools"]) == {"racecheck"}
    thirds = merged(half, header, "memcheck", "1/3", first)
    assert set(thirds["tools"]["memcheck"]["parts"]) == {"1/3"}


@pytest.fixture
def sanitizer(tmp_path):
    """A program that takes the sanitizer's options and finds something."""
    path = tmp_path / "compute-sanitizer"
    path.write_text(
        f'#!/bin/sh\nwhile [ "$1" != "{sys.executable}" ]; do shift; done\n"$@"\n'
        "echo '========= Invalid read'\necho '=========     at _copy_kernel+0x10'\n"
        "echo '========= ERROR SUMMARY: 1 error'\n"
    )
    path.chmod(0o755)
    return str(path)


def test_processes(sanitizer, tmp_path):
    """Two, whose cases and findings are added up; and what time does not allow is named."""
    part, how = (1, 60), How(2, tmp_path / "logs")
    result = run("memcheck", sanitizer, part, how, time.monotonic() + 300)
    names = [case.name for case in chosen((), part)]
    assert result.cases == len(names) and not result.unfinished and not result.wrong
    assert result.findings == Findings(2, by_kernel={"_copy_kernel": {"Invalid read": 2}})
    assert len(list((tmp_path / "logs").iterdir())) == 2
    stopped = run("memcheck", sanitizer, part, how, time.monotonic())
    assert stopped.unfinished == names and stopped.findings.aborted == 2


def test_commands():
    assert command("plain", "cs")[0] == sys.executable
    assert command("memcheck", "cs")[:3] == ["cs", "--tool", "memcheck"]
    assert command("initcheck", "cs")[-1] == "--raw"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("", 5),
        ("========= ERROR SUMMARY: 0 errors", 5),
        ("========= Error: Device not supported. See the documentation", 4),
        (None, 3),
    ],
)
def test_a_machine_that_cannot(said, code, tmp_path, monkeypatch, capsys):
    """A code of its own, the reason, and nothing recorded."""
    if said is not None:
        program = tmp_path / "compute-sanitizer"
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        program.chmod(0o755)
    output = tmp_path / "records"
    monkeypatch.setattr(sys, "argv", ["sanitizer_record.py", "--output", str(output)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = shutil.which("compute-sanitizer", path=str(tmp_path))
    monkeypatch.setattr(sanitizer_record, "find_sanitizer", lambda: found)
    assert sanitizer_record.main() == code
    assert "nothing was checked: compute-sanitizer" in capsys.readouterr().out
    assert not output.exists()


def test_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sanitizer_record.py", "--output", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sanitizer_record, "find_sanitizer", lambda: "compute-sanitizer")
    assert sanitizer_record.main() == 4
    assert "nothing was checked: there is no CUDA device" in capsys.readouterr().out

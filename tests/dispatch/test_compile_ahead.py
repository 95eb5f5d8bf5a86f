"""Kernels of trials that are compiled before they are timed, without a GPU."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest
from conftest import INTERPRETED
from tune_trials import H200, Clock, subject

if INTERPRETED:
    pytest.skip("compiles kernels: not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")

import aot  # noqa: E402

from moe_ops.bench.compile_ahead import CompileAhead, compile_trial, usable_cores  # noqa: E402
from moe_ops.bench.problems import find_problem  # noqa: E402
from moe_ops.dispatch.hopper_decode import DECODE_FEW  # noqa: E402
from moe_ops.kernels._runtime import launch  # noqa: E402
from moe_ops.tuning.search import Trial, tune_tokens  # noqa: E402

QWEN3 = find_problem("qwen3-30b")


class Executor:
    """Stands for processes: keeps what it is given, and says what it is told to say."""

    def __init__(self, said=""):
        self.trials, self.said = [], said

    def map(self, function, trials):
        assert function.func is compile_trial
        for trial in trials:
            self.trials.append(trial)
            if isinstance(self.said, Exception):
                raise self.said
            yield self.said


def test_every_kernel_is_compiled_once():
    layer, executor = subject("mxfp4_w4a16"), Executor()
    ahead = CompileAhead(QWEN3, layer, 4, executor)
    found = layer.candidates(64)
    ahead(found)
    assert executor.trials == found
    ahead(found)
    ahead([trial._replace(num_tokens=65) for trial in found])  # another count, the same kernels
    assert executor.trials == found
    few = [trial._replace(num_tokens=2) for trial in found]  # without a plan
    ahead(few)
    assert executor.trials == [*found, *few]


def test_trials_are_compiled_before_they_are_timed():
    layer, executor = subject("mxfp4_w4a16"), Executor()
    ahead, clock = CompileAhead(QWEN3, layer, 4, executor), Clock(kernel=DECODE_FEW, ctas=2)

    def time(trial):
        assert trial in executor.trials
        return clock(trial)

    tune_tokens(layer, 200, time, ahead)
    assert {*clock.trials} <= {*executor.trials}


@pytest.mark.parametrize("said", ["no such layout", RuntimeError("a process died")])
def test_what_cannot_be_compiled_ahead_is_left_to_the_clock(said, capsys):
    layer, executor = subject("mxfp4_w4a16"), Executor(said)
    ahead = CompileAhead(QWEN3, layer, 4, executor)
    ahead(layer.candidates(64))
    assert str(said) in capsys.readouterr().err
    before = len(executor.trials)
    ahead(layer.candidates(512))
    assert (len(executor.trials) > before) == isinstance(said, str)


def test_one_process_compiles_nothing_ahead():
    ahead = CompileAhead(QWEN3, subject(), 1)
    ahead(subject().candidates(64))
    assert ahead.executor is None and not ahead.done
    assert 1 <= usable_cores() <= 16


def test_ctrl_c_ends_all_processes():
    """Processes that compile, and processes that wait for work."""
    code = (
        "from moe_ops.bench.compile_ahead import new_processes\n"
        "processes = new_processes(4)\n"
        "print(*processes.map(int, '1234'), flush=True)\n"
        "print(*processes.map(sum, [range(10**11)] * 2))\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "1 2 3 4\n"
            os.killpg(process.pid, signal.SIGINT)
            _, told = process.communicate(timeout=20)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode and "SpawnProcess" not in told


def test_errors_are_told():
    """No driver: there is no GPU, or no such tiles."""
    (start, *_) = subject("fp8_channel").beginnings(64, 1)
    wrong = start._replace(tiles=replace(start.tiles, ctas=9))
    said = compile_trial("silu", subject("fp8_channel"), wrong)
    assert said.startswith("Trial(num_tokens=64, gemm=1") and "has 9 CTAs per SM" in said


@pytest.mark.aot
@pytest.mark.parametrize(
    ("scheme", "tokens", "which", "changes", "name"),
    [
        ("mxfp4_w4a16", 512, 1, {"ctas": 1, "num_stages": 6}, "hopper_decode_few_kernel"),
        ("int8_w8a16", 8192, 2, {"on_demand": False}, "hopper_decode_many_kernel"),
        ("fp8_channel", 8, 2, {"num_stages": 3}, "hopper_stream_kernel"),
        ("unquantized", 64, 1, {"num_warps": 8}, "_expert_gemm_kernel"),
    ],
)
def test_a_trial_is_compiled_without_memory(scheme, tokens, which, changes, name):
    """With its tiles, up to the code that they decide; nothing is launched."""
    layer = subject(scheme, sizes=(128, 768, 2048))
    tiles = replace(layer.beginnings(tokens, which)[0].tiles, **changes)
    trial = Trial(tokens, which, tiles)
    assert layer.allows(trial)
    with aot.compiling(H200, until="ttgir") as compiled, mock.patch.object(launch, "COMPILED", {}):
        assert compile_trial("silu", layer, trial) == ""
        assert launch.COMPILED == {}
    kernel = compiled[-1]
    assert kernel.metadata.name == name and kernel.asm["ttgir"]

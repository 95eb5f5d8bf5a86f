"""Compiling kernels of trials in other processes: it takes longer than timing them.

A process compiles what a trial launches, for tensors without memory, and launches nothing. The
process that times trials finds the kernels in Triton's cache on disk.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing import get_context

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_ops.bench.layer_gemms import LayerGemms
from moe_ops.bench.problems import Problem
from moe_ops.dispatch.device import assumed
from moe_ops.dispatch.tiles import is_direct
from moe_ops.scheme import Scheme, pack_weight, quantize_weight
from moe_ops.tensors import ExpertWeight, ExpertWeights
from moe_ops.tuning.search import Subject, Trial

MOST_PROCESSES = 16
"""The most processes by default: each imports torch."""


def usable_cores() -> int:
    """Cores that this process may use, at most `MOST_PROCESSES`."""
    affinity = getattr(os, "sched_getaffinity", None)  # only Linux has it
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(MOST_PROCESSES, cores)


def new_processes(number: int) -> ProcessPoolExecutor:
    """Processes that compile, and that Ctrl-C kills.

    If it raised KeyboardInterrupt in them, it could end one while it takes work from their queue:
    the others, and this process at its end, would then wait forever.
    """
    return ProcessPoolExecutor(
        number,
        mp_context=get_context("spawn"),  # not forks: this process may use CUDA
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_DFL),
    )


class CompileAhead:
    """Compiles the kernels of trials before they are timed: a `moe_ops.tuning.search.Prepare`.

    What fails to compile here fails again when it is timed, which says why.

    Args:
        problem: the sizes and the activation of the layer.
        subject: the same sizes with scheme and GPU.
        processes: number of processes; with one, nothing is compiled ahead.
        executor: runs the work; None: new processes.
    """

    def __init__(
        self,
        problem: Problem,
        subject: Subject,
        processes: int,
        executor: Executor | None = None,
    ) -> None:
        self.subject = subject
        self.done: set[tuple[object, ...]] = set()
        self.compile = partial(compile_trial, problem.activation, subject)
        if executor is None and processes > 1:
            executor = new_processes(processes)
        self.executor = executor

    def __call__(self, trials: Sequence[Trial]) -> None:
        """Compile what was not compiled before; returns when all is done."""
        if self.executor is None:
            return
        new = {self._kernel(trial): trial for trial in trials}
        new = {kernel: trial for kernel, trial in new.items() if kernel not in self.done}
        self.done |= new.keys()
        try:
            failed = [text for text in self.executor.map(self.compile, new.values()) if text]
        except Exception as error:  # a process died; trials are compiled when they are timed
            failed, self.executor = [repr(error)], None
        for text in failed[:1]:
            print(f"not compiled ahead: {text:.300}", file=sys.stderr)

    def _kernel(self, trial: Trial) -> tuple[object, ...]:
        """All that the kernels of a trial depend on: not the number of tokens."""
        slots = trial.num_tokens * self.subject.top_k
        return trial.gemm, trial.tiles, is_direct(slots, self.subject.sizes[0])


def compile_trial(activation: str, subject: Subject, trial: Trial) -> str:
    """Compile what a trial launches; returns the error, or an empty string."""
    try:
        launch = import_module("moe_ops.kernels._runtime.launch")  # Triton is optional
        with warnings.catch_warnings(), assumed(subject.device), launch.compile_only():
            warnings.simplefilter("ignore")  # of addresses of fake tensors, which are 0
            with FakeTensorMode(allow_non_fake_inputs=True):
                _launch_trial(activation, subject, trial)
    except Exception as error:  # of any compiler; it will be seen again
        return f"{trial}: {error!r}"
    return ""


@torch.no_grad()
def _launch_trial(activation: str, subject: Subject, trial: Trial) -> None:
    """Launch a trial's GEMM on fake tensors."""
    experts, width, hidden = subject.sizes
    shapes = (experts, 2 * width, hidden), (experts, hidden, width)
    first, second = (
        _empty_weight(shape, subject.scheme, fragments=subject.in_fragments(which))
        for which, shape in enumerate(shapes, start=1)
    )
    scale = None
    if subject.scheme.input_scale_names:
        scale = torch.empty(1, dtype=torch.float32, device="cuda")
    weights = ExpertWeights(first, second, scale, scale)
    gemms = LayerGemms(subject.scheme, subject.top_k, activation, weights)
    tokens, k = trial.num_tokens, subject.top_k
    shape = (tokens, hidden) if trial.gemm == 1 else (tokens * k, width)
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    space = gemms.space(torch.empty(tokens, k, dtype=torch.int32, device="cuda"))
    gemms.product(trial.gemm, gemms.rows(trial.gemm, x, space), space, trial.tiles)


def _empty_weight(shape: tuple[int, int, int], scheme: Scheme, *, fragments: bool) -> ExpertWeight:
    """A weight without memory, in the form in which a layer keeps it."""
    q = quantize_weight(torch.empty(shape, dtype=torch.bfloat16, device="meta"), scheme)
    if fragments:
        q = pack_weight(q, scheme)
    scale, zero, factor = (None if t is None else _empty_on_gpu(t) for t in q[1:])
    return ExpertWeight(_empty_on_gpu(q.data), None, scale, zero, factor)


def _empty_on_gpu(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cuda")

"""A subject of the search for tiles, and a clock that is made up."""

import math

from moe_ops import get_scheme
from moe_ops.inspect.devices import TARGETS
from moe_ops.tuning.search import Subject

H200 = TARGETS["sm_90"].facts
A100 = TARGETS["sm_80"].facts
PACKED_SCHEMES = ("int8_w8a16", "mxfp4_w4a16", "mxfp4")
"""Schemes whose weights layers on an H200 pack."""
PLAIN_SCHEMES = ("unquantized", "fp8_block128", "fp8_channel", "fp8_w8a16_block128")
SCHEMES = (*PLAIN_SCHEMES, *PACKED_SCHEMES)


def subject(scheme="fp8_block128", sizes=(128, 768, 2048), top_k=8, row_tile=None, gpu=H200):
    return Subject(sizes, top_k, get_scheme(scheme), gpu._replace(row_tile=row_tile))


def kernel_of(trial):
    return getattr(trial.tiles, "kernel", None)


def plain_trial(layer, tokens, which):
    """Where the search for the kernel for all GPUs begins."""
    (trial,) = (t for t in layer.beginnings(tokens, which) if kernel_of(t) is None)
    return trial


class Clock:
    """Microseconds that tell how far tiles are from some that were made up."""

    def __init__(self, stop_after=math.inf, kernel=None, **best):
        self.best, self.stop_after, self.kernel = best, stop_after, kernel
        self.trials = []

    def __call__(self, trial):
        if len(self.trials) >= self.stop_after:
            raise KeyboardInterrupt
        self.trials.append(trial)
        if kernel_of(trial) != self.kernel:
            return 1e4 * trial.gemm
        steps = [
            abs(math.log2((1 + getattr(trial.tiles, size)) / (1 + value)))
            for size, value in self.best.items()
        ]
        return 100 * trial.gemm + 20 * sum(steps)

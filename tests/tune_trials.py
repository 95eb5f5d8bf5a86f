"""A subject of the search for tiles, and a clock that is made up."""

import math

from moe_ops import get_scheme
from moe_ops.pipeline.devices import TARGETS
from moe_ops.tuning.search import Subject

H200 = TARGETS["sm_90"].facts
SCHEMES = ("unquantized", "fp8_block128", "fp8_channel", "int8_w8a16", "mxfp4_w4a16", "mxfp4")


def subject(scheme="fp8_block128", sizes=(128, 768, 2048), top_k=8):
    return Subject(sizes, top_k, get_scheme(scheme), H200)


def kernel_of(trial):
    return getattr(trial.tiles, "kernel", None)


def plain_trial(layer, tokens, which, row_tile):
    """Where the search for the kernel for all GPUs begins."""
    (trial,) = (t for t in layer.beginnings(tokens, which, row_tile) if kernel_of(t) is None)
    return trial


class Clock:
    """Microseconds that tell how far tiles are from some that were made up."""

    def __init__(self, row_tile=None, stop_after=math.inf, kernel=None, **best):
        self.row_tile, self.best, self.stop_after = row_tile, best, stop_after
        self.kernel = kernel
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
        if self.row_tile:
            steps.append(abs(math.log2(trial.tiles.block_m / self.row_tile)) / 2)
        return 100 * trial.gemm + 20 * sum(steps)

"""Times `fused_moe` of one checkout when asked to; what `side_by_side.py` runs for each of two.

It uses nothing of the library but its public names, so that older checkouts can run it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

import moe_ops

BYTES = (0x3C, 0x3D, 0xBC, 0xBD)
"""Small finite numbers in every format: of either sign, as bf16, fp8, int8 or pairs of 4 bits."""


class Layer:
    """One shape in one process: weights of any scheme, from the same random bytes."""

    def __init__(self, sizes: tuple[int, int, int, int], activation: str) -> None:
        self.activation, self.pool = activation, None
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.num_experts, self.top_k, self.hidden, self.width = sizes
        shapes = ((2 * self.width, self.hidden), (self.hidden, self.width))
        self.stored = [(self._random(2 * self.num_experts * n * k), n, k) for n, k in shapes]

    def _random(self, count: int) -> Any:
        codes = torch.tensor(BYTES, dtype=torch.uint8, device=self.device)
        out = torch.empty(count, dtype=torch.uint8, device=self.device)
        for part in out.split(2**26):
            part.copy_(codes[torch.randint(len(BYTES), part.shape, device=self.device)])
        return out

    def weights(self, name: str) -> tuple[Any, Any, Any]:
        """Both weights, and their configuration."""
        experts, data, scales = self.num_experts, [], {}
        quant = moe_ops.get_scheme(name).weight
        for i, (raw, n, k) in enumerate(self.stored, 1):
            if quant is None:
                data.append(raw.view(torch.bfloat16).view(experts, n, k))
                continue
            width = quant.data_width(k)
            data.append(raw[: experts * n * width].view(quant.dtype).view(experts, n, width))
            value, dtype = 2e-3, torch.bfloat16 if quant.scale == "input" else torch.float32
            if quant.scale == "e8m0":
                value, dtype = 120, torch.uint8
            shape = quant.weight_scale_shape(experts, n, k)
            scales[f"w{i}_scale"] = torch.full(shape, value, dtype=dtype, device=self.device)
        config = None if quant is None else moe_ops.FusedMoEQuantConfig(name, **scales)
        return *data, config

    def call(self, scheme: str, tokens: int) -> Any:
        """What is timed: the replay of a graph, or on a CPU the call itself."""
        on_device = {"device": self.device}
        w1, w2, config = self.weights(scheme)
        generator = torch.Generator(**on_device).manual_seed(tokens)
        x = torch.randn(tokens, self.hidden, generator=generator, **on_device).bfloat16()
        logits = torch.randn(tokens, self.num_experts, generator=generator, **on_device)

        def run() -> Any:
            options = {"quant_config": config, "activation": self.activation}
            return moe_ops.fused_moe(x, w1, w2, logits, self.top_k, **options)

        run()
        if self.device == "cpu":
            return run
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):  # graphs run one after another
            run()
        self.pool = self.pool or graph.pool()
        graph.inputs = (x, logits, config)  # as long as the graph
        return graph.replay


def serve(sizes: list[int], activation: str, cells: list[Any]) -> None:
    """Capture all cells, then time those that stdin names: ``cell runs``, microseconds each."""
    layer = Layer(tuple(sizes), activation)
    with torch.no_grad():
        calls = [layer.call(*cell) for cell in cells]
        print("ready", flush=True)
        for line in sys.stdin:
            cell, runs = map(int, line.split())
            print(_median_us(calls[cell], runs), flush=True)


def _median_us(call: Any, runs: int) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - start)
    flush, events = torch.empty(2**28, dtype=torch.uint8, device="cuda"), []
    for _ in range(runs + 2):
        flush.zero_()  # weights are not in L2
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        call()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    return statistics.median([1e3 * first.elapsed_time(last) for first, last in events[2:]])


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))

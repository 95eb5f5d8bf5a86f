"""Plot a layer record as a roofline: achieved rates over arithmetic intensity.

Flops and bytes are those of the estimate (`moe_ops.bench.layer.layer_floor_us`): active weights,
tokens and outputs moved once, and the products of every slot. A point on the ceiling takes the
estimated time.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from tables import OURS

from moe_ops.bench.harness import HARDWARE
from moe_ops.bench.problems import Problem, load_problems, read_scheme
from moe_ops.inspect.costs import math_of
from moe_ops.scheme import Scheme

MARKERS = "os^Dv<>PX*hpd8"
"""Markers by implementation: the first, filled, is this library's; the others are hollow."""
COLORS = (*(f"C{i}" for i in range(10)), "navy", "gold", "darkgreen", "magenta")
"""Colours by shape; black is the ceiling's."""


class Work(NamedTuple):
    """The least work of one call."""

    flops: int
    nbytes: float

    @property
    def intensity(self) -> float:
        """Flops per byte."""
        return self.flops / self.nbytes


class Point(NamedTuple):
    """One row of a record."""

    shape: str
    impl: str
    tokens: int
    work: Work
    time_us: float

    @property
    def tflop_per_s(self) -> float:
        """Achieved TFLOP/s."""
        return 1e-6 * self.work.flops / self.time_us

    @property
    def tb_per_s(self) -> float:
        """Achieved TB/s, counting only bytes that must move."""
        return 1e-6 * self.work.nbytes / self.time_us


class Roof(NamedTuple):
    """The measured ceilings of a GPU for one dtype of products."""

    tflop_per_s: float
    tb_per_s: float
    math: str

    @property
    def ridge(self) -> float:
        """The intensity at which both ceilings meet."""
        return self.tflop_per_s / self.tb_per_s


def work_of(problem: Problem, scheme: Scheme, tokens: int, active_experts: int) -> Work:
    """The work of one call with tokens in bf16; per-expert scales are not counted."""
    hidden, inner = problem.hidden_size, problem.intermediate_size
    bits = sum(n * k * scheme.weight_bits(n, k) for n, k in ((2 * inner, hidden), (hidden, inner)))
    nbytes = active_experts * bits / 8 + 2 * tokens * hidden * 2
    return Work(2 * tokens * problem.top_k * 3 * hidden * inner, nbytes)


def points_of(rows: Iterable[dict[str, Any]]) -> list[Point]:
    """The points of the named shapes, in the order of tokens."""
    problems = load_problems()
    return [
        Point(
            row["shape"],
            row["impl"],
            row["M"],
            work_of(
                problems[row["shape"]],
                read_scheme(row["scheme"]),
                row["M"],
                row["config"]["active_experts"],
            ),
            row["time_us"],
        )
        for row in sorted(rows, key=lambda row: row["M"])
    ]


def roof_of(gpu: str, scheme: Scheme) -> Roof | None:
    """The ceilings of a GPU; None if its bandwidth and peak have not been measured."""
    speed, math = HARDWARE.get(gpu), math_of(scheme)
    return speed and Roof(1e-12 * speed.flops[math], 1e-12 * speed.read_bytes_per_s, math)


def plot(rows: list[dict[str, Any]], gpu: str, title: str, path: Path) -> None:
    """Draw one figure of the rows of one scheme and routing: flops and bytes per second."""
    points, roof = points_of(rows), roof_of(gpu, read_scheme(rows[0]["scheme"]))
    shapes = sorted({point.shape for point in points})
    impls = sorted({point.impl for point in points}, key=lambda impl: (impl != OURS, impl))
    figure, axes = plt.subplots(1, 2, figsize=(16, 6.5), layout="constrained")
    for axis, rate, unit in zip(
        axes, ("tflop_per_s", "tb_per_s"), ("TFLOP/s", "TB/s"), strict=True
    ):
        for shape in shapes:
            _draw([p for p in points if p.shape == shape], axis, rate, shapes, impls)
        if roof:
            _draw_roof(axis, roof, rate, [point.work.intensity for point in points])
        axis.set(
            xscale="log",
            yscale="log",
            ylabel=f"reached ({unit})",
            xlabel="arithmetic intensity (FLOP per byte that must move)",
        )
        for numbers in (axis.xaxis, axis.yaxis):
            numbers.set_major_formatter(_tick)
            numbers.set_minor_formatter(_tick)
        axis.grid(alpha=0.3)
    handles = _legend(shapes, impls)
    figure.legend(handles=handles, fontsize="small", loc="outside right center")
    tokens = ", ".join(map(str, sorted({point.tokens for point in points})))
    figure.suptitle(f"{title}; tokens, from left to right: {tokens}")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)


def _tick(number: float, _: int | None = None) -> str:
    """The label of a tick of a logarithmic axis."""
    return f"{number:g}" if f"{number:.0e}"[0] in "125" else ""


def _draw(points: list[Point], axis: Any, rate: str, shapes: list[str], impls: list[str]) -> None:
    """Draw the points of one shape."""
    for impl in impls:
        mine = [point for point in points if point.impl == impl]
        axis.plot(
            [point.work.intensity for point in mine],
            [getattr(point, rate) for point in mine],
            linewidth=1,
            linestyle="-" if impl == OURS else "",
            color=color(shapes.index(points[0].shape)),
            **marker(impl, impls),
        )


def color(number: int) -> str:
    """The colour of one of several shapes, which no other of them has."""
    if number >= len(COLORS):
        raise ValueError(f"shapes must be at most {len(COLORS)} to differ, got {number + 1}")
    return COLORS[number]


def marker(impl: str, impls: list[str]) -> dict[str, Any]:
    """The marker of one of several implementations, which no other of them has."""
    if len({OURS, *impls}) > len(MARKERS):
        raise ValueError(f"impls must be at most {len(MARKERS)} to differ, got {len(impls)}")
    number = 0 if impl == OURS else 1 + [i for i in impls if i != OURS].index(impl)
    hollow = {} if impl == OURS else {"markerfacecolor": "none"}
    return {"marker": MARKERS[number], "markersize": 6, **hollow}


def _draw_roof(axis: Any, roof: Roof, rate: str, intensities: list[float]) -> None:
    """Draw the ceiling: the lower of the compute limit and the memory limit."""
    low, high = min(roof.ridge, *intensities) / 1.5, max(6 * roof.ridge, *intensities) * 1.5
    names = f"{roof.tb_per_s:.2f} TB/s", f"{roof.tflop_per_s:.0f} TFLOP/s ({roof.math})"
    places, flops = (low, roof.ridge, high), rate == "tflop_per_s"
    if flops:
        heights = [min(roof.tflop_per_s, x * roof.tb_per_s) for x in places]
    else:
        heights = [min(roof.tb_per_s, roof.tflop_per_s / x) for x in places]
    axis.plot(places, heights, "--", color="black", linewidth=1.2)
    middle = (low * roof.ridge) ** 0.5
    for name, place, side in (
        (names[0], (middle, middle * roof.tb_per_s if flops else heights[0]), "right"),
        (names[1], (roof.ridge, heights[1]), "left"),
    ):
        offset = (-6, 6) if side == "right" else (8, 6 if flops else -6)
        axis.annotate(name, place, offset, textcoords="offset points", ha=side, fontsize="small")


def _legend(shapes: list[str], impls: list[str]) -> list[Line2D]:
    colors = [Line2D([], [], color=color(i), label=shape) for i, shape in enumerate(shapes)]
    markers = [
        Line2D([], [], color="black", linestyle="", label=impl, **marker(impl, impls))
        for impl in impls
    ]
    return [*colors, *markers, Line2D([], [], color="black", ls="--", label="ceiling (measured)")]

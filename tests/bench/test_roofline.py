"""The roofline: its points and ceilings against arithmetic by hand, and against the floors."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch

import moe_ops
from moe_ops.bench import problems

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
roofline = import_module("roofline")

RECORDS = sorted((ROOT / "benchmarks/results").glob("*/layer.json"))
# 8 experts of 3 * 2048 * 768 weights in bf16, a row in, a row out; 8 slots' products.
BYTES, FLOPS = 75505664, 75497472


def row(shape="qwen3-30b", m=1, impl="moe_ops", time_us=100.0, scheme="bf16", active=8):
    values = {"scheme": scheme, "shape": shape, "M": m, "impl": impl, "time_us": time_us}
    return {**values, "routing": "uniform", "floor_us": None, "config": {"active_experts": active}}


def test_points_land_where_the_arithmetic_says():
    (point,) = roofline.points_of([row()])
    assert point.work == (FLOPS, BYTES)
    assert point.work.intensity == pytest.approx(0.99989, rel=1e-4)
    assert point.tb_per_s == pytest.approx(BYTES / 100e-6 / 1e12)
    assert point.tflop_per_s == pytest.approx(FLOPS / 100e-6 / 1e12)
    (point,) = roofline.points_of([row(m=64, active=126, time_us=200.0)])
    assert point.work == (64 * FLOPS, 126 * 3 * 2048 * 768 * 2 + 2 * 64 * 2048 * 2)
    # A byte a weight, and a float32 scale for each 128 x 128.
    (point,) = roofline.points_of([row(scheme="fp8_block128")])
    assert point.work.nbytes == 8 * 3 * 2048 * 768 * (1 + 4 / 128**2) + 8192


def test_points_are_in_the_order_of_tokens():
    rows = [row(m=m, impl=impl) for m in (64, 1, 8) for impl in ("peer", "moe_ops")]
    assert [p.tokens for p in roofline.points_of(rows)] == [1, 1, 8, 8, 64, 64]


@pytest.mark.parametrize("name", moe_ops.SCHEMES)
def test_bytes_are_those_of_the_weights(name):
    experts = problems.make_experts(problems.TINY, name, torch.device("cpu"))
    work = roofline.work_of(problems.TINY, experts.scheme, 4, 3)
    expected = 3 * experts.bytes_per_expert + 2 * 4 * 64 * 2
    second_scales = 3 * 4 * (1 + 1 + 2 * 32 + 64)
    assert expected - second_scales <= work.nbytes <= expected, "all but scales beside the groups'"


def test_roof():
    bf16, fp8 = (
        roofline.roof_of("NVIDIA H200", problems.read_scheme(s)) for s in ("bf16", "fp8_block128")
    )
    assert (bf16.tflop_per_s, bf16.tb_per_s, bf16.math) == (758.0, 4.67, "bf16")
    assert fp8.tflop_per_s == 1490.0
    assert bf16.ridge == pytest.approx(162.31, rel=1e-4)
    assert roofline.roof_of("another GPU", problems.read_scheme("bf16")) is None


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_a_point_on_the_ceiling_takes_its_floor(path):
    record = json.loads(path.read_text())
    checked = 0
    for measured in record["rows"]:
        roof = roofline.roof_of(record["gpu"], problems.read_scheme(measured["scheme"]))
        if roof and measured["floor_us"]:
            (point,) = roofline.points_of([{**measured, "time_us": measured["floor_us"]}])
            reached = max(point.tflop_per_s / roof.tflop_per_s, point.tb_per_s / roof.tb_per_s)
            assert reached == pytest.approx(1.0, rel=1e-6)
            checked += 1
    assert checked or not any(row["floor_us"] for row in record["rows"])


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "another GPU"])
def test_what_is_drawn(monkeypatch, tmp_path, gpu):
    figures = []
    monkeypatch.setattr(roofline.plt, "close", figures.append)
    rows = [row(m=m, active=8 * m) for m in (8, 1)]
    rows += [row(impl="peer", time_us=400.0), row("mixtral", active=2)]
    roofline.plot(rows, gpu, "title", tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").stat().st_size > 0
    (figure,) = figures
    flops, nbytes = figure.axes
    drawn = [
        (line.get_marker(), line.get_markerfacecolor(), *line.get_xdata(), *line.get_ydata())
        for line in nbytes.lines
        if len(line.get_xdata()) and line.get_marker() != "None"
    ]
    one, peer = roofline.points_of(rows[1:3])
    assert ("s", "none", peer.work.intensity, peer.tb_per_s) in drawn, "peers are hollow"
    (ours,) = [line for line in drawn if len(line) == 6]
    assert ours[0] == "o" and ours[1] != "none"
    assert (ours[2], ours[4]) == (one.work.intensity, one.tb_per_s), "from few tokens to many"
    ceilings = [axis.lines[-1] for axis in (flops, nbytes) if gpu == "NVIDIA H200"]
    for line, height in zip(ceilings, (758.0, 4.67), strict=False):
        assert line.get_linestyle() == "--" and max(line.get_ydata()) == pytest.approx(height)
    assert "another" not in gpu or not any(line.get_linestyle() == "--" for line in flops.lines)
    assert ("TFLOP/s" in flops.get_ylabel()) and ("TB/s" in nbytes.get_ylabel())
    roofline.plt.figure()


def test_every_line_of_a_plot_has_a_look_of_its_own(tmp_path, monkeypatch):
    """One legend beside the panels names all; the estimate is no floor."""
    plot, figures = import_module("plot"), []
    monkeypatch.setattr(roofline.plt, "close", figures.append)
    impls = ["moe_ops", *(f"peer {i}" for i in range(8))]
    rows = [row("mixtral", impl=impl) for impl in impls] + [row() | {"floor_us": 50.0}]
    plot.plot(rows, "title", tmp_path / "layer.png")
    roofline.plot(rows, "NVIDIA H200", "title", tmp_path / "roofline.png")
    for figure in figures:
        assert not any(axis.get_legend() for axis in figure.axes)
        (legend,) = figure.legends
        looks = {h.get_label(): h.get_marker() for h in legend.legend_handles}
        assert {*impls} <= {*looks} and "floor" not in looks
        assert len({looks[impl] for impl in impls}) == len(impls)
    assert "estimate" in {line.get_label() for line in figures[0].axes[1].lines}
    shapes = [*problems.load_problems()][:12]
    roofline.plot([row(shape) for shape in shapes], "a GPU", "title", tmp_path / "shapes.png")
    handles = figures[-1].legends[0].legend_handles
    looks = {handle.get_label(): handle.get_color() for handle in handles}
    assert len({looks[shape] for shape in shapes}) == 12
    with pytest.raises(ValueError, match="shapes must be at most 14"):
        roofline.color(14)
    with pytest.raises(ValueError, match="impls must be at most 14"):
        roofline.marker("0", [str(i) for i in range(14)])

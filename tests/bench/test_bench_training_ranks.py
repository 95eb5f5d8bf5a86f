"""The benchmark of forward and backward over ranks, on two of them without a GPU."""

import bench_training_ranks as bench
import pytest
import torch
import training_report
from ranks import spawn

from moe_ops.bench.problems import TINY as LAYER

BACKENDS = ["symmetric", "allgather_reducescatter"]


def check_rows(rank, ranks):
    rows = list(bench.rows_of(LAYER, 5, BACKENDS, torch.device("cpu")))
    assert [(row.impl, row.ranks) for row in rows] == [
        (bench.ONE_GPU, 1), *((backend, ranks) for backend in BACKENDS),
    ]  # fmt: skip
    sizes = LAYER.hidden_size * LAYER.intermediate_size
    flops = 6 * 5 * LAYER.top_k * 3 * sizes
    for row in rows:
        seconds = (row.forward_us + row.backward_us) / 1e6
        assert row.tflop_per_s == pytest.approx(flops / seconds / 1e12)
        assert 0 <= row.rel_err < bench.MAX_REL_ERR
        third = row.forward_tflop_per_s * row.forward_us
        assert row.backward_tflop_per_s * row.backward_us == pytest.approx(2 * third)


def check_refusal(rank, ranks):
    right = bench.Step.run

    def wrong(step, mark):
        results, marks = right(step, mark)
        if len(step.layer.w13_weight) < LAYER.num_experts:
            results["w2_weight"] = results["w2_weight"].roll(1, 0)
        return results, marks

    bench.Step.run = wrong
    with pytest.raises(ArithmeticError, match="relative error of w2_weight must be below"):
        list(bench.rows_of(LAYER, 5, BACKENDS, torch.device("cpu")))


@pytest.mark.parametrize("check", [check_rows, check_refusal])
def test_two_ranks(check):
    """Each exchange has a row; results that differ from one rank's have none."""
    spawn(check, 2)


def test_report():
    """One GPU first; TFLOP/s are those of one GPU."""
    fixed = {"shape": "tiny", "M": 5, "forward_us": 2000.0, "backward_us": 4004.0, "rel_err": 0.0}
    speeds = {"tflop_per_s": 31.6, "forward_tflop_per_s": 20.2, "backward_tflop_per_s": 40.4}
    rows = [
        {**fixed, **speeds, "impl": impl, "ranks": ranks}
        for impl, ranks in (("symmetric", 2), (bench.ONE_GPU, 1))
    ]
    header = dict.fromkeys(("gpu", "driver", "torch", "triton", "date"), "-")
    text = training_report.over_ranks([{**header, "commit": "0", "rows": rows}])
    first, second = text.splitlines()[-2:]
    assert first == "| tiny | one GPU | 5 | 2.00 | 4.00 | 32 | 20 | 40 |"
    assert second == "| tiny | 2 GPUs, `symmetric` | 5 | 2.00 | 4.00 | 32 | 20 | 40 |"

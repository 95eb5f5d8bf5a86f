"""The record of tuned tiles as a table."""

import tuning_report


def test_the_record_as_a_table():
    row = {"scheme": "bf16", "shape": "mixtral", "gemm": 1, "commit": "0123456789"}
    rows = [{**row, "M": 8, "ratio": 1.0}, {**row, "M": 64, "ratio": 1.034}]
    rows.append({**rows[0], "shape": "qwen3-30b"})
    head = dict.fromkeys(("gpu", "driver", "torch", "triton", "commit", "date"), "x")
    lines = tuning_report.report([{**head, "rows": rows}]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[-2:]]
    assert cells == [["`bf16`", "mixtral", "1.00", "1.03"], ["`bf16`", "qwen3-30b", "1.00", "-"]]
    assert tuning_report.report([]) == tuning_report.NONE

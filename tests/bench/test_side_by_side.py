"""Two checkouts, timed in turns."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_checkout_beside_itself(tmp_path):
    output = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "benchmarks/side_by_side.py"), str(ROOT), str(ROOT)]
    cells = ["--scheme", "unquantized,mxfp4_w4a16", "--tokens", "1,5", "--rounds", "1"]
    ran = subprocess.run(
        [*command, "--model", "tiny", *cells, "--output", str(output)],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(output.read_text())["rows"]
    assert [(row["scheme"], row["M"]) for row in rows] == [
        ("unquantized", 1), ("unquantized", 5), ("mxfp4_w4a16", 1), ("mxfp4_w4a16", 5),
    ]  # fmt: skip
    assert all(row["before_us"] > 0 and row["after_us"] > 0 for row in rows)
    assert "geometric mean" in ran.stdout

"""The README's examples run, and its table is the one that the data makes."""

import re
from pathlib import Path

import pytest

from moe_ops.support import block_scaled_note, support_table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_table():
    """What `python -m moe_ops.support` prints."""
    assert f"{support_table()}\n\n{block_scaled_note()}\n" in README


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number, monkeypatch):
    monkeypatch.chdir(ROOT)
    if "transformers" in EXAMPLES[number]:
        pytest.importorskip("transformers")
    exec(compile(EXAMPLES[number], f"README example {number + 1}", "exec"), {"__name__": "readme"})


def test_both_commands_are_named():
    assert "make demo" in README and "make test" in README
    assert len(EXAMPLES) == 6

"""The snippets of the tutorial run one after the other, and its table holds what they print."""

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorials/quantize.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_tutorial(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "tutorial"}
    for number, snippet in enumerate(SNIPPETS, 1):
        exec(compile(snippet, f"tutorial snippet {number}", "exec"), names)
    printed = re.findall(r"^(\w+) +([\d.]+) MB, perplexity ([\d.]+)", capsys.readouterr().out, re.M)
    found = {name: tuple(map(float, numbers)) for name, *numbers in printed}
    assert found.keys() >= {"plain", "nvfp4", "mixed"} and len(found) == 8
    table = re.findall(r"^\| `?(\w+)`?[^|]* \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M)
    assert len(table) == 6
    for name, size, quality in table:
        assert found[name][0] == float(size), name
        assert found[name][1] == pytest.approx(float(quality), rel=2e-3), name

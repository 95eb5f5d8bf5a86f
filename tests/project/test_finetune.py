"""A few steps of `examples/finetune.py`: every way learns, and both implementations agree."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def example(monkeypatch):
    path = ROOT / "examples" / "finetune.py"
    spec = importlib.util.spec_from_file_location("finetune", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BATCH", 4)
    monkeypatch.setattr(module, "CONTEXT", 64)
    return module


def losses(row):
    return row["losses"]


@pytest.mark.slow
def test_finetuning(example):
    """Both implementations differ by no more than transformers' own two do."""
    example.WAYS["all weights, eager"] = (lambda: example.load("eager"), example.FULL_RATE)
    train_on, held = example.windows()
    rows = {way: example.train(way, train_on[:24], held[:4], 6) for way in example.WAYS}
    for way, row in rows.items():
        assert row["heldout_after"] < row["heldout_before"] - 0.3, way
        assert min(losses(row)[1:]) < losses(row)[0], way
    ours, theirs, eager = (
        losses(rows[f"all weights, {name}"]) for name in ("moe_ops", "grouped_mm", "eager")
    )
    assert ours != theirs
    rounding = max(abs(a - b) for a, b in zip(theirs, eager, strict=True))
    rounding += 2 * torch.finfo(torch.float32).eps * theirs[0]
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 4 * rounding
    plain, small = (row for way, row in rows.items() if way.startswith("LoRA"))
    assert plain["trained_parameters"] == small["trained_parameters"]
    assert small["experts_bytes"] < plain["experts_bytes"] / 5
    assert abs(losses(plain)[-1] - losses(small)[-1]) < 0.05


def test_the_record_is_of_this_example(example):
    record = json.loads((ROOT / "benchmarks/results/finetune.json").read_text())
    assert [row["way"] for row in record["rows"]] == list(example.WAYS)
    for row in record["rows"]:
        assert row["heldout_after"] < row["heldout_before"]

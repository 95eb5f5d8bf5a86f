"""The parts of the demo that run no model; `make demo` runs the rest, and checks what it claims."""

import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from moe_ops.demo import comparison as demo  # noqa: E402
from moe_ops.demo import records  # noqa: E402
from moe_ops.demo.program import of_any_length  # noqa: E402


def result(**changes):
    same = demo.Result(30.0, [torch.zeros(3, 4)], 1.0, [1, 2], 1.0, False, 0, 1)
    return same._replace(**changes)


def judged(**changes):
    """What the demo says of a compiled run that differs from the others in ``changes``."""
    grouped = result(logits=[torch.full((3, 4), 1e-6)])
    compiled = result(**changes)
    runs = (result(), grouped, result(), compiled)
    return list(demo.judge_claims(dict(zip(demo.RUNS, runs, strict=True)), [False]).values())


def test_equal_runs_hold():
    assert judged() == [True, True, True]
    assert judged(logits=[torch.full((3, 4), 3e-6)]) == [True, True, True]


@pytest.mark.parametrize(
    ("changes", "claims"),
    [
        ({"tokens": [1, 3]}, [False, True, True]),
        ({"perplexity": 30.002}, [True, False, True]),
        ({"logits": [torch.full((3, 4), 5e-6)]}, [True, False, True]),
        ({"compilations": 2}, [True, True, False]),
        ({"graph_breaks": 1}, [True, True, False]),
    ],
)
def test_every_claim_can_fail(changes, claims):
    assert judged(**changes) == claims


def test_windows_with_a_router_tie_are_not_compared():
    near, far = result(logits=[torch.zeros(3, 4)] * 2), result()
    far = far._replace(logits=[torch.zeros(3, 4), torch.ones(3, 4)])
    assert demo.difference(near, far, [False, True]) == 0
    assert demo.difference(near, far, [False, False]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_first_that_no_kernel_runs(monkeypatch, capsys):
    model = SimpleNamespace(num_parameters=lambda: 1)
    made = {
        "load": model, "find_router_ties": [False], "measure_model": result(),
        "quality_lines": [["experts in"]],
    }  # fmt: skip
    for name, value in made.items():
        monkeypatch.setattr(demo, name, lambda *given, value=value, **more: value)
    monkeypatch.setattr("sys.argv", ["demo"])
    demo.main()
    printed = capsys.readouterr().out
    assert 0 < printed.index("No kernel runs here") < printed.index("experts run by")


def test_tokens_are_copied():
    tokens = torch.arange(5)
    batch = of_any_length(tokens[-1:])
    assert batch.tolist() == [[4]] and batch.stride() == (1, 1)
    batch.zero_()
    assert tokens[-1] == 4


def test_recorded_times(tmp_path):
    folder = tmp_path / "nvidia-h100-80gb-hbm3"
    folder.mkdir()
    row = {"shape": "qwen3-30b", "scheme": "bf16", "M": 64, "routing": "uniform"}
    rows = [{**row, "impl": "moe_ops", "time_us": 1234.4}]
    rows.append({**rows[0], "routing": "zipf", "time_us": 1.0})
    (folder / "layer.json").write_text(json.dumps({"rows": rows}))
    assert records.missing(tmp_path) == ["NVIDIA H200"]
    head, *lines = records.kernel_lines(tmp_path)
    assert head[-2:] == ["us on H100", "grouped_mm us"]
    assert len(lines) == len(records.LAYERS) * len(records.TOKENS)
    assert [line[-2:] for line in lines][:3] == [["-", "-"], ["1,234", "-"], ["-", "-"]]


def test_without_records_there_is_what_explain_says(tmp_path):
    head, first, *_ = records.kernel_lines(tmp_path)
    assert head == ["layer", "tokens", "kernel of GEMM 1", "estimate us"]
    assert not records.missing(tmp_path), "no GPU is named"
    assert first[:2] == ["qwen3-30b, bf16", "1"] and float(first[3]) > 0


def test_a_prompt_has_words(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["demo", "--prompt", ""])
    with pytest.raises(SystemExit, match="2"):
        demo.parse_arguments()
    assert "--prompt must not be empty" in capsys.readouterr().err

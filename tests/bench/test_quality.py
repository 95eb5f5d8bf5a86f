"""What schemes cost in quality: the measure itself, its record, its table."""

import re
import sys
from importlib import import_module

import pytest
import torch

import moe_ops

pytest.importorskip("transformers")
quality = import_module("quality")
quality_report = import_module("quality_report")
NAMES = ("unquantized", "int8_w8a16", "fp8_block128", "int4_w4a16_g32", "int4_w4a16_channel")


@pytest.fixture(scope="module")
def model():
    return quality.load("cpu")


@pytest.fixture(scope="module")
def windows():
    return quality.windows_of(quality.heldout_text(), 6)


@pytest.fixture(scope="module")
def peaks(model, windows):
    return quality.calibrate(model, windows[4:])


@pytest.fixture(scope="module")
def rows(model, windows, peaks):
    return {row["scheme"]: row for row in quality.measure(model, NAMES, windows[:4], peaks)}


def test_schemes_in_their_order(rows):
    """Fewer bits and coarser groups move the model further, each clearly."""
    costs = [rows[name]["kl"] for name in NAMES]
    assert all(2 * better < worse for better, worse in zip(costs[:3], costs[1:4], strict=True))
    assert rows["int4_w4a16_g32"]["kl"] < rows["int4_w4a16_channel"]["kl"]
    agreements = [rows[name]["top1_agreement"] for name in NAMES]
    assert agreements == sorted(agreements, reverse=True) and agreements[-1] > 0.8


def test_unquantized_is_transformers_loop(model, windows, rows):
    """The same model but for float32's rounding, far below what any scheme costs."""
    row = rows["unquantized"]
    assert abs(row["kl"]) < rows["int8_w8a16"]["kl"] / 1e4
    assert row["top1_agreement"] == 1
    with torch.no_grad():
        loss = torch.stack([model(w[None], labels=w[None]).loss for w in windows[:4]]).mean()
    assert row["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-5)


def test_divergence_by_hand():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    sums = quality.Sums()
    sums.add(p.double(), q + 3, torch.tensor([1]))  # logits need not be normalized
    sums.add(p.double(), p - 1, torch.tensor([2]))
    row = sums.row()
    assert row["kl"] == pytest.approx(0.25 * torch.tensor(2.0).log().item() / 2)
    assert row["perplexity"] == pytest.approx(8**0.5)
    assert row["top1_agreement"] == 0.5


def test_model_is_itself_again(model, windows, peaks):
    experts = [layer.mlp.experts for layer in model.model.layers]
    quality.measure(model, ["int4_w4a16_g32"], windows[:1], peaks)
    assert all(a is b.mlp.experts for a, b in zip(experts, model.model.layers, strict=True))


def test_static_scales_are_the_peaks(model, windows, peaks):
    """The largest magnitudes of both GEMMs' inputs, over 448."""
    scheme = moe_ops.get_scheme("fp8_tensor_static")
    layer = model.model.layers[2].mlp
    seen = []
    hook = layer.experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    with torch.no_grad():
        for window in windows[4:]:
            model(window[None])
    hook.remove()
    config = quality.QuantizedExperts(layer.experts, scheme, peaks[2]).config
    assert config.a1_scale == max(x.abs().max() for x, *_ in seen) / 448
    widest = torch.zeros(())
    for x, ids, _ in seen:
        rows = torch.einsum("th,enh->ten", x, layer.experts.gate_up_proj)
        gate, up = rows[torch.arange(len(x))[:, None], ids].chunk(2, -1)
        widest = torch.maximum(widest, (torch.nn.functional.silu(gate) * up).abs().max())
    assert config.a2_scale.item() == pytest.approx(widest.item() / 448, rel=1e-5)


@pytest.mark.parametrize("name", moe_ops.SCHEMES)
def test_bytes_are_those_of_the_scheme(name, model, peaks):
    """A scheme counts all of them but one global scale of each weight."""
    scheme, experts = moe_ops.get_scheme(name), model.model.layers[0].mlp.experts
    module = quality.QuantizedExperts(experts, scheme, peaks[0])
    shapes = [w.shape[1:] for w in (experts.gate_up_proj, experts.down_proj)]
    size = sum(scheme.weight_bits(n, k) * n * k / 8 for n, k in shapes)
    config = module.config
    factors = (config.w1_gscale, config.w2_gscale, config.g1_alphas, config.g2_alphas)
    size += sum(4 for x in factors if x is not None and x[0].numel() == 1)
    assert module.bytes_per_expert == size


def test_records_merge_by_scheme(tmp_path, monkeypatch):
    monkeypatch.setattr(quality_report, "plt", None)

    def save(tokens, **costs):
        rows = [{"scheme": name, "kl": kl} for name, kl in costs.items()]
        quality_report.save({"tokens": tokens, "rows": rows}, tmp_path)
        return {row["scheme"]: row["kl"] for row in quality_report.read(tmp_path)["rows"]}

    assert save(512, a=1, b=2) == {"a": 1, "b": 2}
    assert save(512, b=3, c=4) == {"a": 1, "b": 3, "c": 4}
    assert save(256, d=5) == {"d": 5}


def test_an_unknown_scheme_is_said_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quality.py", "--schemes", "fp8_channel", "fp7"])
    with pytest.raises(SystemExit, match="2"):
        quality.main()
    assert "argument --schemes: scheme must be one of" in capsys.readouterr().err


def test_training_text_is_not_heldout(monkeypatch):
    kept, touching = "Some text\n\nof a document.\n", quality.heldout_text()[:5000]
    monkeypatch.setitem(
        sys.modules,
        "demo_corpus",
        type("corpus", (), {"build_corpus": lambda: ([touching, kept], [])}),
    )
    assert quality.training_text() == kept


@pytest.fixture(scope="module")
def record():
    return quality_report.read()


def test_the_record_has_every_scheme(record):
    assert set(moe_ops.SCHEMES) <= {row["scheme"] for row in record["rows"]}
    assert record["tokens"] >= 20_000


def test_the_table_has_a_line_for_every_scheme(record):
    text = quality_report.table(record)
    named = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(named) == sorted(row["scheme"] for row in record["rows"])
    assert text.endswith(quality_report.source(record))


def test_labels_are_moved_apart():
    assert quality_report.spread([1.0, 2.0, 3.0], 0.5) == [1.0, 2.0, 3.0]
    moved = quality_report.spread([1.0, 1.0, 1.1, 5.0], 0.5)
    assert moved == sorted(moved) and sum(moved) == pytest.approx(8.1)
    assert min(b - a for a, b in zip(moved, moved[1:], strict=False)) >= 0.5 - 1e-9


def test_labels_of_the_plot_do_not_overlap(record):
    """As drawn: no label covers another one, a point, or the edge of its panel."""
    text = pytest.importorskip("matplotlib.text")
    figure = quality_report.draw(record)
    figure.draw_without_rendering()
    covered = []
    for axis in figure.axes:
        panel = axis.get_window_extent()
        boxes = {t.get_text(): text.Text.get_window_extent(t) for t in axis.texts}  # no lines
        points = [axis.transData.transform(line.get_xydata()[0]) for line in axis.lines]
        for name, box in boxes.items():
            inside = box.x1 < panel.x1 and panel.y0 < box.y0 and box.y1 < panel.y1
            others = any(box.overlaps(other) for o, other in boxes.items() if o != name)
            covered += [name] * (others or not inside or any(box.contains(*p) for p in points))
    assert not covered
    quality_report.plt.close(figure)

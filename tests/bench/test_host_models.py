"""Whole models with experts in host memory: routings, what runs beside, rows, tables; hit rates."""

import itertools
import json
import random
from importlib import import_module

import pytest
import torch

transformers = pytest.importorskip("transformers")

NAMES = ("bench_host_models", "drawn_routings", "hit_rates", "host_table", "moved_weights")
bench, drawn, hits, host_table, moved = map(import_module, NAMES)
whole = bench.whole_models

import moe_ops  # noqa: E402

CPU = torch.device("cpu")


# Routings


def test_draws_follow_their_odds():
    """The first of k is expert r with odds 1 / r, in an order of each layer's own."""
    logits = drawn.drawn_logits("zipf", 20000, 2, 1, 8)
    for layer in range(2):
        first = logits[:, layer, 0].argmax(-1).bincount(minlength=8) / 20000
        expected = (1 / torch.arange(1, 9)) / (1 / torch.arange(1, 9)).sum()
        torch.testing.assert_close(first.sort(descending=True).values, expected, rtol=0.1, atol=0)
    orders = logits.mean(0)[:, 0].argsort(-1)
    assert not torch.equal(*orders)
    flat = drawn.drawn_logits("uniform", 20000, 1, 1, 8)[:, 0, 0].argmax(-1).bincount() / 20000
    torch.testing.assert_close(flat, torch.full((8,), 1 / 8), rtol=0.1, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-gpt-oss"])
def test_routers_choose_what_was_drawn(name):
    model = whole.filled(whole.shell(whole.SPECS[name], None, torch.bfloat16, "bf16"), CPU)
    model.set_experts_implementation("moe_ops")
    routers = drawn.DrawnRouters(whole.moe_blocks(model), "zipf", 3, 4)
    step = whole.decode(model, 3, 20)
    seen = []
    for block in whole.moe_blocks(model):
        block.experts.register_forward_pre_hook(lambda m, args: seen.append(args[1].clone()))
    for number in range(5):
        seen.clear()
        routers.advance()
        step.call()
        logits = routers.logits[number % 4]
        for ids, wanted in zip(seen, logits, strict=True):  # of ties any is right
            chosen = wanted.gather(1, ids.long()).sort(-1, descending=True).values
            assert torch.equal(chosen, wanted.topk(2).values)
    routers.remove()
    seen.clear()
    step.call()
    chosen = logits[0].gather(1, seen[0].long()).sort(-1, descending=True).values
    assert not torch.equal(chosen, logits[0].topk(2).values)


# The command


def run(tmp_path, *arguments):
    code = bench.main(["--output", str(tmp_path), "--steps", "3", *arguments])
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*/host_models.json")]
    return code, [row for record in records for row in record["rows"]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_rows(tmp_path, monkeypatch, capsys):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(moved, "import_module", missing)
    code, rows = run(tmp_path, "--model", "tiny-qwen3,tiny-gpt-oss", "--scheme", "int8_w8a16,bf16",
                     "--resident", "0.5", "--routing", "zipf")  # fmt: skip
    assert code == 0 and len(rows) == 16
    for row in rows:
        if row["impl"] == bench.ACCELERATE:
            assert "No module named 'accelerate.hooks'" in row["skipped"]
            continue
        assert row["same_bits"] and row["tokens_per_s"] > 0 and row["skipped"] is None
        assert (row["hit_rate"] is None) == (row["impl"] != "moe_ops")
        if row["impl"] == bench.ALL:
            assert row["copied_gb"] == 0
    by_impl = {row["impl"]: row for row in rows if row["model"] == "tiny-qwen3"}
    assert 0 < by_impl["moe_ops"]["hit_rate"] < 1
    assert 0 < by_impl["moe_ops"]["copied_gb"] < by_impl[bench.COPIES]["copied_gb"]
    monkeypatch.setattr(host_table, "RESULTS", tmp_path)
    text = host_table.models()
    assert text.startswith("## Whole models") and text.count("| `tiny-qwen3` |") == 2
    for wrong in ("4", "1.5", "20GB"):
        with pytest.raises(SystemExit):
            run(tmp_path, "--model", "tiny-qwen3", "--resident", wrong)
    assert run(tmp_path / "late", "--time-budget-s", "0") == (0, [])


def test_without_a_record_the_guide_shows_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(host_table, "RESULTS", tmp_path)
    assert host_table.models() == host_table.hit_rates() == ""


@torch.no_grad()
def test_copied_layers_hold_one_layer_at_a_time():
    """Layers of equal sizes share one place, and come back as they were."""
    modules = [torch.nn.Linear(4, 4) for _ in range(3)]
    x, before = torch.randn(2, 4), [[*m.state_dict().values()] for m in modules]
    expected = [m(x) for m in modules]
    copied = moved.CopiedLayers(modules, CPU)
    assert len({m.weight.data_ptr() for m in modules}) == 1
    assert copied.nbytes == 3 * 4 * (16 + 4)
    for m, y in zip(modules, expected, strict=True):
        assert torch.equal(m(x), y)
    copied.remove(CPU)
    for m, state in zip(modules, before, strict=True):
        assert all(map(torch.equal, m.state_dict().values(), state))
    assert torch.equal(modules[0](x), expected[0])


# Hit rates


def traces(experts=6, top_k=2, steps=40):
    rng = random.Random(0)
    odds = [1 / (r + 1) for r in range(experts)]
    for _ in range(20):
        trace = []
        while len(trace) < steps:
            call = list(dict.fromkeys(rng.choices(range(experts), odds, k=9)))[:top_k]
            trace += [call] if len(call) == top_k else []
        yield trace


def test_lru_is_what_the_slots_do():
    """With one expert a call, so that no two were used last in the same call."""
    layer = moe_ops.FusedMoE(6, 1, 8, 8, resident_experts=3)
    x, logits = torch.randn(1, 8), torch.randn(1, 6)
    for trace in itertools.islice(traces(top_k=1), 5):
        layer.renew_slots()
        with torch.no_grad():
            for number, call in enumerate(trace):
                if number == 20:
                    before = layer.offload_stats().hits
                layer(x, logits, topk_ids=torch.tensor([call]))
        assert layer.offload_stats().hits - before == hits.lru(trace, 3)


def most_hits(trace, slots):
    """The most hits of any policy in the second half, by trying all that slots can hold."""
    states = {frozenset(held): 0 for held in itertools.combinations(range(6), slots)}
    for wanted in trace[len(trace) // 2 :]:
        reached = {}
        for held, count in states.items():
            count += len(held & {*wanted})
            for kept in itertools.combinations(sorted(held | {*wanted}), slots):
                kept = frozenset(kept)
                reached[kept] = max(count, reached.get(kept, 0))
        states = reached
    return max(states.values())


def test_no_policy_exceeds_the_best():
    for trace in itertools.islice(traces(steps=24), 8):
        for slots in (2, 3, 4):
            most = hits.best(trace, slots)
            assert most == most_hits(trace, slots)
            assert all(run(trace, slots) <= most for run in hits.POLICIES.values())


def test_policies_of_a_known_trace():
    trace = [[0], [0], [0], [1], [2], [0], [1], [2], [3], [0]]
    assert [run(trace, 2) for run in hits.POLICIES.values()] == [0, 2, 3, 3]


def test_recorded_routings_are_those_of_single_tokens(capsys):
    for name, (layers, experts) in hits.recorded(2, 5).items():
        assert experts == 16 and len(layers) == 4, name
        assert all(len(trace) == 8 and len(call) == 4 for trace in layers for call in trace)
    assert hits.drawn("zipf", 16, 4, 2, 6) == hits.drawn("zipf", 16, 4, 2, 6)
    rows = hits.rates("x", hits.drawn("zipf", 16, 4, 2, 6), 16)
    assert [row["slots"] for row in rows] == [4, 8]

"""Shares of wanted experts that are on the GPU already: LRU beside LFU, a fixed set and the best.

python benchmarks/hit_rates.py                              # prints a table
python benchmarks/hit_rates.py --output benchmarks/results  # and writes hit_rates.json

Routings of one token a call: those of the demo's model while it continues prompts from its held-out
text, and while it reads this text token by token; and draws by Zipf's law and of equal odds
(`drawn_routings.py`). Each policy has the same slots. Only the second half of a trace counts.

* LRU: the slot whose expert was wanted longest ago makes room, as on the device.
* LFU: the slot whose expert was wanted least often so far.
* static: the experts that the first half wanted most often. Other experts are copied for one call,
  to memory beside these slots.
* best: what no policy exceeds. It knows the second half, and keeps what is wanted soonest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from drawn_routings import drawn_logits
from torch import nn
from transformers import AutoTokenizer
from transformers import logging as transformers_logging

from moe_ops.bench.command import Lines, progress
from moe_ops.demo import MODEL
from moe_ops.demo.program import Program, load

SHARES = (1 / 8, 1 / 4, 1 / 2)
PROMPTS, PROMPT, WRITTEN = 8, 32, 256
"""Prompts of the demo's model, tokens of each, and tokens that it writes to each."""
DRAWN = {"qwen3-30b": (128, 8), "gpt-oss-120b": (128, 4)}
"""E and k of models whose routings are drawn."""
DRAWN_LAYERS, DRAWN_STEPS = 4, 2048
WIDTHS = {
    "trace": 22, "num_experts": 11, "top_k": 5, "slots": 5, "lru": 7, "lfu": 7, "static": 7,
    "best": 7,
}  # fmt: skip

Trace = list[list[int]]
"""The experts that each call of a layer wants."""
Policy = Callable[[Trace, int], int]
"""Hits in the second half of a trace, with a number of slots."""


def _evicting(trace: Trace, slots: int, value: Callable[[int, Counter, dict], Any]) -> int:
    """Hits of a policy that evicts the experts of the smallest ``value``, and no wanted one.

    Args:
        trace: see `Trace`.
        slots: K, at least the experts of a call.
        value: of an expert, by how often and when experts were wanted.
    """
    slot_of: dict[int, int] = {}
    counts: Counter = Counter()
    last: dict[int, int] = {}
    hits = 0
    for now, wanted in enumerate(trace):
        missing = sorted(expert for expert in wanted if expert not in slot_of)
        if now >= len(trace) // 2:
            hits += len(wanted) - len(missing)
        counts.update(wanted)
        last.update(dict.fromkeys(wanted, now))
        free = [slot for slot in range(slots) if slot not in slot_of.values()]
        victims = sorted(
            (expert for expert in slot_of if expert not in wanted),
            key=lambda expert: (*value(expert, counts, last), slot_of[expert]),
        )
        free += [slot_of.pop(expert) for expert in victims[: max(0, len(missing) - len(free))]]
        slot_of.update(zip(missing, free, strict=False))
    return hits


def lru(trace: Trace, slots: int) -> int:
    """Hits if the expert that was wanted longest ago makes room."""
    return _evicting(trace, slots, lambda expert, counts, last: (last[expert],))


def lfu(trace: Trace, slots: int) -> int:
    """Hits if the expert that was wanted least often makes room; of several, the oldest."""
    return _evicting(trace, slots, lambda expert, counts, last: (counts[expert], last[expert]))


def static(trace: Trace, slots: int) -> int:
    """Hits of the experts that the first half wanted most often."""
    half = len(trace) // 2
    counts = Counter(expert for wanted in trace[:half] for expert in wanted)
    kept = {expert for expert, _ in counts.most_common(slots)}
    return sum(expert in kept for wanted in trace[half:] for expert in wanted)


def best(trace: Trace, slots: int) -> int:
    """Hits if the slots keep the experts that are wanted soonest, from the second half's start."""
    later = trace[len(trace) // 2 :]
    uses: dict[int, list[int]] = {}
    for now, wanted in reversed([*enumerate(later)]):
        for expert in wanted:
            uses.setdefault(expert, []).append(now)

    def soonest(experts: set[int]) -> set[int]:
        later_uses = ((uses[expert][-1], expert) for expert in experts if uses[expert])
        return {expert for _, expert in sorted(later_uses)[:slots]}

    held, hits = soonest({*uses}), 0
    for wanted in later:
        hits += sum(expert in held for expert in wanted)
        for expert in wanted:
            uses[expert].pop()
        held = soonest(held | {*wanted})
    return hits


POLICIES: dict[str, Policy] = {"lru": lru, "lfu": lfu, "static": static, "best": best}


def rates(name: str, traces: list[Trace], experts: int) -> list[dict[str, Any]]:
    """A row for each number of slots: the share of hits of all layers by each policy."""
    top_k, rows = len(traces[0][0]), []
    wanted = sum(len(call) for trace in traces for call in trace[len(trace) // 2 :])
    for slots in sorted({max(top_k, int(share * experts)) for share in SHARES}):
        hits = {key: sum(run(t, slots) for t in traces) for key, run in POLICIES.items()}
        facts = {"trace": name, "num_experts": experts, "top_k": top_k, "slots": slots}
        facts |= {"layers": len(traces), "calls": len(traces[0])}
        rows.append(facts | {key: round(count / wanted, 4) for key, count in hits.items()})
    return rows


def drawn(kind: str, experts: int, top_k: int, layers: int, steps: int) -> list[Trace]:
    """A trace for each layer of drawn routings."""
    ids = drawn_logits(kind, steps, layers, 1, experts)[:, :, 0].topk(top_k).indices
    return [ids[:, layer].tolist() for layer in range(layers)]


def recorded(prompts: int, written: int) -> dict[str, tuple[list[Trace], int]]:
    """Traces of the demo's model and E: while it writes, and while it reads."""
    model = load(MODEL, "moe_ops", torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    text = (MODEL / "heldout.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer.backend_tokenizer.encode(text).ids)
    blocks = [layer.mlp.experts for layer in model.model.layers]
    traces: list[Trace] = [[] for _ in blocks]

    def noting(trace: Trace) -> Any:
        def note(experts: nn.Module, args: tuple[Any, ...]) -> None:
            if len(args[1]) == 1:  # one token: not a prompt
                trace.append(args[1][0].tolist())

        return note

    hooks = [
        block.register_forward_pre_hook(noting(trace))
        for block, trace in zip(blocks, traces, strict=True)
    ]
    apart = len(ids) // prompts
    starts = [ids[i * apart :] for i in range(prompts)]
    program = Program(model, PROMPT + written, compiled=False)
    for start in starts:
        program.write(start[:PROMPT], written, lambda: None)
    writes = [[*trace] for trace in traces]
    for trace in traces:
        trace.clear()
    for start in starts:
        program.read(start[:PROMPT])
        for token in start[PROMPT : PROMPT + written - 1].split(1):
            program.run(token[None])
    for hook in hooks:
        hook.remove()
    experts = model.config.num_experts
    return {"the demo writes": (writes, experts), "the demo reads": (traces, experts)}


@torch.no_grad()
def measured(prompts: int, written: int, steps: int) -> list[dict[str, Any]]:
    """The rows of all traces."""
    rows = []
    for name, (traces, experts) in recorded(prompts, written).items():
        rows += rates(name, traces, experts)
    for model, (experts, top_k) in DRAWN.items():
        for kind in ("zipf", "uniform"):
            progress(f"{kind} routings of {model}")
            traces = drawn(kind, experts, top_k, DRAWN_LAYERS, steps)
            rows += rates(f"{model}, {kind}", traces, experts)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    command = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    command.add_argument("--output", type=Path, help="folder of the record")
    command.add_argument("--prompts", type=int, default=PROMPTS)
    command.add_argument("--written", type=int, default=WRITTEN, help="tokens for each prompt")
    command.add_argument("--steps", type=int, default=DRAWN_STEPS, help="calls of drawn routings")
    args = command.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    rows = measured(args.prompts, args.written, args.steps)
    Lines(WIDTHS, dict)(rows, head=True)
    if args.output:
        record = {"torch": torch.__version__, "prompts": args.prompts, "written": args.written,
                  "rows": rows}  # fmt: skip
        (args.output / "hit_rates.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

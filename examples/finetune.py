"""Fine-tune the demo's language model on this library's documentation, in four ways.

    python examples/finetune.py                                # about a minute on two CPU cores
    python examples/finetune.py --output benchmarks/results    # also writes finetune.json

All weights, with transformers' ``grouped_mm`` and with this library's experts; adapters (LoRA) of
the experts alone; and the same adapters over experts in 4 bits (QLoRA). All four see the same
batches in the same order. With PEFT, adapters are one call: see docs/guides/training.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import moe_ops
from moe_ops.demo import MODEL
from moe_ops.training import ExpertLora
from moe_ops.version import __version__

PAGES = Path(__file__).parents[1] / "docs"
CONTEXT, BATCH, RANK, SCHEME = 128, 8, 8, "int4_w4a16_g32"
FULL_RATE, LORA_RATE = 5e-4, 5e-3


class LoraExperts(nn.Module):
    """Experts of transformers, frozen, plain or quantized, with adapters beside both products."""

    def __init__(self, experts: Any, rank: int, scaling: float = 2.0) -> None:
        super().__init__()
        self.experts, self.scaling = experts, scaling
        count, hidden, width = experts.num_experts, experts.hidden_dim, experts.intermediate_dim
        device = next(experts.parameters()).device

        def factors(n: int, k: int) -> nn.ParameterList:
            a = torch.randn(1, count, rank, k, device=device) / math.sqrt(k)
            return nn.ParameterList([a, torch.zeros(1, count, n, rank, device=device)])

        self.first, self.second = factors(2 * width, hidden), factors(hidden, width)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        lora = ExpertLora(tuple(self.first), tuple(self.second), scaling=self.scaling)
        return self.experts(hidden_states, top_k_index, top_k_weights, lora=lora)


def load(implementation: str) -> Any:
    """Load the model in float32 to train it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, experts_implementation=implementation
    )
    return model.to(device).train()


def with_lora(model: Any) -> Any:
    """Freeze a model and add adapters to its experts."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.experts = LoraExperts(layer.mlp.experts, RANK)
    return model


def quantized() -> Any:
    """Load the model with experts in 4 bits."""
    return moe_ops.quantize_(load("moe_ops"), SCHEME, progress=False)


WAYS: dict[str, tuple[Callable[[], Any], float]] = {
    "all weights, grouped_mm": (lambda: load("grouped_mm"), FULL_RATE),
    "all weights, moe_ops": (lambda: load("moe_ops"), FULL_RATE),
    "LoRA, moe_ops": (lambda: with_lora(load("moe_ops")), LORA_RATE),
    f"LoRA over {SCHEME}, moe_ops": (lambda: with_lora(quantized()), LORA_RATE),
}
"""The model and the learning rate of each way."""


def windows() -> tuple[Tensor, Tensor]:
    """Cut the pages into windows of tokens; every tenth one is held out."""
    paths = sorted(path for path in PAGES.glob("*/*.md") if path.parent.name != "generated")
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in paths)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokens = torch.tensor(tokenizer.backend_tokenizer.encode(text).ids)
    all_windows = tokens[: tokens.numel() // CONTEXT * CONTEXT].view(-1, CONTEXT)
    is_held_out = torch.arange(len(all_windows)) % 10 == 9
    return all_windows[~is_held_out], all_windows[is_held_out]


@torch.no_grad()
def heldout_loss(model: Any, held: Tensor) -> float:
    """Return the mean negative log-likelihood of a token that is not trained on, in nats."""
    model.eval()
    total = sum(model(ids, labels=ids).loss.item() * len(ids) for ids in held.split(BATCH))
    model.train()
    return total / len(held)


def train(way: str, train_on: Tensor, held: Tensor, steps: int) -> dict[str, Any]:
    """Fine-tune in one way with AdamW; return what the record says of it."""
    make, rate = WAYS[way]
    torch.manual_seed(0)
    model = make()
    train_on, held = train_on.to(model.device), held.to(model.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, rate)
    before, losses = heldout_loss(model, held), []
    order = torch.randperm(len(train_on), generator=torch.Generator().manual_seed(0))
    for step in range(steps):
        chosen = order[(step * BATCH + torch.arange(BATCH)) % len(order)]
        ids = train_on[chosen.to(model.device)]
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    experts = [m for m in model.modules() if hasattr(m, "is_concatenated")]
    return {
        "way": way,
        "learning_rate": rate,
        "trained_parameters": sum(p.numel() for p in trained),
        "experts_bytes": sum(p.nbytes for m in experts for p in m.parameters()),
        "losses": torch.stack(losses).tolist(),
        "heldout_before": before,
        "heldout_after": heldout_loss(model, held),
    }


def run(steps: int) -> list[dict[str, Any]]:
    """Fine-tune in every way."""
    train_on, held = windows()
    rows = []
    for way in WAYS:
        rows.append(row := train(way, train_on, held, steps))
        first, last = row["losses"][0], row["losses"][-1]
        print(
            f"{way:32} {row['trained_parameters']:>9,} parameters, experts "
            f"{row['experts_bytes'] / 1e6:5.1f} MB, loss {first:.3f} -> {last:.3f}, held out "
            f"{row['heldout_before']:.3f} -> {row['heldout_after']:.3f}"
        )
    return rows


def main() -> None:
    """Fine-tune in every way; write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, help="folder to write finetune.json to")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = run(args.steps)
    if args.output is not None:
        record = {
            "command": f"python examples/finetune.py --steps {args.steps}",
            "version": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "batch": BATCH,
            "context": CONTEXT,
            "rank": RANK,
            "rows": rows,
        }
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "finetune.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

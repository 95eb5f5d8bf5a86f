"""Quality loss of each scheme: the demo's model on held-out text, with quantized experts.

python benchmarks/quality.py                              # every scheme; prints a table
python benchmarks/quality.py --output benchmarks/results  # and writes quality.json, quality.png

The model (`moe_ops/demo/model`) runs in float32, so that only the experts round. Their bfloat16
weights are quantized by `quantize_weight` and run by `fused_experts`. The text is the model's
`heldout.txt`, documents that it was not trained on (though of 24 checkpoints the one with the
lowest loss on them was kept). Static activation scales are calibrated on training text.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import quality_report
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers import logging as transformers_logging

import moe_ops
from moe_ops.bench.command import checked
from moe_ops.demo import MODEL
from moe_ops.version import __version__

try:
    from tqdm import tqdm
except ImportError:  # the bar is a convenience
    tqdm = None

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
CONTEXT, BATCH = 256, 8
CALIBRATION_WINDOWS = 64


class Peaks(NamedTuple):
    """The largest magnitudes seen in the inputs of a layer's two GEMMs."""

    first: float
    second: float


class QuantizedExperts(nn.Module):
    """Replacement of a layer's experts: `fused_experts` on their weights in a scheme."""

    def __init__(self, experts: nn.Module, scheme: moe_ops.Scheme, peaks: Peaks) -> None:
        super().__init__()
        weights = (experts.gate_up_proj.bfloat16(), experts.down_proj.bfloat16())
        w1, w2 = (moe_ops.quantize_weight(w, scheme) for w in weights)
        stored = [x for x in (*w1, *w2) if x is not None]
        self.bytes_per_expert = sum(x.nbytes for x in stored) / len(w1.data)
        device = w1.data.device
        scales = {
            name: torch.tensor([peak / scheme.quants[0].largest], device=device)
            for name, peak in zip(scheme.input_scale_names, peaks, strict=False)
        }
        self.config = moe_ops.FusedMoEQuantConfig.from_weights(scheme, w1, w2, **scales)
        self.w1, self.w2 = (w.data.float() if scheme.weight is None else w.data for w in (w1, w2))

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Run the experts on ``x`` ``(T, H)``."""
        return moe_ops.fused_experts(
            x, self.w1, self.w2, topk_weights, topk_ids, quant_config=self.config
        )


class Sums:
    """Sums over token positions, from which a row of the table is computed."""

    def __init__(self) -> None:
        self.loss = self.divergence = self.agreements = 0.0
        self.count = 0

    def add(self, reference: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Add positions.

        Args:
            reference: log-probabilities of the unquantized model, ``(P, V)`` float64.
            logits: logits of the quantized model, ``(P, V)``.
            targets: the next tokens, ``(P,)``.
        """
        x = logits.double()
        total = x.logsumexp(-1)
        self.loss += (total - x.gather(1, targets[:, None])[:, 0]).sum().item()
        self.divergence += ((reference.exp() * (reference - x)).sum(-1) + total).sum().item()
        self.agreements += (reference.argmax(-1) == x.argmax(-1)).sum().item()
        self.count += len(targets)

    def row(self) -> dict[str, float]:
        """Means over all positions."""
        return {
            "perplexity": math.exp(self.loss / self.count),
            "kl": self.divergence / self.count,
            "top1_agreement": self.agreements / self.count,
        }


def load(device: str) -> PreTrainedModel:
    """Load the demo's model with the eager experts of transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, experts_implementation="eager", dtype=torch.float32, local_files_only=True
    )
    return model.to(device).eval()


def windows_of(text: str, count: int | None = None) -> Tensor:
    """Token ids ``(N, CONTEXT)`` of the first whole windows of a text."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL, local_files_only=True)
    ids = torch.tensor(tokenizer.backend_tokenizer.encode(text).ids)
    return ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)[:count]


def heldout_text() -> str:
    """Text that the model was not trained on."""
    return (MODEL / "heldout.txt").read_text(encoding="utf-8")


def training_text() -> str:
    """Training text from the running Python, without documents that overlap held-out ones."""

    def paragraphs(text: str) -> set[str]:
        return {paragraph.strip() for paragraph in re.split(r"\n\s*\n", text)} - {""}

    heldout = paragraphs(heldout_text())
    return "\n".join(
        text
        for text in import_module("demo_corpus").build_corpus()[0]
        if not paragraphs(text) & heldout
    )


@torch.no_grad()
def calibrate(model: PreTrainedModel, windows: Tensor) -> list[Peaks]:
    """The peaks of every layer while the unquantized model reads ``windows``."""
    seen = [Peaks(0.0, 0.0) for _ in model.model.layers]

    def look(index: int, experts: nn.Module, x: Tensor, topk_ids: Tensor) -> None:
        first, second = seen[index]
        for expert, (w1, _) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
            gate, up = linear(x[(topk_ids == expert).any(1)], w1).chunk(2, -1)
            second = max(second, (silu(gate) * up).abs().max().item() if len(gate) else 0.0)
        seen[index] = Peaks(max(first, x.abs().max().item()), second)

    hooks = [
        layer.mlp.experts.register_forward_pre_hook(
            lambda experts, args, index=index: look(index, experts, *args[:2])
        )
        for index, layer in enumerate(model.model.layers)
    ]
    for batch in windows.to(model.device).split(BATCH):
        model(batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def measure(
    model: PreTrainedModel, names: Iterable[str], windows: Tensor, peaks: list[Peaks]
) -> list[dict[str, Any]]:
    """A row per scheme: bytes per expert, and the model's distance from the unquantized model.

    Args:
        model: unquantized, as `load` returns it; restored afterwards.
        names: names of schemes.
        windows: ``(N, CONTEXT)`` token ids to evaluate on.
        peaks: the peaks of every layer, for schemes with static activation scales.
    """
    blocks = [layer.mlp for layer in model.model.layers]
    original = [block.experts for block in blocks]
    schemes = {name: moe_ops.get_scheme(name) for name in names}
    variants = {
        name: [QuantizedExperts(e, scheme, p) for e, p in zip(original, peaks, strict=True)]
        for name, scheme in schemes.items()
    }
    sums = {name: Sums() for name in schemes}

    def read(batch: Tensor, experts: list[nn.Module]) -> Tensor:
        for block, module in zip(blocks, experts, strict=True):
            block.experts = module
        return model(batch, use_cache=False).logits[:, :-1].flatten(0, 1)

    batches = windows.to(model.device).split(BATCH)
    for batch in batches if tqdm is None else tqdm(batches, unit="batch", leave=False):
        reference = read(batch, original).double().log_softmax(-1)
        targets = batch[:, 1:].flatten()
        for name, experts in variants.items():
            sums[name].add(reference, read(batch, experts), targets)
    read(windows[:1].to(model.device), original)
    return [
        {"scheme": name, "bytes_per_expert": variants[name][0].bytes_per_expert} | sums[name].row()
        for name in schemes
    ]


def main() -> None:
    """Measure, print the table, and write the requested files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="(default: %(default)s)")
    scheme_name = checked(lambda name: moe_ops.get_scheme(name).name)
    named = {"type": scheme_name, "nargs": "+", "metavar": "NAME"}
    parser.add_argument("--schemes", **named, default=[*moe_ops.SCHEMES], help="(default: all)")
    parser.add_argument("--tokens", type=int, help="read this many at most (default: all)")
    parser.add_argument("--json", action="store_true", help="the record on stdout, not a table")
    parser.add_argument("--output", type=Path, help="folder for quality.json and quality.png")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = load(args.device)
    windows = windows_of(heldout_text())
    windows = windows[: None if args.tokens is None else max(1, args.tokens // CONTEXT)]
    peaks = calibrate(model, windows_of(training_text(), CALIBRATION_WINDOWS))
    record = {
        "command": "python benchmarks/quality.py --output benchmarks/results",
        "version": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": args.device,
        "tokens": windows.numel(),
        "tokens_of_a_call": BATCH * CONTEXT,
        "rows": measure(model, args.schemes, windows, peaks),
    }
    if args.output:
        quality_report.save(record, args.output)
    print(json.dumps(record, indent=1) if args.json else quality_report.table(record))


if __name__ == "__main__":
    main()

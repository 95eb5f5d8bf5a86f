"""Read and write real text with a small Mixture-of-Experts language model through moe_ops.

The same Qwen3-MoE checkpoint reads held-out documentation and continues a prompt three times: with
Hugging Face's plain loop over experts (``eager``), with its ``grouped_mm``, and with ``moe_ops``.
Then its experts are quantized, in one scheme after the other. Without a GPU all of this runs on the
eager references, and the demo ends with what was measured on one.

Exit code 0 means that moe_ops gave Hugging Face's numbers, and that its decoding was compiled once,
to one graph.

    python -m moe_ops demo
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch._dynamo.utils import counters
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, StaticCache
from transformers import logging as transformers_logging

import moe_ops.integrations.transformers  # noqa: F401  (registers "moe_ops")
from moe_ops.bench.harness import CHECKOUT, KEY
from moe_ops.demo import MODEL

PROMPT = "If the file"
CONTEXT, BATCH, NEW_TOKENS = 256, 8, 64
BATCHES_ON_CPU, BATCHES_QUANTIZED = 8, 2
"""Most batches that are read without a GPU, and by each quantized model."""
# Rounding alone may swap two experts whose router logits are closer than this.
ROUTER_TIE = 2.0**-16


IMPLEMENTATIONS = ("eager", "grouped_mm", "moe_ops")
COMPILED = "moe_ops"
"""The implementation whose decoding step is compiled. (A compilation takes up to half a minute on a
CPU; eager cannot be one graph, because its control flow depends on which experts have tokens.)"""
SCHEMES = ("fp8_channel", "int8_w8a16", "int4_w4a16_g32", "mxfp4_w4a16")
"""Schemes of the table of qualities."""


class Result(NamedTuple):
    """What one implementation did."""

    perplexity: float
    difference: float  # largest absolute difference to eager's logits, router ties left out
    read_rate: float  # tokens per second
    tokens: list[int]  # the continuation of the prompt
    write_rate: float  # tokens per second
    graph_breaks: int
    compilations: int
    captured: bool


class Reader:
    """Measure perplexity, speed and logits on the held-out windows."""

    def __init__(self, windows: torch.Tensor, tied: torch.Tensor) -> None:
        """Take the windows ``(N, CONTEXT)`` and which of them ``(N,)`` hold a router tie."""
        self.batches = windows.split(BATCH)
        self.untied = (~tied).split(BATCH)
        self.reference: list[torch.Tensor] = []  # the first reader's logits

    def __call__(
        self, forward: Callable[[torch.Tensor], torch.Tensor], bar: tqdm
    ) -> tuple[float, float, float]:
        """Return perplexity, largest logit difference to the first reader, tokens per second."""
        is_reference = not self.reference
        loss, seconds, differences = 0.0, 0.0, []
        for index, batch in enumerate(self.batches):
            start = now()
            logits = forward(batch)
            seconds += now() - start
            loss += torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
            ).item()
            if is_reference:
                self.reference.append(logits)
            errors = (logits - self.reference[index])[self.untied[index]].abs()
            differences.append(errors.flatten(1).amax(1))
            bar.update(batch.numel())
        count = len(self.batches)
        difference = torch.cat(differences).max().item()
        return math.exp(loss / count), difference, count * BATCH * CONTEXT / seconds


def now() -> float:
    """Return the time in seconds, after the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def load(path: Path, implementation: str, device: torch.device) -> PreTrainedModel:
    """Load the checkpoint in float32, so that implementations differ by a few roundings only."""
    model = AutoModelForCausalLM.from_pretrained(
        path, experts_implementation=implementation, dtype=torch.float32, local_files_only=True
    )
    return model.to(device).eval()


def find_router_ties(model: PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
    """Return which windows ``(N,)`` hold a token whose last chosen expert is almost tied."""
    top_k, tied = model.config.num_experts_per_tok, []
    for batch in windows.split(BATCH):
        router_logits = model(batch, use_cache=False, output_router_logits=True).router_logits
        ranked = torch.stack(router_logits).sort(dim=-1, descending=True).values  # (layers, T, E)
        gaps = (ranked[..., top_k - 1] - ranked[..., top_k]).amin(0)
        tied.append(gaps.view(batch.shape).amin(1) < ROUTER_TIE)
    return torch.cat(tied)


def write(
    model: PreTrainedModel, prompt: torch.Tensor, bar: tqdm, *, compiled: bool
) -> tuple[list[int], float, bool]:
    """Continue the prompt greedily with a static cache.

    Returns:
        The new tokens, tokens per second, and whether the step was captured in a CUDA graph.
    """
    cache = StaticCache(model.config, max_cache_len=prompt.shape[1] + NEW_TOKENS)
    token = prompt[:, -1:].clone()  # the step's input and output, at one address

    def step() -> None:
        logits = model(token, past_key_values=cache).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def restart() -> None:
        cache.reset()
        token.copy_(model(prompt, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True))

    # Not fullgraph, so that a graph break is counted instead of raised.
    advance = torch.compile(step) if compiled else step
    restart()
    advance()
    captured = compiled and token.is_cuda
    if captured:
        advance = capture(advance)
    restart()
    written, start = [token.clone()], now()
    for _ in range(NEW_TOKENS - 1):
        advance()
        written.append(token.clone())
        bar.update()
    rate = (NEW_TOKENS - 1) / (now() - start)
    return torch.cat(written, dim=1)[0].tolist(), rate, captured


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step in a CUDA graph and return its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(
    model: PreTrainedModel, reader: Reader, prompt: torch.Tensor, bar: tqdm, *, compiled: bool
) -> Result:
    """Read the held-out text and continue the prompt with one implementation."""
    torch._dynamo.reset()
    counters.clear()

    def forward(batch: torch.Tensor) -> torch.Tensor:
        return model(batch, use_cache=False).logits

    reading = reader(forward, bar)
    tokens, write_rate, captured = write(model, prompt, bar, compiled=compiled)
    return Result(
        *reading,
        tokens,
        write_rate,
        sum(counters["graph_break"].values()),
        counters["stats"]["unique_graphs"],
        captured,
    )


def print_table(results: dict[str, Result]) -> None:
    """Print a line for each implementation."""
    rows = [
        ("", "perplexity", "largest logit", "prefill", "decode", "graph", "compi-"),
        ("implementation", "", "difference", "tokens/s", "tokens/s", "breaks", "lations"),
    ]
    for name, result in results.items():
        compiled = name == COMPILED
        rows.append(
            (
                name,
                f"{result.perplexity:.4f}",
                f"{result.difference:.1e}" if name != "eager" else "-",
                f"{result.read_rate:,.0f}",
                f"{result.write_rate:,.0f}{'*' if compiled else ' '}",
                str(result.graph_breaks) if compiled else "-",
                str(result.compilations) if compiled else "-",
            )
        )
    for first, *others in rows:
        print(f"{first:14}" + "".join(f"{cell:>15}" for cell in others))
    print("* compiled\n")


def report(results: dict[str, Result]) -> bool:
    """Print the result in two sentences, and return whether moe_ops keeps its promises."""
    eager, grouped, ours = (results[name] for name in IMPLEMENTATIONS)
    # The difference between Hugging Face's own two implementations is what float32 rounding does.
    budget = 4 * grouped.difference
    same_numbers = (
        f"{ours.perplexity:.3f}" == f"{eager.perplexity:.3f}" and ours.difference <= budget
    )
    print(
        f"Reading: moe_ops and eager {'agree' if same_numbers else 'DISAGREE'}: perplexity "
        f"{ours.perplexity:.3f} and {eager.perplexity:.3f}, logits at most {ours.difference:.1e} "
        f"apart (allowed: {budget:.1e}, four times what grouped_mm is)."
    )
    same_text = ours.tokens == eager.tokens
    whole = ours.graph_breaks == 0 and ours.compilations == 1
    print(
        f"Writing: moe_ops chose {'the same' if same_text else 'OTHER'} {len(ours.tokens)} tokens "
        f"{'as' if same_text else 'than'} eager, at {ours.write_rate / eager.write_rate:.2g} times "
        f"the speed{', replayed from a CUDA graph' if ours.captured else ''}. torch.compile "
        f"{'made one graph' if whole else 'DID NOT MAKE ONE GRAPH'} of the decoding step, in one "
        f"compilation.\n"
    )
    return same_numbers and same_text and whole


def perplexity(model: PreTrainedModel, windows: torch.Tensor) -> float:
    """Return the perplexity of windows ``(N, CONTEXT)``."""
    losses = [model(batch, labels=batch).loss.item() for batch in windows.split(BATCH)]
    return math.exp(sum(losses) / len(losses))


def print_qualities(path: Path, windows: torch.Tensor, device: torch.device) -> None:
    """Quantize the experts of the model and print the perplexity of each scheme."""
    print("moe_ops.quantize_(model, scheme), perplexity of the first windows:")
    model = load(path, "moe_ops", device)
    found = {"float32": perplexity(model, windows)}
    for scheme in SCHEMES:
        model = moe_ops.quantize_(load(path, "moe_ops", device), scheme, progress=False)
        found[scheme] = perplexity(model, windows)
    print("  " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()) + "\n")


def print_speeds() -> None:
    """Print what was measured on GPUs, which the records of a checkout say."""
    print("Without a GPU the above ran on the eager references, which are exact and slow.")
    for record in sorted((CHECKOUT / "benchmarks" / "results").glob("*/layer.json")):
        rows = json.loads(record.read_text())["rows"]
        times = {tuple(row[key] for key in KEY): row["time_us"] for row in rows}
        print(f"One layer of Qwen3-30B-A3B on {record.parent.name}, microseconds (bf16):")
        for name in ("hf-grouped_mm", "moe_ops"):
            keys = [(m, ("bf16", "qwen3-30b", m, name, "uniform")) for m in (1, 64, 4096)]
            shown = [f"{m} tokens {times[key]:,.0f}" for m, key in keys if key in times]
            print(f"  {name:14}" + ", ".join(shown))
    print("moe-ops explain --model qwen3-30b --device sm_90 says which kernels serve there.")


@torch.no_grad()
def main() -> int:
    """Run the demo; 0 if everything agreed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model_help = "folder of a Qwen3-MoE checkpoint, and of heldout.txt"
    parser.add_argument("--model", type=Path, default=MODEL, help=model_help)
    parser.add_argument("--prompt", default=PROMPT, help="text to continue")
    args = parser.parse_args()
    for name in ("config.json", "heldout.txt"):
        if not (args.model / name).is_file():
            parser.error(f"--model must be a folder with {name}, got {args.model}")
    # The demo compares numbers, so it needs full float32 precision.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    text = (args.model / "heldout.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer.backend_tokenizer.encode(text).ids, device=device)
    windows = ids[: ids.numel() // (BATCH * CONTEXT) * BATCH * CONTEXT].view(-1, CONTEXT)
    prompt = tokenizer(args.prompt, return_tensors="pt").input_ids.to(device)

    if device.type == "cpu":
        windows = windows[: BATCHES_ON_CPU * BATCH]
    work = len(IMPLEMENTATIONS) * (windows.numel() + NEW_TOKENS - 1)
    layout = "{desc} {percentage:3.0f}%|{bar}| {elapsed}"
    with tqdm(total=work, bar_format=layout, leave=False) as bar:
        bar.set_description("looking for router ties")
        tied = find_router_ties(load(args.model, "eager", device), windows)
        reader, results = Reader(windows, tied), {}
        for name in IMPLEMENTATIONS:
            compiled = name == COMPILED
            bar.set_description(f"{name}, compiling its decoding" if compiled else name)
            model = load(args.model, name, device)
            results[name] = measure(model, reader, prompt, bar, compiled=compiled)

    print(f'moe_ops continues "{args.prompt}":\n')
    print(f"{args.prompt}{tokenizer.decode(results['moe_ops'].tokens)}\n")
    place = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{windows.numel():,} held-out tokens in {len(windows)} windows; float32, {place}.")
    print(f"Logits of {int(tied.sum())} windows with a tie between experts are not compared.\n")
    print_table(results)
    agreed = report(results)
    print_qualities(args.model, windows[: BATCHES_QUANTIZED * BATCH], device)
    if device.type == "cpu":
        print_speeds()
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())

"""Read and write real text with a small Mixture-of-Experts language model through moe_ops.

The same Qwen3-MoE checkpoint reads held-out documentation and continues a prompt with Hugging
Face's plain loop over experts (``eager``), with its ``grouped_mm``, and with ``moe_ops``, which is
also compiled and quantized. Exit code 0 means that moe_ops gave Hugging Face's numbers and text,
and was compiled once for reading and writing, without a graph break.

    python -m moe_ops demo
"""

from __future__ import annotations

import argparse
import math
import warnings
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel
from transformers import logging as transformers_logging

import moe_ops
from moe_ops.bench.command import Parser
from moe_ops.brief import aligned
from moe_ops.demo import MODEL
from moe_ops.demo.program import Program, load, now
from moe_ops.demo.records import DEVICE, kernel_lines, missing
from moe_ops.version import __version__

PROMPT = "If the file"
CONTEXT, NEW_TOKENS = 256, 64
CPU_WINDOWS = 32
"""The most windows that are read on a CPU, where a window takes a tenth of a second."""
ROUTER_TIE = 2.0**-16
"""Rounding alone may swap two experts whose router logits are closer than this."""
RUNS = {
    "eager": ("eager", False),
    "grouped_mm": ("grouped_mm", False),
    "moe_ops": ("moe_ops", False),
    "moe_ops, compiled": ("moe_ops", True),
}
"""Implementation, and whether it is compiled."""
NO_KERNEL = (
    "No kernel runs here, as there is no GPU: moe_ops runs its references, in eager PyTorch. They\n"
    "define the results and are slow, so the rates below say nothing about the kernels."
)
SCHEMES = ("int8_channel", "fp8_block128", "mxfp4_w4a16")


class Result(NamedTuple):
    """What one implementation did."""

    perplexity: float
    logits: list[Tensor]  # of each window
    read_rate: float  # tokens per second
    tokens: list[int]  # the continuation of the prompt
    write_rate: float  # tokens per second
    captured: bool
    graph_breaks: int
    compilations: int


def read_text(program: Program, windows: Tensor, bar: tqdm) -> tuple[float, list[Tensor], float]:
    """Return perplexity, the logits of each window, and tokens per second."""
    program.read(windows[0])  # compiles
    loss, seconds, all_logits = 0.0, 0.0, []
    for window in windows:
        start = now()
        logits = program.read(window)
        seconds += now() - start
        loss += torch.nn.functional.cross_entropy(logits[:-1], window[1:]).item()
        all_logits.append(logits)
        bar.update(len(window))
    return math.exp(loss / len(windows)), all_logits, windows.numel() / seconds


def measure_model(
    model: PreTrainedModel, windows: Tensor, prompt: Tensor, bar: tqdm, *, compiled: bool
) -> Result:
    """Read the held-out text and continue the prompt with one implementation."""
    torch._dynamo.reset()
    counters.clear()
    length = max(CONTEXT, len(prompt) + NEW_TOKENS)
    program = Program(model, length, compiled=compiled)
    reading = read_text(program, windows, bar)
    writing = program.write(prompt, NEW_TOKENS, bar.update)
    breaks = sum(counters["graph_break"].values())
    return Result(*reading, *writing, breaks, counters["stats"]["unique_graphs"])


def find_router_ties(model: PreTrainedModel, windows: Tensor) -> list[bool]:
    """Whether a window holds a token whose last chosen expert is almost tied, for each window."""
    model.set_attn_implementation("sdpa")
    top_k, tied = model.config.num_experts_per_tok, []
    for window in windows:
        out = model(window[None], use_cache=False, output_router_logits=True)
        ranked = torch.stack(out.router_logits).sort(dim=-1, descending=True).values
        tied.append(bool((ranked[..., top_k - 1] - ranked[..., top_k]).amin() < ROUTER_TIE))
    return tied


def difference(result: Result, reference: Result, tied: list[bool]) -> float:
    """The largest absolute difference of logits in windows without a router tie."""
    both = zip(result.logits, reference.logits, tied, strict=True)
    return max(((a - b).abs().max().item() for a, b, tie in both if not tie), default=0.0)


def quality_lines(windows: Tensor, path: Path, plain: Result, bar: tqdm) -> list[list[str]]:
    """A table of schemes: size of the experts, perplexity, how often the next token is the same."""
    lines = [["experts in", "size of the experts", "perplexity", "same next token"]]
    chosen = torch.cat(plain.logits).argmax(-1)

    def add(name: str, size: float, perplexity: float, same: float) -> None:
        lines.append([name, f"{size / 1e6:.2f} MB", f"{perplexity:.3f}", f"{same:.1%}"])

    for name in SCHEMES:
        bar.set_description(f"reading with experts in {name}")
        model = load(path, "moe_ops", windows.device)
        if len(lines) == 1:
            add("bfloat16", 2 * sum(map(torch.numel, experts(model))), plain.perplexity, 1.0)
        moe_ops.quantize_(model, name, progress=False)
        perplexity, logits, _ = read_text(Program(model, CONTEXT, compiled=False), windows, bar)
        same = (torch.cat(logits).argmax(-1) == chosen).double().mean().item()
        add(name, sum(x.nbytes for x in experts(model)), perplexity, same)
    return lines


def experts(model: PreTrainedModel) -> list[Tensor]:
    """The parameters and buffers of all experts."""
    blocks = [layer.mlp.experts for layer in model.model.layers]
    return [x for block in blocks for x in (*block.parameters(), *block.buffers())]


def run_lines(results: dict[str, Result], tied: list[bool]) -> list[list[str]]:
    """A table with a line for each implementation."""
    lines = [
        ["experts run by", "perplexity", "logits differ by", "reads tokens/s", "writes tokens/s"]
    ]
    for name, result in results.items():
        apart = "-" if name == "eager" else f"{difference(result, results['eager'], tied):.1e}"
        rates = (f"{result.read_rate:,.0f}", f"{result.write_rate:,.0f}")
        lines.append([name, f"{result.perplexity:.4f}", apart, *rates])
    return lines


def show(title: str, lines: list[list[str]]) -> None:
    """Print a table whose first column is aligned to the left."""
    print(f"\n{title}\n\n{indent(aligned(lines, left=1), '  ')}")


def judge_claims(results: dict[str, Result], tied: list[bool]) -> dict[str, bool]:
    """What the demo claims, and whether it holds."""
    eager, compiled = results["eager"], results["moe_ops, compiled"]
    ours = [results["moe_ops"], compiled]
    # The difference between Hugging Face's own two implementations is what float32 rounding does.
    budget = 4 * difference(results["grouped_mm"], eager, tied)
    return {
        f"moe_ops writes the {NEW_TOKENS} tokens that Hugging Face's experts write": all(
            result.tokens == eager.tokens for result in ours
        ),
        f"perplexity is the same, and logits are at most {budget:.1e} apart (4 times what "
        "grouped_mm is)": all(
            f"{result.perplexity:.3f}" == f"{eager.perplexity:.3f}"
            and difference(result, eager, tied) <= budget
            for result in ours
        ),
        f"one compilation reads and writes: {compiled.compilations} of the whole model, "
        f"{compiled.graph_breaks} graph breaks": (compiled.compilations, compiled.graph_breaks)
        == (1, 0),
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(None, __doc__.splitlines()[0], ("", "--prompt 'If the folder'"))
    model_help = "folder of a Qwen3-MoE checkpoint, and of heldout.txt"
    parser.add_argument("--model", type=Path, default=MODEL, help=model_help)
    parser.add_argument("--prompt", default=PROMPT, help="text to continue")
    args = parser.parse_args()
    if not args.prompt:
        parser.error("--prompt must not be empty")
    for name in ("config.json", "heldout.txt"):
        if not (args.model / name).is_file():
            parser.error(f"--model must be a folder with {name}, got {args.model}")
    return args


@torch.no_grad()
def main() -> int:
    """Run the demo; 0 if everything that it claims holds."""
    args = parse_arguments()
    # The demo compares numbers, so it needs full float32 precision.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"

    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    text = (args.model / "heldout.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer.backend_tokenizer.encode(text).ids, device=device)
    windows = ids[: ids.numel() // CONTEXT * CONTEXT].view(-1, CONTEXT)
    windows = windows if on_gpu else windows[:CPU_WINDOWS]
    prompt = tokenizer(args.prompt, return_tensors="pt").input_ids[0].to(device)

    work = len(RUNS) * (windows.numel() + NEW_TOKENS - 1) + len(SCHEMES) * windows.numel()
    layout = "{desc} {percentage:3.0f}%|{bar}| {elapsed}"
    with tqdm(total=work, bar_format=layout, leave=False) as bar:
        bar.set_description("looking for router ties")
        tied, results = find_router_ties(load(args.model, "eager", device), windows), {}
        for name, (implementation, compiled) in RUNS.items():
            bar.set_description(f"{name}: about half a minute" if compiled else name)
            model = load(args.model, implementation, device)
            results[name] = measure_model(model, windows, prompt, bar, compiled=compiled)
        quality = quality_lines(windows, args.model, results["moe_ops"], bar)

    place = torch.cuda.get_device_name() if on_gpu else "the CPU"
    written = results["moe_ops, compiled"]
    print(
        f"moe_ops {__version__} on {place}. A Qwen3-MoE model of "
        f"{model.num_parameters() / 1e6:.1f} million parameters writes:\n"
    )
    print(args.prompt + tokenizer.decode(written.tokens))
    replayed = " The compiled model writes from a CUDA graph." if written.captured else ""
    if not on_gpu:
        print(f"\n{NO_KERNEL}")
    show(
        f"It reads {windows.numel():,} held-out tokens, in float32.{replayed}",
        run_lines(results, tied),
    )
    show("Quantized by moe_ops.quantize_(model, scheme):", quality)
    if not on_gpu:
        show(f"On a GPU of {DEVICE} (moe-ops explain; times from the records):", kernel_lines())
        for gpu in missing():
            print(f"\n  {gpu}: the same kernels; no times are recorded here.")
    print()
    claims = judge_claims(results, tied)
    for claim, holds in claims.items():
        print(f"{'yes' if holds else 'NO '}  {claim}")
    return 0 if all(claims.values()) else 1

"""Write what the documentation shows from code and records into `docs/generated/`.

python docs/generate.py   # `make docs` runs this, then builds the site

Each table is made here or in `benchmarks/`, and pages include it (`--8<-- "docs/generated/.."`).
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers

import moe_ops
from moe_ops import FusedMoEConfig, RoutingMethodType, Scheme, explain, support
from moe_ops.activation import Activation, MoEActivation, settings_of
from moe_ops.bench.problems import load_problems
from moe_ops.inspect.devices import MEASURED, TARGETS, TargetDevice
from moe_ops.loading import LAYOUTS
from moe_ops.loading.names import PROJECTIONS
from moe_ops.scheme import SCHEMES, min_capability
from moe_ops.scheme.capability import schemes_instead, what_lacks
from moe_ops.support import ARCHITECTURES

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import host_table  # noqa: E402
import inside_report  # noqa: E402
import models_report  # noqa: E402
import peers_report  # noqa: E402
import quality_report  # noqa: E402
import ranks_report  # noqa: E402
import report  # noqa: E402
import served_report  # noqa: E402
import training_report  # noqa: E402
import tuning_report  # noqa: E402
from inside_sglang import SGLANG  # noqa: E402
from inside_vllm import VLLM  # noqa: E402
from tables import markdown, source  # noqa: E402

SUBMODULES = ("functional", "routing", "pipeline", "parallel", "layer", "loading", "scheme")
"""Public modules whose names are not all on top of the package."""
OUTPUT = Path(__file__).with_name("generated")
RESULTS = ROOT / "benchmarks" / "results"
records = partial(report.read_records, RESULTS)


def schemes() -> str:
    """A line per scheme: what is quantized, scale shapes of ``w1`` and of rows, bits a weight."""
    e, n, k, rows = 8, 1536, 2048, "T"
    lines = []
    for scheme in SCHEMES.values():
        a, w = scheme.activation, scheme.weight
        lines.append(
            [
                f"`{scheme.name}`",
                quality_report.describe(a),
                quality_report.describe(w),
                "-" if a is None else _shape(a.row_scale_shape(rows, k)),
                "-" if w is None else _shape(w.weight_scale_shape(e, n, k)),
                "-" if w is None else str(w.dtype).removeprefix("torch."),
                f"{scheme.weight_bits(n, k):.2f}",
            ]
        )
    head = ["scheme", "activations", "weights", "row scales", "w1 scales", "stored as", "bits"]
    legend = (
        "Element / group of elements that share a scale. Scale shapes are those of `x` "
        f"`({rows}, {k})` and of `w1` `({e}, {n}, {k})`. Bits are the memory of one weight of "
        "`w1`, scales included."
    )
    return f"{markdown(head, lines, labels=6)}\n\n{legend}"


def _shape(shape: tuple) -> str:
    return f"`({', '.join(map(str, shape))}{',' * (len(shape) == 1)})`"


def models() -> str:
    """A line per model whose layer has a name, with the memory of its experts."""
    shown = ("unquantized", "fp8_block128", "mxfp4_w4a16")
    lines = []
    for name, problem in load_problems().items():
        if name == "tiny":  # what benchmarks time without a GPU
            continue
        hidden, inner = problem.hidden_size, problem.intermediate_size
        projections = ((2 * inner, hidden), (hidden, inner))
        sizes = [
            problem.num_experts
            * sum(n * k * SCHEMES[scheme].weight_bits(n, k) / 8 for n, k in projections)
            for scheme in shown
        ]
        shape = (problem.num_experts, problem.top_k, hidden, inner)
        lines.append([f"`{name}`", *map(str, shape), *(f"{size / 1e9:.2f}" for size in sizes)])
    head = ["name", "E", "k", "H", "I", *(f"`{scheme}`, GB" for scheme in shown)]
    return markdown(head, lines, labels=1)


def transformers_models() -> str:
    """Every model of transformers whose experts "moe_ops" can run, by its folder there."""
    folder = Path(transformers.__file__).with_name("models")
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*/modeling_*.py")):
        experts = _DISPATCHED.findall(path.read_text())
        if experts:
            found.setdefault(path.parent.name, []).extend(experts)
    lines = [
        [f"`{name}`", ", ".join(f"`{cls}`" for cls in classes)] for name, classes in found.items()
    ]
    table = markdown(["model", "classes of experts"], lines, labels=2)
    return f"{len(found)} models of transformers {transformers.__version__}:\n\n{table}"


_DISPATCHED = re.compile(r"@use_experts_implementation(?:\([^)]*\))?\s+class (\w+)")


def activations() -> str:
    """A line per activation."""
    lines = [
        [
            f"`{a.value}`",
            "yes" if a.is_gated else "no",
            "alternating" if a.is_interleaved else "gate, then up" if a.is_gated else "-",
        ]
        for a in MoEActivation
    ]
    return markdown(["activation", "gate", "rows of w1"], lines, labels=3)


def formulas() -> str:
    """A line per activation: its function, its settings, and the function with all settings."""
    lines = []
    for kind in MoEActivation:
        settings = settings_of(kind)
        required = [name for name, default in settings.items() if default == "required"]
        rule = Activation(kind, **dict.fromkeys(required, 1.0)).formula()
        plain, general = rule.expression(required), rule.expression(settings)
        lines.append(
            [
                f"`{kind.value}`",
                f"`{plain}`",
                ", ".join(f"`{name}` ({default})" for name, default in settings.items()) or "-",
                "-" if general == plain else f"`{general}`",
            ]
        )
    head = ["activation", "function", "settings (default)", "with every setting"]
    return markdown(head, lines, labels=4)


def gpus() -> str:
    """A line per group of schemes: the kernels of their GEMMs on each GPU, or that none runs."""
    problem = load_problems()["qwen3-30b"]
    config = FusedMoEConfig(
        problem.num_experts, problem.top_k, problem.hidden_size, problem.intermediate_size,
        problem.num_experts, "silu", "meta", RoutingMethodType.Default,
    )  # fmt: skip
    targets = [target for target in TARGETS.values() if target.facts is not None]

    def kernels(scheme: Scheme, target: TargetDevice) -> str:
        if what_lacks(scheme, target.facts.arch):
            return "**no**"
        costs = explain(config, scheme, num_tokens=TOKENS, device=target.name).costs
        return "<br>".join(dict.fromkeys(f"`{name}`" for cost in costs for name in cost.kernels))

    alike: dict[tuple[str, ...], list[str]] = {}
    for scheme in SCHEMES.values():
        alike.setdefault(tuple(kernels(scheme, t) for t in targets), []).append(f"`{scheme.name}`")
    lines = [["<br>".join(names), *cells] for cells, names in alike.items()]
    head = ["schemes", *(f"{t.name}<br>{_ran_on(t) or t.gpu}" for t in targets)]
    return markdown(head, lines, labels=len(head))


TOKENS = (1, 64, 4096)
"""Tokens for which `gpus` asks for kernels."""


def instead() -> str:
    """A line per scheme that some GPU cannot run: what it lacks, and what runs there."""
    lines = []
    for scheme in SCHEMES.values():
        lowest = min_capability(scheme.activation)
        archs = [t.facts.arch for t in TARGETS.values() if t.facts and t.facts.arch < lowest]
        if archs:
            weights, names = schemes_instead(scheme, max(archs))
            told = ", ".join(f"`{name}`" for name in names) or "-"
            lines.append([f"`{scheme.name}`", f"sm_{lowest}", told, weights if names else "-"])
    return markdown(["scheme", "runs from", "below it", "with"], lines, labels=4)


def projections() -> str:
    """Names of projections in checkpoints."""
    what = {"w1": "gate", "w3": "up", "w13": "gate and up in one", "w2": "down"}
    names = {w: [f"`{name}`" for name, its in PROJECTIONS.items() if its == w] for w in what}
    lines = [[what[w], ", ".join(names[w])] for w in what]
    return markdown(["projection", "names"], lines, labels=2)


def layouts() -> str:
    """A line per layout of checkpoints."""
    names = list(inspect.signature(moe_ops.loading.CheckpointLayout).parameters)
    lines = [
        [f"`{name}`", *("found out" if v is None else str(v) for v in vars(layout).values())]
        for name, layout in LAYOUTS.items()
    ]
    return markdown(["layout", *(f"`{n}`" for n in names)], lines, labels=1 + len(names))


def architectures() -> str:
    """A line per architecture that layers can be explained for, and what is known of it."""
    lines = []
    for target in TARGETS.values():
        if target.facts is None:
            continue
        compiled = target.facts.arch in ARCHITECTURES
        lines.append(
            [
                f"`{target.name}`",
                target.gpu,
                "yes" if compiled else "no",
                _ran_on(target) or "**none**",
                "yes" if target.speed else "no",
            ]
        )
    head = ["architecture", "GPU that stands for it", "compiled in tests", "tests ran on", "speed"]
    return markdown(head, lines, labels=5)


def _ran_on(target: TargetDevice) -> str:
    """The GPUs of an architecture on which the tests have run."""
    return ", ".join(gpu for gpu, arch in support.MEASURED.items() if arch == target.facts.arch)


def gpu_tests() -> str:
    """A line per record of tests on GPUs and under compute-sanitizer."""
    lines = []
    for path in sorted(RESULTS.glob("*/gpu_tests*.json")):
        record = json.loads(path.read_text())
        failures = [t for file in record["files"].values() for t in file.get("failures", ())]
        counts = [f"{record[name]:,}" for name in ("passed", "failed", "skipped")]
        told = "<br>".join(f"`{name}`" for name in failures) or "-"
        whole = "yes" if record.get("complete") else "no"
        lines.append([f"`{path.stem}`", record["gpu"], *_when(record), whole, told, *counts])
    head = ["record", "GPU", "commit", "date", "all parts", "which failed"]
    tests = markdown([*head, "passed", "failed", "skipped"], lines, labels=6)
    lines = []
    for path in sorted(RESULTS.glob("*/sanitizer.json")):
        record = json.loads(path.read_text())
        for tool, found in record["tools"].items():
            if tool != "plain":
                counts = [str(found[name]) for name in ("cases", "errors", "unjudged")]
                lines.append([tool, record["gpu"], *_when(record), *counts])
    head = ["tool", "GPU", "commit", "date", "cases", "errors", "not judged"]
    return f"{tests}\n\n{markdown(head, lines, labels=4)}"


def _when(record: dict[str, Any]) -> list[str]:
    return [record["commit"][:7], record["date"][:10]]


def floors() -> str:
    """The measured rates from which estimates follow, in a sentence."""
    parts = [
        f"{gpu} {speed.read_bytes_per_s / 1e12:.2f} TB/s, "
        + ", ".join(f"{rate / 1e12:.0f} TFLOP/s in {math}" for math, rate in speed.flops.items())
        for gpu, speed in MEASURED.items()
    ]
    return f"{'; '.join(parts)}."


def tuned() -> str:
    """A line per file of tuned tiles that ships."""
    lines = []
    for path in sorted((ROOT / "moe_ops" / "configs").glob("*.json")):
        fields = dict(part.split("=") for part in path.stem.split(","))
        tokens = ", ".join(key for key in json.loads(path.read_text()) if key.isdigit())
        gpu, scheme = fields["device_name"].replace("_", " "), f"`{fields['scheme']}`"
        lines.append([gpu, scheme, *(fields[n] for n in "EKN"), tokens])
    return markdown(["GPU", "scheme", "E", "H", "I", "tokens"], lines, labels=2)


def profile() -> str:
    """Time by stage, a line per stage, shape and number of tokens."""
    parts = []
    for record in records("profile.json"):
        lines = [
            [
                row["shape"],
                str(row["M"]),
                f"{row['time_us']:.0f}",
                ", ".join(f"{s['operator']} {s['share']:.0%}" for s in row["stages"]),
            ]
            for row in record["rows"]
        ]
        table = markdown(["shape", "tokens", "us", "of which"], lines, labels=1)
        parts += [table, source(record)]
    return "\n\n".join(parts)


def names() -> str:
    """For each public module a line per name, with its first sentence and a link."""
    parts = []
    for module in (moe_ops, *(import_module(f"moe_ops.{name}") for name in SUBMODULES)):
        table = markdown(["name", "what it is"], [*map(_name, _public(module))], labels=2)
        title = inspect.getdoc(module).partition("\n\n")[0]
        parts.append(f"## `{module.__name__}`\n\n{title}\n\n{table}")
    return "\n\n".join(parts)


def _public(module: ModuleType) -> list[tuple[str, Any]]:
    """Classes and functions in ``__all__``."""
    found = [(name, getattr(module, name)) for name in module.__all__]
    return [(name, v) for name, v in found if inspect.isclass(v) or inspect.isfunction(v)]


def _name(named: tuple[str, Any]) -> list[str]:
    name, value = named
    target = inspect.unwrap(value)
    first = inspect.getdoc(value).partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return [f"[`{name}`][{target.__module__}.{target.__qualname__}]", first]


def layer_tables() -> str:
    """The tables of whole layers."""
    return report.report(records())


def whole_models() -> str:
    """The tables of whole models, and the plots of every GPU's record."""
    tables = models_report.report(records("models.json"))
    shown = [
        _picture(path, f"{path.stem}, tokens per second")
        for path in sorted(RESULTS.glob("*/models-*.png"))
    ]
    return "\n\n".join([tables, *shown])


def finetuning() -> str:
    """A line per way of the record of `examples/finetune.py`."""
    record = json.loads((RESULTS / "finetune.json").read_text())
    lines = [
        [
            row["way"],
            f"{row['trained_parameters']:,}",
            f"{row['experts_bytes'] / 1e6:.1f}",
            f"{row['losses'][0]:.4f}",
            f"{row['losses'][-1]:.4f}",
            f"{row['heldout_before']:.4f}",
            f"{row['heldout_after']:.4f}",
        ]
        for row in record["rows"]
    ]
    head = ["way", "trained", "experts, MB", "first loss", "last", "held out before", "after"]
    both = [row["losses"] for row in record["rows"][:2]]
    apart = max(abs(a - b) for a, b in zip(*both, strict=True))
    how = (
        f"`{record['command']}`, torch {record['torch']} on {record['device']}. The losses of both "
        f"implementations are at most {apart:.1g} apart."
    )
    return f"{markdown(head, lines, labels=1)}\n\n{how}"


def _picture(path: Path, what: str) -> str:
    """Copy a GPU's plot beside the tables; return it as a picture that opens in its own size."""
    target = f"{path.parent.name}-{path.name}"
    shutil.copy(path, OUTPUT / target)
    return f"[![{what}](../generated/{target})](../generated/{target})"


def plots() -> str:
    """The plots of layers of every GPU's records, copied beside the tables."""
    parts = []
    for record in records():
        gpu = record["gpu"]
        folder = RESULTS / gpu.lower().replace(" ", "-")
        parts.append(f"### Plots: {gpu}")
        for path in sorted(folder.glob("layer-*.png")):
            scheme = path.stem.removeprefix("layer-")
            roofline = path.with_name(f"roofline-{scheme}.png")
            parts += [
                f"#### Plots: {gpu}, {scheme}",
                _picture(path, f"{scheme} on {gpu}, time against tokens"),
                _picture(roofline, f"{scheme} on {gpu}, rates against ceilings"),
            ]
    for path in sorted(RESULTS.glob("*.png")):
        shutil.copy(path, OUTPUT / path.name)
    return "\n\n".join(parts)


def headline() -> str:
    """The table of mean ratios of every GPU, each below a heading."""
    return "\n\n".join(f"### In short: {r['gpu']}\n\n{report.headline([r])}" for r in records())


PAGES = {
    "offload": host_table.table,
    "offload_times": host_table.times,
    "offload_models": host_table.models,
    "offload_hits": host_table.hit_rates,
    "support": lambda: f"{support.support_table()}\n\n{support.block_scaled_note()}",
    "schemes": schemes,
    "models": models,
    "transformers_models": transformers_models,
    "activations": activations,
    "formulas": formulas,
    "gpus": gpus,
    "instead": instead,
    "layouts": layouts,
    "projections": projections,
    "architectures": architectures,
    "gpu_tests": gpu_tests,
    "floors": floors,
    "tuned": tuned,
    "names": names,
    "headline": headline,
    "beside_peers": lambda: peers_report.report(records()),
    "served_vllm": lambda: served_report.report(records("served_vllm.json")),
    "inside_vllm": lambda: inside_report.report(records("inside_vllm.json"), VLLM),
    "inside_sglang": lambda: inside_report.report(records("inside_sglang.json"), SGLANG),
    "layers": layer_tables,
    "plots": plots,
    "profile": profile,
    "overheads": lambda: report.overheads_report(records("overheads.json")),
    "whole_models": whole_models,
    "finetuning": finetuning,
    "ranks": lambda: ranks_report.report(records("ranks_*.json")),
    "tuning": lambda: tuning_report.report(records("tuning.json")),
    "training": lambda: training_report.report(records("training.json")),
    "training_ranks": lambda: training_report.over_ranks(records("training_ranks.json")),
    "quality": lambda: quality_report.table(quality_report.read()),
}
"""Name of a file in `docs/generated/` -> the function that makes its text."""


def main() -> None:
    """Write every file."""
    OUTPUT.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (OUTPUT / f"{name}.md").write_text(f"{make()}\n")


if __name__ == "__main__":
    main()

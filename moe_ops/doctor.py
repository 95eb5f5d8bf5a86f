"""``moe-ops doctor``: what is installed, what runs here, and whether it computes correctly."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from textwrap import indent
from typing import Any

import torch

from moe_ops import testing
from moe_ops.bench.harness import default_device, driver_version
from moe_ops.bench.problems import Problem, find_problem
from moe_ops.brief import aligned
from moe_ops.dispatch import tuned
from moe_ops.dispatch.device import device_facts, plain_name
from moe_ops.inspect.explanation import explain
from moe_ops.integrations import engines
from moe_ops.integrations.engines import Engine
from moe_ops.pipeline.fused_experts import fused_experts
from moe_ops.scheme import SCHEMES, what_lacks
from moe_ops.version import __version__

DISTRIBUTION = "torch-moe-ops"
OLDEST_TORCH = (2, 10)
SHAPE, LOADS = "qwen3-30b", (1, 64, 4096)
"""The layer and the token counts whose kernels are listed."""
TESTED = ("unquantized", "fp8_block128", "int4_w4a16_g128")
"""Schemes of the self-test, as far as the GPU runs them."""
EXTRAS = {
    "safetensors": ("safetensors",),
    "transformers": ("transformers",),
    "bench": ("transformers", "matplotlib"),
}
"""Packages of the extras that add features."""


@dataclass
class Diagnosis:
    """The facts that `diagnose` found."""

    versions: dict[str, str | None]
    """Python, moe_ops, torch, triton and the GPU's driver; None: not installed."""
    gpus: list[dict[str, Any]]
    """Name, architecture and memory in GB of each GPU."""
    runs_on: str
    """What computes here."""
    layer: str = SHAPE
    """The layer whose kernels are listed."""
    loads: tuple[int, ...] = LOADS
    """Its numbers of tokens."""
    kernels: dict[str, list[str] | str] = field(default_factory=dict)
    """The kernels of both GEMMs at each of `loads`, by scheme, or why the GPU cannot run it. Empty
    without a GPU."""
    tuned: dict[str, Any] = field(default_factory=dict)
    """Files of tuned tiles for this GPU, of all in use, and the user's folder."""
    extras: dict[str, dict[str, str | None]] = field(default_factory=dict)
    """Versions of the packages of each extra."""
    engines: dict[str, Engine] = field(default_factory=dict)
    """What each installed serving engine would take from this library."""
    self_test: dict[str, str] = field(default_factory=dict)
    """Results by scheme: ``passed``, or what went wrong."""
    self_test_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    """What must be repaired; empty: all is well."""

    def to_json(self) -> str:
        """The diagnosis as a JSON object; ``ok`` says whether there is no problem."""
        return json.dumps({"ok": not self.problems, **asdict(self)}, indent=1)

    def __str__(self) -> str:
        blocks = (self._installed(), self._kernels(), self._tested())
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    def _installed(self) -> list[str]:
        rows = [[name, version or "none"] for name, version in self.versions.items()]
        gpus = [f"{gpu['name']}, {gpu['arch']}, {gpu['memory_gb']} GB" for gpu in self.gpus]
        rows += [["GPU", gpu] for gpu in gpus or ["none"]]
        rows.append(["runs on", self.runs_on])
        folder = self.tuned["folder"] or "no folder"
        counts = "{for_this_gpu} files for this GPU, {all} for all".format(**self.tuned)
        rows.append(["tuned tiles", f"{counts}; yours are looked for in {folder}"])
        for extra, packages in self.extras.items():
            listed = ", ".join(f"{name} {version or 'none'}" for name, version in packages.items())
            lacks = None in packages.values()
            install = f" (pip install '{DISTRIBUTION}[{extra}]')" if lacks else ""
            rows.append(["extra", f"{extra}: {listed}{install}"])
        for name, engine in self.engines.items():
            first, *rest = [engine.version or "cannot be imported", *str(engine).splitlines()]
            rows += [[name, first], *(["", line] for line in rest)]
        return [aligned(rows, left=2)]

    def _kernels(self) -> list[str]:
        if not self.kernels:
            return []
        tokens = ", ".join(map(str, self.loads))
        texts = {
            name: k if isinstance(k, str) else ", ".join(k) for name, k in self.kernels.items()
        }
        head = f"kernels of {self.layer} with {tokens} tokens (GEMM 1 + GEMM 2 where they differ)"
        return [head, _indented(texts)]

    def _tested(self) -> list[str]:
        lines = [f"self-test against the float64 oracle, {self.self_test_s:.1f} s"]
        lines.append(_indented(self.self_test))
        return [*lines, "", *([f"PROBLEM: {one}" for one in self.problems] or ["all is well"])]


def _indented(texts: dict[str, str]) -> str:
    return indent(aligned(texts.items(), left=2), "  ")


def diagnose(
    progress: Callable[[str], None] = lambda text: None,
    problem: Problem | None = None,
    loads: Sequence[int] = LOADS,
) -> Diagnosis:
    """Look at this installation and this machine, and run the self-test.

    Args:
        progress: called with what is done next.
        problem: the layer whose kernels are listed; None: `SHAPE`.
        loads: its numbers of tokens.
    """
    problem = problem or find_problem(SHAPE)
    triton = _version("triton")
    gpus = [_gpu(number) for number in range(torch.cuda.device_count())]
    diagnosis = Diagnosis(
        versions={
            "Python": platform.python_version(),
            "moe_ops": __version__,
            "torch": torch.__version__,
            "triton": triton,
            "driver": driver_version(),
        },
        gpus=gpus,
        layer=problem.name,
        loads=tuple(loads),
        runs_on="the GPU: Triton kernels" if gpus else "the CPU: the references, in eager PyTorch",
    )
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        diagnosis.problems.append(f"torch must be at least {oldest}, got {torch.__version__}")
    if gpus and triton is None:
        diagnosis.problems.append("the GPU needs Triton: pip install triton")
    diagnosis.extras = {
        extra: {name: _version(name) for name in names} for extra, names in EXTRAS.items()
    }
    _tuned(diagnosis)
    progress("asking the serving engines that are installed")
    diagnosis.engines = engines.installed()
    if gpus:
        progress("asking which kernels serve which scheme")
        diagnosis.kernels = kernels_of(problem, loads=loads)
    _run_self_test(diagnosis, progress)
    return diagnosis


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpu(number: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(number)
    arch = f"sm_{properties.major}{properties.minor}"
    memory = round(properties.total_memory / 1e9)
    return {"name": properties.name, "arch": arch, "memory_gb": memory}


def _tuned(diagnosis: Diagnosis) -> None:
    """Count the layers in tuned files, and add files that cannot be used to the problems."""
    here = plain_name(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    read = [tuned.look_into(folder) for folder in tuned.folders()]
    diagnosis.problems += [problem for one in read for problem in one.problems]
    in_use = tuned.tables(layer for one in read for layer in one.layers)
    counts = {key: len(layers) for key, layers in in_use.items()}
    mine = sum(number for (gpu, _), number in counts.items() if gpu == here)
    folder = tuned.FOLDER and str(tuned.FOLDER)
    diagnosis.tuned = {"for_this_gpu": mine, "all": sum(counts.values()), "folder": folder}


def kernels_of(
    problem: Problem, device: str | None = None, loads: Sequence[int] = LOADS
) -> dict[str, list[str] | str]:
    """The kernels of a layer by scheme, or why the GPU cannot run the scheme.

    Args:
        problem: the layer.
        device: a GPU such as ``sm_90``; None: this machine's.
        loads: numbers of tokens.
    """
    config = problem.config(default_device())
    kernels: dict[str, list[str] | str] = {}
    for scheme in SCHEMES.values():
        told = explain(config, scheme, num_tokens=loads, device=device)
        facts = told.target.facts
        lacks = None if facts is None else what_lacks(scheme, facts.arch)
        names = [" + ".join(dict.fromkeys(cost.kernels)) for cost in told.costs if cost.kernels]
        kernels[scheme.name] = lacks or names
    return kernels


def _run_self_test(diagnosis: Diagnosis, progress: Callable[[str], None]) -> None:
    """Run small layers, and add what is wrong to the problems."""
    device, started = default_device(), time.perf_counter()
    arch = device_facts(device).arch if device.type == "cuda" else None
    for name in TESTED:
        if arch is not None and what_lacks(SCHEMES[name], arch) is not None:
            continue
        progress(f"self-test of {name}")
        diagnosis.self_test[name] = result = self_test(name, device)
        if result != "passed":
            diagnosis.problems.append(f"self-test of {name}: {result}")
    diagnosis.self_test_s = time.perf_counter() - started


@torch.no_grad()
def self_test(scheme: str, device: torch.device) -> str:
    """Compare a small bf16 layer with the float64 oracle; ``passed``, or what went wrong."""
    problem = testing.Problem(17, 4, 2, 256, 128, torch.bfloat16, scheme=scheme)
    try:
        inputs = testing.quantize_inputs(problem, testing.make_inputs(problem, str(device)))
        out = testing.call(fused_experts, problem, inputs.inputs, quant_config=inputs.config)
        exact = testing.bounded_oracle(problem, inputs.exact, inputs.config)
        reference = testing.reference_experts(problem, inputs.inputs, inputs.config)
        testing.assert_layer_matches(out, exact, reference)
    except Exception as error:  # whatever is wrong with this machine is what is asked for
        return f"{type(error).__name__}: {error}"
    return "passed"

"""Named problems: their sizes, and seeded inputs on the device."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

import moe_ops
from moe_ops import checks
from moe_ops import scheme as schemes
from moe_ops.activation import kind_and_key
from moe_ops.pipeline.forms import gains_by_fp8, reads_packed

Call = Callable[[], Tensor]
"""A timed call, which returns ``(T, H)``."""
ROUTINGS = ("uniform", "zipf")
SEED = 2026
ACTIVE_EXPERTS = {
    "qwen3-30b": {8: 51, 64: 126},
    "deepseek-v3": {8: 58, 64: 218},
    "qwen3-next": {8: 74, 64: 369},
    "gpt-oss-120b": {8: 27, 64: 109},
    "llama4-scout": {8: 8, 64: 16},
    "mixtral": {8: 8},
}
"""Number of active experts that uniform routing must have, by shape and number of tokens, where
random draws differ. A small batch takes the time to read its active experts' weights, so records
are comparable only with equal numbers of active experts."""

LARGEST_INPUT = 5.0
"""What schemes with given scales of activations are told to expect of the inputs of both GEMMs,
whose numbers are about N(0, 1)."""

_MAX_DRAWS = 2000
_NUMBERS_AT_ONCE = 2**28
"""Numbers that are quantized at once: quantizing takes some 20 bytes of memory for each."""


@dataclass(frozen=True)
class Problem:
    """One model's MoE layer. Named problems are gated SiLU in every scheme.

    Raises:
        ValueError: a size that no layer has; more experts of a token than experts.
    """

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    timed: bool
    activation: str = "silu"
    """Key of the activation."""
    scheme: str | None = None
    """Key of the scheme of the model's weights; None: not quantized, or not said."""

    def __post_init__(self) -> None:
        checks.between(1, checks.MAX_EXPERTS, num_experts=self.num_experts)
        checks.at_least(1, hidden_size=self.hidden_size, intermediate_size=self.intermediate_size)
        if self.top_k > self.num_experts:
            most = f"at most the {self.num_experts} experts"
            raise ValueError(f"experts of a token must be {most}, got {self.top_k}")

    @property
    def w1_rows(self) -> int:
        """Rows of an expert's first weight."""
        gated = kind_and_key(self.activation)[0].is_gated
        return self.intermediate_size * (2 if gated else 1)

    def config(self, device: torch.device | str, **changes: Any) -> moe_ops.FusedMoEConfig:
        """What `moe_ops.explain` asks about the layer; ``changes`` replace its other fields."""
        activation = changes.get("activation", self.activation)
        defaults = {
            "num_local_experts": self.num_experts,
            "activation": activation,
            "routing_method": moe_ops.RoutingMethodType.Renormalize,
            "is_act_and_mul": kind_and_key(activation)[0].is_gated,
        }
        return moe_ops.FusedMoEConfig(
            self.num_experts,
            self.top_k,
            self.hidden_size,
            self.intermediate_size,
            device=device,
            **{**defaults, **changes},
        )


TINY = Problem("tiny", num_experts=8, top_k=2, hidden_size=64, intermediate_size=32, timed=False)


def load_problems() -> dict[str, Problem]:
    """Every named problem, `TINY` included."""
    sizes = [field.name for field in fields(Problem)[1:] if field.default is MISSING]
    named = [Problem(name, *(shape[size] for size in sizes)) for name, shape in _shapes().items()]
    return {problem.name: problem for problem in [*named, TINY]}


def _shapes() -> dict[str, dict[str, Any]]:
    return json.loads(files("moe_ops.bench").joinpath("shapes.json").read_text())


def known_names() -> dict[str, str]:
    """Names of problems, and names of models with these sizes -> name of the problem."""
    names = {name: name for name in load_problems()}
    for name, shape in _shapes().items():
        names.update(dict.fromkeys(shape["aliases"], name))
    return names


def find_problem(name: str) -> Problem:
    """The problem called ``name``, or of the model ``name`` (any case, with or without its org).

    Raises:
        ValueError: an unknown name; the message lists the known names.
    """
    keys = known_names()
    plain = name.rpartition("/")[2].lower().replace("_", "-")
    if plain not in keys:
        raise ValueError(unknown("model", name, keys, plain))
    return load_problems()[keys[plain]]


UNTUNED = "untuned"
"""Name of all layers for which no file of tuned tiles is shipped."""


def find_problems(name: str) -> tuple[Problem, ...]:
    """The problem called ``name``, or all layers that nobody tuned, called `UNTUNED`.

    Raises:
        ValueError: an unknown name; the message lists the known names.
    """
    if name.lower() != UNTUNED:
        return (find_problem(name),)
    problems = load_problems()
    return tuple(problems[key] for key, shape in _shapes().items() if shape.get(UNTUNED))


def problem_of_sizes(text: str) -> Problem:
    """The problem of four sizes ``E,k,H,I``: experts, experts of a token, hidden, intermediate.

    Raises:
        ValueError: other than four positive integers, or more experts of a token than experts.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 4 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"sizes must be four positive integers E,k,H,I, got {text!r}")
    num_experts, top_k, hidden, intermediate = map(int, parts)
    name = f"E{num_experts}-k{top_k}-H{hidden}-I{intermediate}"
    return Problem(name, num_experts, top_k, hidden, intermediate, timed=False)


def unknown(what: str, name: str, choices: Iterable[str], spelled: str | None = None) -> str:
    """Error text for an unknown name: all known names, and the nearest one if any is near."""
    choices = list(choices)
    hint = checks.did_you_mean(name if spelled is None else spelled, choices)
    return f"{what} must be one of {', '.join(choices)}, got {name!r}{hint}"


class Inputs(NamedTuple):
    """The arguments of one call of the layer besides the weights."""

    x: Tensor
    """``(T, H)`` bf16."""
    topk_weights: Tensor
    """``(T, k)`` float32, each row summing to one."""
    topk_ids: Tensor
    """``(T, k)`` int32."""
    num_active: int
    """Experts with at least one token."""


@dataclass(frozen=True)
class Experts:
    """The weights of one layer, as `moe_ops.fused_experts` takes them."""

    scheme: schemes.Scheme
    stored: tuple[schemes.QTensor, schemes.QTensor]
    """Both weights, as the scheme stores them."""
    quant_config: moe_ops.FusedMoEQuantConfig
    activation: str = "silu"

    @classmethod
    def of(
        cls, scheme: schemes.Scheme, w1: schemes.QTensor, w2: schemes.QTensor, activation: str
    ) -> Experts:
        """Both weights, with scales of the inputs of both GEMMs if the scheme wants them given."""
        scales = {
            name: torch.full((1,), LARGEST_INPUT / scheme.quants[0].largest, device=w1.data.device)
            for name in scheme.input_scale_names
        }
        config = moe_ops.FusedMoEQuantConfig.from_weights(scheme, w1, w2, **scales)
        return cls(scheme, (w1, w2), config, activation)

    @property
    def w1(self) -> Tensor:
        """The stored numbers of the first weight."""
        return self.stored[0].data

    @property
    def w2(self) -> Tensor:
        """The stored numbers of the second weight."""
        return self.stored[1].data

    @property
    def bytes_per_expert(self) -> int:
        """Bytes that a layer reads for one active expert, including scales."""
        tensors = [t for weight in self.stored for t in weight if t is not None]
        return sum(t.nbytes for t in tensors) // self.w1.shape[0]

    @cached_property
    def loaded(self) -> Experts:
        """These weights in the form in which a layer keeps them.

        See `reads_packed` and `gains_by_fp8`; as fp8 they have another scheme.
        """
        return self._held(batch_invariant=False)

    @cached_property
    def loaded_invariant(self) -> Experts:
        """These weights in the form in which a layer in batch-invariant mode keeps them."""
        return self._held(batch_invariant=True)

    def _held(self, *, batch_invariant: bool) -> Experts:
        held = schemes.exact_fp8_scheme(self.scheme)
        if held is not None and gains_by_fp8(self.w1.device, self.scheme):
            exact = [schemes.exact_rows(weight, self.scheme) for weight in self.stored]
            if all(bool(x.all()) for x in exact):
                w1, w2 = (schemes.as_fp8(weight, self.scheme) for weight in self.stored)
                return Experts.of(held, w1, w2, self.activation)
        reads = [
            reads_packed(
                w.data,
                self.scheme,
                torch.bfloat16,
                batch_invariant=batch_invariant,
                activation=activation,
            )
            for w, activation in zip(self.stored, (self.activation, ""), strict=True)
        ]
        return self.in_fragments([which for which, read in enumerate(reads, start=1) if read])

    def in_fragments(self, which: Collection[int]) -> Experts:
        """These weights, of which ``which`` (1, 2 or both) are in the packed form."""
        if not which:
            return self
        w1, w2 = (
            schemes.pack_weight(weight, self.scheme)
            if number in which and not schemes.is_packed(weight.data)
            else weight
            for number, weight in enumerate(self.stored, start=1)
        )
        return Experts.of(self.scheme, w1, w2, self.activation)

    def dense(self, expert: int) -> tuple[Tensor, Tensor]:
        """The weights of one expert in float32, dequantized if necessary."""
        parts = [
            schemes.QTensor._make([t if t is None else t[expert : expert + 1] for t in weight])
            for weight in self.stored
        ]
        w1, w2 = (schemes.dequantize_weight(part, self.scheme)[0] for part in parts)
        return w1, w2


def make_experts(problem: Problem, scheme_name: str, device: torch.device) -> Experts:
    """Weights ~ N(0, 1) / sqrt(fan_in), the same for every scheme before they are quantized.

    Args:
        problem: the sizes.
        scheme_name: a name in `moe_ops.SCHEMES`, or ``bf16`` for unquantized bf16.
        device: device of the weights; a quantized scheme also needs room for one weight in bf16.

    Raises:
        ValueError: an unknown scheme.
    """
    scheme = read_scheme(scheme_name)
    experts, hidden, inner = problem.num_experts, problem.hidden_size, problem.intermediate_size
    generator = torch.Generator(device).manual_seed(SEED)
    w1 = _random_weight((experts, problem.w1_rows, hidden), generator, scheme)
    w2 = _random_weight((experts, hidden, inner), generator, scheme)
    return Experts.of(scheme, w1, w2, problem.activation)


def read_scheme(name: str) -> schemes.Scheme:
    """The scheme called ``name``; ``bf16`` means unquantized, as in the benchmark records."""
    return schemes.get_scheme("unquantized" if name == "bf16" else name)


def _random_weight(
    shape: tuple[int, int, int], generator: torch.Generator, scheme: schemes.Scheme
) -> schemes.QTensor:
    """A random bf16 weight, quantized a few experts at a time to bound memory."""
    w = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    for expert in w:
        expert.normal_(0.0, shape[2] ** -0.5, generator=generator)
    if scheme.weight is None:
        return schemes.QTensor(w)
    at_once = max(1, _NUMBERS_AT_ONCE // w[0].numel())
    parts = [schemes.quantize_weight(part, scheme) for part in w.split(at_once)]
    joined = [None if field[0] is None else torch.cat(field) for field in zip(*parts, strict=True)]
    return schemes.QTensor._make(joined)


def make_inputs(problem: Problem, tokens: int, routing: str, device: torch.device) -> Inputs:
    """Tokens ~ N(0, 1) with a routing: the renormalized top-k of a softmax of random logits.

    The routing is drawn on the CPU, so that it is the same on every device.
    """
    generator = torch.Generator(device).manual_seed(SEED + 1)
    x = torch.empty((tokens, problem.hidden_size), dtype=torch.bfloat16, device=device)
    x.normal_(generator=generator)
    wanted = ACTIVE_EXPERTS.get(problem.name, {}).get(tokens) if routing == "uniform" else None
    for draw in range(_MAX_DRAWS if wanted else 1):
        weights, ids = _draw_routing(problem, tokens, routing, SEED + draw)
        active = ids.unique().numel()
        if active == wanted:
            break
    return Inputs(x, weights.to(device), ids.to(device), active)


def _draw_routing(problem: Problem, tokens: int, routing: str, seed: int) -> tuple[Tensor, Tensor]:
    """One draw: ``topk_weights`` float32 and ``topk_ids`` int32, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((tokens, problem.num_experts), generator=generator)
    if routing == "zipf":
        # The r-th most likely expert has 1/r of the odds of the first; their order is random.
        rank = torch.randperm(problem.num_experts, generator=generator) + 1
        logits -= rank.log()
    weights, ids = logits.softmax(-1).topk(problem.top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)


def reference_rows(experts: Experts, inputs: Inputs, rows: Tensor) -> Tensor:
    """The layer in float32 on the dequantized weights, for the tokens ``rows`` only."""
    x, weights, ids = (t[rows] for t in inputs[:3])
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in ids.unique().tolist():
        w1, w2 = experts.dense(expert)
        token, slot = (ids == expert).nonzero(as_tuple=True)
        y = moe_ops.apply_moe_activation(experts.activation, x[token].float() @ w1.t()) @ w2.t()
        out.index_add_(0, token, y * weights[token, slot, None])
    return out

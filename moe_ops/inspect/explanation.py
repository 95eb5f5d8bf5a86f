"""`explain`: which kernels a layer runs on, why, and what it costs, as a value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from moe_ops import checks
from moe_ops.activation import kind_and_key
from moe_ops.brief import aligned, byte_count
from moe_ops.dispatch.families import BY_NAME
from moe_ops.dispatch.hopper import HopperTiles, KernelTiles
from moe_ops.inspect.costs import Cost, cost_in_parts, cost_of
from moe_ops.inspect.devices import TargetDevice, target_named, target_of
from moe_ops.inspect.host_costs import HIT_RATES, HOST_GBPS, HostCosts, host_costs
from moe_ops.inspect.traffic import Link, Traffic, exchange_table, fastest, link_of, traffic_of
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.formats import FusedMoEActivationFormat
from moe_ops.pipeline.forms import multiplies_fp8
from moe_ops.pipeline.modular_kernel import FusedMoEKernel
from moe_ops.pipeline.selection import (
    CANDIDATES,
    Candidate,
    Experts,
    as_quant_config,
    build,
    chosen,
    judge,
    wanted_format,
)
from moe_ops.scheme import ExactRows, FusedMoEQuantConfig, Scheme, exact_fp8_scheme, what_lacks

REFERENCES_RUN = (
    "no kernel runs on a CPU: the references run, in eager PyTorch (another device explains a GPU, "
    "such as h100 or sm_90)"
)


@dataclass(frozen=True)
class Explanation:
    """What `select_kernel` would do, and what the result costs.

    ``str(explanation)`` is a table; `to_json` has the same facts and more.
    """

    config: FusedMoEConfig
    scheme: Scheme
    target: TargetDevice
    rows: tuple[Candidate, ...]
    """Every implementation, in order of preference."""
    choice: str | None
    """Name of the implementation that is chosen, or of the experts of a kernel that a layer was
    given; None: none serves this configuration."""
    prepare_finalize: str | None
    activation_format: str
    costs: tuple[Cost, ...]
    """One cost for each number of tokens; empty without a choice."""
    link: Link
    """What joins the ranks."""
    exact_rows: ExactRows | None = None
    """How many rows of a layer's MXFP4 weights are exact as fp8; None if that was not asked, or if
    the scheme has no such form."""
    exchanges: tuple[tuple[Traffic, ...], ...] = ()
    """For each number of tokens what every way to exchange them sends; empty if ranks do not
    exchange tokens."""
    host: HostCosts | None = None
    """What experts in host memory cost; None if that was not asked."""
    shared_experts: int = 0
    """Shared experts of a layer, which are among the experts that a token has."""

    def to_json(self) -> str:
        """The explanation as a JSON object."""
        config = {name: _json_value(value) for name, value in vars(self.config).items()}
        config["activation"] = kind_and_key(self.config.activation)[1]
        config["moe_parallel_config"] = asdict(self.config.moe_parallel_config)
        parts = {
            "scheme": self.scheme.key,
            "device": self.target.name,
            "gpu": self.target.gpu,
            "config": config,
            "activation_format": self.activation_format,
            "choice": self.choice,
            "prepare_finalize": self.prepare_finalize,
            "implementations": [asdict(row) for row in self.rows],
            "costs": [asdict(cost) for cost in self.costs],
        }
        if self.exact_rows is not None:
            plain, exact, rows = self.exact_rows
            parts["exact_fp8_rows"] = {"scheme": plain.key, "exact": exact, "rows": rows}
        if self.exchanges:
            parts["link"] = self.link._asdict()
            parts["exchanges"] = [
                {"fastest": fastest(rows), "ways": [row._asdict() for row in rows]}
                for rows in self.exchanges
            ]
        if self.host is not None:
            parts["host"] = {**asdict(self.host), "hit_rates": HIT_RATES}
        return json.dumps(parts, indent=1)

    def __str__(self) -> str:
        parts = [self._head(), self._why(), self._table(), self._notes()]
        if self.exchanges:
            parts.append(exchange_table(self.config, self.exchanges, self.link))
        host = "" if self.host is None else str(self.host)
        return "\n\n".join(filter(None, (*parts, host)))

    def _head(self) -> str:
        c, target = self.config, self.target
        device = target.name if target.gpu is None else f"{target.name} ({target.gpu})"
        local = "" if c.num_local_experts == c.num_experts else f" ({c.num_local_experts} here)"
        shared = f" ({self.shared_experts} of them shared)" if self.shared_experts else ""
        sizes = (
            f"{c.num_experts} experts{local}, {c.experts_per_token} a token{shared}, hidden "
            f"{c.hidden_dim}, intermediate {c.intermediate_size}, {c.activation_kind.value}, "
            f"{_json_value(c.in_dtype)}{', batch-invariant' if c.batch_invariant else ''}"
        )
        chosen = f"{self.choice} behind {self.prepare_finalize}"
        if self.choice is None:
            chosen = "no implementation serves this"
        head = f"{self.scheme.name} on {device}, {self.activation_format} format: {chosen}"
        runs = "" if target.facts is not None else f"\n{REFERENCES_RUN}"
        return f"{head}{runs}\n{sizes}"

    def _why(self) -> str:
        names = [["implementation", "serves", "why not"]]
        for row in self.rows:
            text = "chosen" if row.implementation == self.choice else row.reason
            text = text or "a preferred implementation was chosen"
            names.append([row.implementation, "yes" if row.supported else "no", text])
        return aligned(names, left=3)

    def _table(self) -> str:
        if not self.costs:
            return ""
        head = ["tokens", "GEMM 1", "GEMM 2", "experts", "weights", "in + out", "between"]
        lines = [[*head, "GFLOP", "estimate us", "workspace"]]
        for cost in self.costs:
            moved = (cost.weight_bytes, cost.activation_bytes, cost.intermediate_bytes)
            lines.append(
                [
                    str(cost.num_tokens),
                    _tile(cost.gemm1),
                    _tile(cost.gemm2),
                    f"{cost.active_experts:.1f}",
                    *map(byte_count, moved),
                    f"{cost.flops / 1e9:.4g}",
                    "-" if cost.floor_us is None else f"{cost.floor_us:.1f}",
                    byte_count(cost.workspace_bytes),
                ]
            )
        return aligned(lines)

    def _notes(self) -> str:
        facts = self.target.facts
        lacks = None if facts is None else what_lacks(self.scheme, facts.arch)
        if lacks is not None:
            return lacks
        if not self.costs:
            return ""
        notes = [
            *self._weights(),
            "experts: number that have a token, on average, under uniform routing",
            "between: rows between the GEMMs, written once and read once (not in the estimate)",
        ]
        notes += [
            f"{cost.num_tokens} tokens: in {cost.parts} parts, each of which reads its experts; "
            "experts, tiles and workspace are those of the largest part"
            for cost in self.costs
            if cost.parts > 1
        ]
        parallel = self.config.moe_parallel_config
        if parallel.exchanges_tokens:
            notes.append(
                f"tokens: of all {parallel.layer_size} ranks together; the links are not in the "
                "estimate"
            )
        if self.costs[0].gemm1 is not None:
            notes.append("tiles: rows x columns x K / warps / stages")
            both = [tiles for cost in self.costs for tiles in (cost.gemm1, cost.gemm2)]
            if any(isinstance(tiles, HopperTiles) for tiles in both):
                notes.append("tiles of Hopper's own kernels: rows x weight rows / stages")
            notes.extend((*self._tiles_from(), *self._passed_over()))
        elif facts is None:
            notes.append("tiles: none, the CPU runs the references")
        speed = self.target.speed
        if speed is None:
            notes.append(f"estimate: none, no rates were measured on {self.target.gpu or 'a CPU'}")
        else:
            rates = ", ".join(f"{rate / 1e12:.0f} {name}" for name, rate in speed.flops.items())
            notes.append(
                f"estimate: weights and tokens at {speed.read_bytes_per_s / 1e12:.2f} TB/s or the "
                f"products at {rates} TFLOP/s, as measured on an {self.target.gpu}"
            )
        return "\n".join(notes)

    def _weights(self) -> list[str]:
        """A line about MXFP4 weights that may be held as fp8."""
        kernels = (kernel for cost in self.costs for kernel in cost.kernels or ())
        fragments = any(BY_NAME[kernel].fragments for kernel in kernels)
        form = "packed" if fragments else "plain"
        if self.exact_rows is not None:
            plain, exact, rows = self.exact_rows
            held = f"held as fp8 ({self.scheme.name})" if self.scheme != plain else form
            share = f"{exact} of {rows} rows ({exact / rows:.2%}) are exact as fp8"
            return [f"weights: {plain.name}, {held}; {share}"]
        facts, as_fp8 = self.target.facts, exact_fp8_scheme(self.scheme)
        if facts is None or as_fp8 is None or not multiplies_fp8(self.scheme, facts.arch):
            return []
        return [f"weights: {form}; a layer whose rows are all exact as fp8 runs as {as_fp8.name}"]

    def _tiles_from(self) -> list[str]:
        """One line for each source of tiles; if there are several, with the GEMMs that use it."""
        users: dict[str, list[str]] = {}
        for cost in self.costs:
            for gemm, source in enumerate(cost.tiles_from or (), start=1):
                users.setdefault(source, []).append(f"GEMM {gemm} of {cost.num_tokens}")
        if len(users) == 1:
            return [f"tiles: {source}" for source in users]
        return [f"tiles: {source}: {', '.join(of)}" for source, of in users.items()]

    def _passed_over(self) -> list[str]:
        """One line for each reason why kernels were passed over, with the GEMMs."""
        kernels: dict[str, dict[str, None]] = {}
        gemms: dict[str, dict[str, None]] = {}
        for cost in self.costs:
            for which, reasons in enumerate(cost.passed_over or (), start=1):
                for kernel, why in reasons:
                    kernels.setdefault(why, {})[kernel] = None
                    gemms.setdefault(why, {})[f"GEMM {which} of {cost.num_tokens}"] = None
        return [f"not {', '.join(kernels[why])}: {why}: {', '.join(gemms[why])}" for why in gemms]


class Explainable(Protocol):
    """A layer that `explain` takes: a `FusedMoE`."""

    @property
    def moe_config(self) -> FusedMoEConfig:
        """The layer as a value."""

    @property
    def scheme(self) -> Scheme:
        """The scheme of the parameters."""

    def exact_fp8_rows(self) -> ExactRows | None:
        """How many rows are exact as fp8."""


def explain(
    config: FusedMoEConfig | Explainable,
    scheme: str | Scheme | FusedMoEQuantConfig | None = None,
    *,
    num_tokens: Sequence[int] = (1, 64),
    device: str | None = None,
    candidates: Sequence[Experts] = CANDIDATES,
    link: str | Link = "nvlink4",
    resident: Any = None,
    host_gbps: float = HOST_GBPS,
) -> Explanation:
    """Explain what `select_kernel` chooses and why, and what the layer costs. Runs no kernel.

    Args:
        config: the layer: a configuration, or a `FusedMoE`, of which the explanation also says
            whether its MXFP4 weights are exact as fp8, and whether they are held so (with
            ``device``: whether they would be). A layer whose ``kernel`` was set runs on that.
        scheme: a name, a `Scheme` or a `FusedMoEQuantConfig`; None for a `FusedMoE`.
        num_tokens: token counts to explain.
        device: a name such as ``sm_90`` or ``h100`` (see `moe_ops.inspect.devices.target_named`)
            in place of ``config.device``; it need not be in this machine.
        candidates: as for `select_kernel`.
        link: what joins ranks that exchange tokens: a `Link`, or a name in
            `moe_ops.inspect.traffic.LINKS`.
        resident: experts on the device if all are in host memory, as in `moe_ops.offload_`; None:
            the number that a `FusedMoE` has there; for a configuration, all.
        host_gbps: gigabytes per second from host memory to the device.

    Returns:
        The explanation. Its ``str`` is what ``moe-ops explain`` prints.

    Raises:
        ValueError: an unknown scheme, device or link, a number of tokens that is not positive,
            ``resident`` outside its range, ``candidates`` for a layer whose kernel was set.
    """
    layer = _LayerFacts()
    if hasattr(config, "exact_fp8_rows"):
        config, scheme, layer = _of_layer(config, scheme, device)
        resident = layer.resident if resident is None else resident
    checks.instance("config", config, FusedMoEConfig)
    if scheme is None:
        raise TypeError("scheme must be given for a FusedMoEConfig, got None")
    if not isinstance(num_tokens, Sequence):
        raise TypeError(f"num_tokens must be a sequence of ints, got {num_tokens!r}")
    for number in num_tokens:
        checks.at_least(1, num_tokens=number)
    if device is None:
        target = target_of(torch.device(config.device))
    else:
        target = target_named(device)
        config = replace(config, device=target.torch_device())
    quant = as_quant_config(scheme)
    capability = None if device is None or target.facts is None else target.facts.arch
    most_tokens = max(num_tokens, default=1)
    rows, kernel = _serving(config, quant, candidates, capability, layer.kernel, most_tokens)
    costs, exchanges, link, host = [], [], link_of(link), None
    if resident is not None:
        host = host_costs(config, quant.scheme, resident, num_tokens, host_gbps, layer.shared)
    if kernel is not None:
        experts = kernel.fused_experts
        most = _most_tokens(config, kernel, layer)
        cost = partial(cost_of, config, quant.scheme, experts, target, layer.shared)
        costs = [cost_in_parts(cost, number, most) for number in num_tokens]
        if config.moe_parallel_config.exchanges_tokens:
            before = None if experts.expects_unquantized_inputs else quant.scheme.activation
            exchanges = [traffic_of(config, before, number, link) for number in num_tokens]
    return Explanation(
        config=config,
        scheme=quant.scheme,
        target=target,
        rows=rows,
        choice=None if kernel is None else type(kernel.fused_experts).__name__,
        prepare_finalize=None if kernel is None else type(kernel.prepare_finalize).__name__,
        activation_format=_format_of(config, kernel).value[0],
        costs=tuple(costs),
        link=link,
        exact_rows=layer.exact,
        exchanges=tuple(exchanges),
        host=host,
        shared_experts=layer.shared,
    )


class _LayerFacts(NamedTuple):
    """What a layer knows beside its configuration."""

    exact: ExactRows | None = None
    resident: int | None = None
    chunk_size: int | None = None
    shared: int = 0
    """Shared experts, which every token has."""
    kernel: FusedMoEKernel | None = None
    """The kernel that was set."""


def _serving(
    config: FusedMoEConfig,
    quant: FusedMoEQuantConfig,
    candidates: Sequence[Experts],
    capability: int | None,
    own: FusedMoEKernel | None,
    most_tokens: int,
) -> tuple[tuple[Candidate, ...], FusedMoEKernel | None]:
    """What each class says, and the kernel that runs: a layer's ``own``, else one of the choice."""
    if own is not None:
        if candidates is not CANDIDATES:
            raise ValueError(
                "candidates must be left out for a layer whose kernel was set, got "
                f"{[cls.__name__ for cls in candidates]}"
            )
        alone = (type(own.fused_experts),)
        return judge(config, quant.scheme, alone, capability, _format_of(config, own)), own
    rows = judge(config, quant.scheme, candidates, capability)
    choice = chosen(rows, candidates)
    return rows, None if choice is None else build(choice, config, quant, most_tokens)


def _format_of(config: FusedMoEConfig, kernel: FusedMoEKernel | None) -> FusedMoEActivationFormat:
    return wanted_format(config) if kernel is None else kernel.fused_experts.activation_format()


def _most_tokens(config: FusedMoEConfig, kernel: FusedMoEKernel, layer: _LayerFacts) -> int | None:
    """The most tokens that the experts of one rank get at a time; None: all of them."""
    if config.moe_parallel_config.exchanges_tokens:
        return None
    limits = (
        kernel.prepare_finalize.max_num_tokens_per_rank(),
        kernel.chunk_size,
        layer.chunk_size,
    )
    return min(filter(None, limits), default=None)


def _of_layer(
    layer: Any, scheme: Any, device: str | None
) -> tuple[FusedMoEConfig, Scheme, _LayerFacts]:
    """The configuration of a layer, in which a token's shared experts count, and its scheme."""
    if scheme is not None:
        raise ValueError(f"scheme must be None for a layer, which has one, got {scheme}")
    exact, held = layer.exact_fp8_rows(), layer.scheme
    if exact is not None and device is not None:
        held, facts = exact.scheme, target_named(device).facts
        if exact.exact == exact.rows and facts is not None and multiplies_fp8(held, facts.arch):
            held = exact_fp8_scheme(held)
    config, shared = layer.moe_config, layer.routing["num_fused_shared_experts"]
    config = replace(config, experts_per_token=config.experts_per_token + shared)
    resident, chunk = layer.resident_experts, layer.chunk_size
    return config, held, _LayerFacts(exact, resident, chunk, shared, layer.state.kernel)


def _json_value(value: object) -> object:
    """A value for JSON: ints, bools, strings and None unchanged, else its name or its text."""
    if value is None or type(value) in (int, bool, str):
        return value
    return str(getattr(value, "name", value)).removeprefix("torch.")


def _tile(tiles: KernelTiles | None) -> str:
    if tiles is None:
        return "-"
    if isinstance(tiles, HopperTiles):
        schedule = " on demand" if tiles.on_demand else ""
        return f"{tiles.kernel} {tiles.block_m}x{tiles.block_n} /{tiles.num_stages}{schedule}"
    sizes = f"{tiles.block_m}x{tiles.block_n}x{tiles.block_k}"
    return f"{sizes} /{tiles.num_warps} /{tiles.num_stages}"

"""The bytes that exchanges of tokens send over the links between ranks, and how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, comb, sqrt
from typing import NamedTuple

from moe_ops import checks
from moe_ops.brief import aligned, byte_count
from moe_ops.parallel.parallel_config import GATHERING_BACKENDS
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.pipeline.exchange.fixed_capacity import capacity_of
from moe_ops.scheme import Quant

ROUTING_BYTES = 4 + 4
"""Bytes of an expert's id (int32) and weight (float32), which travel with each slot of a token."""
SPARE = 6
"""Room in a block of `FixedCapacityPrepareAndFinalize`, in standard deviations of the copies that
uniform routing has for one rank."""


class Link(NamedTuple):
    """What joins the ranks; rates are of the bytes that leave one rank."""

    name: str
    collective_bytes_per_s: float
    """Rate of large collectives of a backend of `torch.distributed`."""
    push_bytes_per_s: float | None
    """Rate of kernels that store into the memory of peers; None: there is no such memory."""
    collective_us: float
    """Time of the smallest collective."""
    push_us: float
    """Time of the smallest exchange by kernels."""
    source: str
    """Where the numbers come from."""


LINKS = {
    link.name: link
    for link in (
        Link(
            "nvlink4",
            235e9,
            348e9,
            8.7,
            6.6,
            "measured on two H200, in CUDA graphs: NCCL 2.28 all-gathers, Triton kernels' stores",
        ),
        Link("ndr400", 50e9, None, 0.0, 0.0, "nominal: one port of 400 Gb/s for each rank"),
    )
}
"""Known links: NVLink of the fourth generation, and InfiniBand NDR between nodes. The measurements
are in `benchmarks/NOTES.md`, under Links between ranks."""


class Traffic(NamedTuple):
    """What one exchange sends, under uniform routing of tokens that are spread evenly over ranks.

    Bytes are those that leave one rank.
    """

    backend: str
    num_tokens: int
    """Tokens of all ranks together."""
    copies: float
    """Rows that leave a rank for each of its tokens, each way, padding included; on average."""
    dispatch_bytes: int
    """Rows, scales, ids and weights, on the way to the experts."""
    combine_bytes: int
    """Sums, on the way back."""
    time_us: float | None
    """Both ways at the link's rate, with the least time of each collective; None: it does not run
    on this link."""
    capacity_factor: float | None
    """The factor with which ``fixed_capacity`` has room for the copies of uniform routing and
    `SPARE` standard deviations; None for other backends."""


class _Way(NamedTuple):
    """How a backend sends."""

    collectives: int
    """In sequence, both ways together, not counting those that agree on the number of tokens."""
    pushes: bool = False
    """Whether kernels store into the memory of peers."""


WAYS = {
    "allgather_reducescatter": _Way(3),
    "fixed_capacity": _Way(3),
    "alltoall": _Way(4),
    "symmetric": _Way(2, pushes=True),
}
"""The ways to exchange tokens, each under one name."""
SAME = {"naive": "allgather_reducescatter"}
"""Other names of ways."""


def gathered_copies(ranks: int) -> float:
    """Copies of a token's row over the links if every rank gets every token: ``R - 1``."""
    return ranks - 1.0


def slot_copies(ranks: int, top_k: int) -> float:
    """Copies over the links if one travels for each slot: ``k (R - 1) / R``."""
    return top_k * (ranks - 1) / ranks


def rank_copies(ranks: int, top_k: int, num_experts: int) -> float:
    """Copies over the links if one travels to each rank that holds one of a token's experts.

    The k experts of a token are distinct and uniform, and experts are spread over ranks as
    `determine_expert_map` does. With E experts of which rank r holds n_r, this is
    ``(R - 1) / R * sum_r (1 - C(E - n_r, k) / C(E, k))``, which for many experts approaches
    ``(R - 1) (1 - (1 - 1 / R)**k)``.
    """
    return (ranks - 1) / ranks * sum(_reached(ranks, top_k, num_experts))


def _reached(ranks: int, top_k: int, num_experts: int) -> list[float]:
    """For each rank the probability that it holds one of a token's experts."""
    held = [num_experts // ranks + (rank < num_experts % ranks) for rank in range(ranks)]
    every = comb(num_experts, top_k)
    return [1 - comb(num_experts - n, top_k) / every for n in held]


def traffic_of(
    config: FusedMoEConfig, quant: Quant | None, num_tokens: int, link: Link
) -> tuple[Traffic, ...]:
    """The traffic of every way to exchange tokens that serves the layer.

    Each token is exchanged once, also if several ranks have it. Results that go to the other ranks
    of a replica are not counted.

    Args:
        config: the layer of a rank; its parallel config says how many ranks there are.
        quant: how rows are quantized before they travel; None: they are not.
        num_tokens: tokens of all ranks together.
        link: what joins the ranks.
    """
    parallel, top_k = config.moe_parallel_config, config.experts_per_token
    ranks = parallel.layer_size
    num_experts = config.num_experts
    own = num_tokens / ranks
    rows = ceil(own)
    exact = rank_copies(ranks, top_k, num_experts) if parallel.use_ep else gathered_copies(ranks)
    factor = _capacity_factor(rows, max(_reached(ranks, top_k, num_experts)))
    copies = {
        "allgather_reducescatter": rows * gathered_copies(ranks),
        "fixed_capacity": capacity_of(rows, factor) * gathered_copies(ranks),
        "alltoall": own * exact,
        "symmetric": own * exact,
    }
    there, back = row_bytes(config, quant)
    traffic = []
    for backend, way in WAYS.items():
        if not parallel.use_ep and backend not in GATHERING_BACKENDS:
            continue
        sent = copies[backend]
        traffic.append(
            Traffic(
                backend=backend,
                num_tokens=num_tokens,
                copies=sent / own,
                dispatch_bytes=round(sent * there),
                combine_bytes=round(sent * back),
                time_us=_time_us(way, sent * (there + back), link),
                capacity_factor=factor if backend == "fixed_capacity" else None,
            )
        )
    return tuple(traffic)


def row_bytes(config: FusedMoEConfig, quant: Quant | None) -> tuple[int, int]:
    """Bytes of a token on its way to experts, and of its sum on the way back."""
    hidden, itemsize = config.hidden_dim, config.in_dtype.itemsize
    back = hidden * itemsize
    there = back
    if quant is not None:
        there = quant.data_width(hidden) * quant.dtype.itemsize
        if not quant.per_tensor:
            there += quant.row_scale_shape(1, hidden)[1] * quant.scale_dtype.itemsize
    return there + config.experts_per_token * ROUTING_BYTES, back


def fastest(rows: Sequence[Traffic]) -> str | None:
    """The backend that takes the least time; None: none runs on the link."""
    timed = [(row.time_us, row.backend) for row in rows if row.time_us is not None]
    return min(timed)[1] if timed else None


def exchange_table(
    config: FusedMoEConfig, exchanges: Sequence[Sequence[Traffic]], link: Link
) -> str:
    """Return the table of what every way to exchange tokens sends, and its notes.

    Args:
        config: the layer.
        exchanges: `traffic_of` of each number of tokens.
        link: what joins the ranks.
    """
    ranks, top_k = config.moe_parallel_config.layer_size, config.experts_per_token
    named = config.moe_parallel_config.all2all_backend
    lines = [["tokens", "exchange", "", "rows sent", "there", "back", f"us on {link.name}"]]
    for rows in exchanges:
        best = fastest(rows)
        for row in rows:
            mark = "chosen" if row.backend == SAME.get(named, named) else ""
            mark = ", ".join(filter(None, (mark, "fastest" if row.backend == best else "")))
            time = "-" if row.time_us is None else f"{row.time_us:.1f}"
            moved = (byte_count(row.dispatch_bytes), byte_count(row.combine_bytes), time)
            name = row.backend
            if row.capacity_factor is not None:
                name += f", capacity_factor {row.capacity_factor:.2f}"
            lines.append([str(row.num_tokens), name, mark, f"{row.copies:.2f}", *moved])
    per_rank = gathered_copies(ranks)
    if config.moe_parallel_config.use_ep:
        per_rank = rank_copies(ranks, top_k, config.num_experts)
    notes = [
        "rows sent: that leave a rank for each of its tokens, each way, with padding",
        f"least rows over {ranks} ranks: {gathered_copies(ranks):.2f} if all tokens are "
        f"gathered, {slot_copies(ranks, top_k):.2f} for one a slot, {per_rank:.2f} for one to "
        "each rank of its experts",
        "there, back: bytes that leave a rank; us: both ways, with the least time of each "
        "collective",
        f"capacity_factor: room for {SPARE} standard deviations of uniform routing",
        "alltoall: without the time for which the host waits; symmetric: in one NVLink domain",
        "symmetric in the Batched format: never chosen, it nearly always took longer on two "
        "and four H200",
        f"{link.name}: {link.source}",
    ]
    return "\n".join((aligned(lines, left=3), *notes))


def link_of(link: str | Link) -> Link:
    """The link, or the known link of a name.

    Raises:
        TypeError: neither a `Link` nor a string.
        ValueError: an unknown name.
    """
    if isinstance(link, Link):
        return link
    checks.one_of("link", link, list(LINKS))
    return LINKS[link]


def _capacity_factor(rows: int, probability: float) -> float:
    """The capacity factor, in hundredths, with room for copies of ``rows`` tokens and to spare."""
    spread = sqrt(probability * (1 - probability) / rows)
    return min(100, ceil(100 * (probability + SPARE * spread))) / 100


def _time_us(way: _Way, nbytes: float, link: Link) -> float | None:
    least = link.push_us if way.pushes else link.collective_us
    rate = link.push_bytes_per_s if way.pushes else link.collective_bytes_per_s
    return None if rate is None else way.collectives * least + 1e6 * nbytes / rate

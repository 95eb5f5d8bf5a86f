"""What experts in host memory cost: bytes on both sides, and time on the link between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_ops import checks
from moe_ops.brief import aligned
from moe_ops.inspect.costs import active_experts, bytes_per_expert
from moe_ops.pipeline.config import FusedMoEConfig
from moe_ops.residency import Amount, parse_amount, wave_slots, waves_of
from moe_ops.scheme import Scheme

HIT_RATES = (0.5, 0.75, 0.9, 0.95, 0.99)
HOST_GBPS = 50.0
"""Gigabytes per second from pinned host memory to an H200 (PCIe 5): see ``benchmarks/NOTES.md``."""
MOST_TOKENS = 2**20
"""The largest number of tokens that is tried."""


@dataclass(frozen=True)
class LinkTime:
    """Time of one layer on the link in a call, under a uniform routing."""

    num_tokens: int
    wanted_experts: float
    """Average number of experts that have a token."""
    waves: int
    """The largest number of waves."""
    us_per_token: tuple[float, ...]
    """For each of `HIT_RATES`."""
    no_hits_us_per_token: float
    most_hits: float
    """The largest share of the wanted experts that the slots hold."""


@dataclass(frozen=True)
class HostCosts:
    """One layer with experts in host memory."""

    resident: int
    num_experts: int
    device_bytes: int
    """Bytes of the slots."""
    host_bytes: int
    """Bytes of all experts of the rank; 0 if all of them are resident."""
    host_gbps: float
    times: tuple[LinkTime, ...]
    """One for each number of tokens; none if all experts are resident."""
    streams_from: int | None
    """The smallest number of tokens that want more experts than there are slots on average; None:
    none does."""

    def __str__(self) -> str:
        """A table with notes."""
        sizes = (self.device_bytes / 1e9, self.host_bytes / 1e9)
        if not self.host_bytes:
            return (
                f"resident: all {self.num_experts} experts of the layer, {sizes[0]:.4g} GB on the "
                "device: nothing is in host memory, and nothing is copied"
            )
        rates = (f"{rate:.0%} hits" for rate in HIT_RATES)
        lines = [["tokens", "wanted", "waves", "no hits", *rates]]
        for time in self.times:
            counts = (str(time.num_tokens), f"{time.wanted_experts:.1f}", str(time.waves))
            cells = [f"{time.no_hits_us_per_token:.4g}"]
            for rate, us in zip(HIT_RATES, time.us_per_token, strict=True):
                cells.append(f"{us:.4g}" if rate <= time.most_hits else "-")
            lines.append([*counts, *cells])
        share, all_ms = self.resident / self.num_experts, self.host_bytes / self.host_gbps / 1e6
        notes = [
            f"resident: {self.resident} of {self.num_experts} experts a layer: "
            f"{sizes[0]:.4g} GB on the device, {sizes[1]:.4g} GB in host memory",
            f"hits: us a token that one layer waits for a link of {self.host_gbps:g} GB/s, by the "
            "share of wanted experts that are on the device; -: so many do not fit there",
            "wanted: experts that have a token, on average, under uniform routing (other routings "
            "want fewer); waves: at most",
            f"expect {share:.0%} hits if all experts are equally likely, and more in text; times "
            "of a model are those of all its layers with experts together",
        ]
        if self.streams_from is not None:
            notes.append(
                f"from {self.streams_from} tokens on a call wants more than {self.resident} "
                "experts on average, and streams them in waves: it copies most of them whatever "
                f"the slots held, all experts once at most ({all_ms:.4g} ms), and the more tokens "
                "it has, the less of that is a token's"
            )
        return "\n".join((aligned(lines), *notes))


def host_costs(
    config: FusedMoEConfig,
    scheme: Scheme,
    resident: Any,
    num_tokens: Sequence[int],
    host_gbps: float = HOST_GBPS,
    shared: int = 0,
) -> HostCosts:
    """Return the costs of a layer whose experts are in host memory.

    Args:
        config: the layer.
        scheme: its scheme.
        resident: as in `moe_ops.offload_`, of this one layer: a size such as ``"2.5GB"``, too.
        num_tokens: token counts.
        host_gbps: gigabytes per second from host memory to the device.
        shared: experts that every token has.

    Raises:
        TypeError, ValueError: ``resident`` outside its range; a rate that is not positive.
    """
    checks.number("host_gbps", host_gbps)
    if not host_gbps > 0:
        raise ValueError(f"host_gbps must be positive, got {host_gbps}")
    experts, size = config.num_local_experts, round(bytes_per_expert(config, scheme))
    least = min(config.experts_per_token, experts)
    (count,) = parse_amount("resident", resident, [Amount(experts, least, size)])
    times = []
    for tokens in num_tokens if count < experts else ():
        wanted = active_experts(config, tokens, shared)
        us = 1e6 * wanted * size / (host_gbps * 1e9) / tokens
        ids = tokens * config.experts_per_token
        waves = waves_of(experts, wave_slots(experts, count, ids), ids)
        missed = tuple(us * (1 - rate) for rate in HIT_RATES)
        times.append(LinkTime(tokens, wanted, waves, missed, us, min(1.0, count / wanted)))
    streams = (n for n in range(1, MOST_TOKENS) if active_experts(config, n, shared) > count)
    return HostCosts(
        count,
        experts,
        count * size,
        experts * size if count < experts else 0,
        float(host_gbps),
        tuple(times),
        None if count == experts else next(streams, None),
    )

"""The registry of other implementations of the same layer, which are timed in the same run.

It is empty in an installed package: ``benchmarks/peers`` of the repository fills it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moe_ops.bench.problems import Call, Experts, Inputs, Problem

Maker = Callable[[Experts, Inputs], Call]


@dataclass(frozen=True)
class Peer:
    """An implementation: where it can run, and what it takes. All take gated SiLU only."""

    missing: Callable[[], str | None]
    """Says what is missing to run it here; None if nothing is."""
    makers: Mapping[str, Maker]
    """Scheme, ``bf16`` if nothing is quantized -> factory of the timed call."""
    fits: Callable[[str, Problem, int], bool] = lambda scheme, problem, tokens: True
    """Whether it takes a scheme with these sizes and that number of tokens."""

    def takes(self, scheme: str, problem: Problem, tokens: int) -> bool:
        """Whether it computes a case."""
        return (
            scheme in self.makers
            and problem.activation == "silu"
            and self.fits(scheme, problem, tokens)
        )

    def __call__(self, experts: Experts, inputs: Inputs) -> Call:
        """The timed call of a case that the peer takes."""
        name = experts.scheme.name
        return self.makers["bf16" if name == "unquantized" else name](experts, inputs)


PEERS: dict[str, Peer] = {}
"""Name -> the implementation."""


def available() -> list[str]:
    """The peers that can run here."""
    return [name for name, peer in PEERS.items() if peer.missing() is None]

"""What two engines write after the same prompts, greedily: how far it is equal, and near ties."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Written(NamedTuple):
    """What an engine wrote."""

    tokens: list[list[int]]
    """The tokens after each prompt."""
    best: list[list[dict[int, float]]]
    """Log-probabilities of the best tokens at each position."""


class Parting(NamedTuple):
    """Where the continuations of a prompt part."""

    position: int
    theirs: dict[int, float]
    ours: dict[int, float]
    """The best tokens there, with log-probabilities."""
    tokens: tuple[int, int]
    """What they wrote and what we wrote."""

    @property
    def gap(self) -> float:
        """The smaller distance of both engines between the two tokens.

        Infinite, unless both tokens are among the best of both engines.
        """
        a, b = self.tokens
        if not {a, b} <= self.theirs.keys() & self.ours.keys():
            return math.inf
        return min(abs(best[a] - best[b]) for best in (self.theirs, self.ours))


class Comparison(NamedTuple):
    """How far continuations agree."""

    equal: int
    """Tokens before any difference, of all prompts together."""
    apart: float
    """The largest distance of a token's log-probabilities up to there."""
    partings: list[Parting]

    def as_json(self) -> dict[str, Any]:
        """What a record keeps; log-probabilities are rounded."""
        return {
            "equal": self.equal, "apart": round(self.apart, 5), "near_ties": self.ties(),
            "partings": [
                {"position": x.position, "gap": round(x.gap, 5) if x.gap < math.inf else None,
                 "tokens": x.tokens,
                 "theirs": {t: round(p, 4) for t, p in x.theirs.items()},
                 "ours": {t: round(p, 4) for t, p in x.ours.items()}}
                for x in self.partings
            ],
        }  # fmt: skip

    def ties(self) -> list[bool]:
        """Whether each parting is a near tie.

        An engine finds the two tokens no further apart than both engines' log-probabilities are
        elsewhere.
        """
        return [parting.gap <= self.apart for parting in self.partings]


def compare(theirs: Written, ours: Written) -> Comparison:
    """Compare two engines' continuations of the same prompts.

    Raises:
        ValueError: a prompt has longer continuations by one engine than by the other.
    """
    equal, apart, partings = 0, 0.0, []
    for a, b, p, q in zip(theirs.tokens, ours.tokens, theirs.best, ours.best, strict=True):
        if len(a) != len(b):
            raise ValueError(f"continuations must have as many tokens, got {len(a)} and {len(b)}")
        same = next((i for i in range(len(a)) if a[i] != b[i]), len(a))
        equal += same
        for i in range(same):
            apart = max(apart, *(abs(p[i][token] - q[i][token]) for token in set(p[i]) & set(q[i])))
        if same < len(a):
            partings.append(Parting(same, p[same], q[same], (a[same], b[same])))
    return Comparison(equal, apart, partings)

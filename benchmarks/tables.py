"""What the reports share: names, numbers of tokens, and Markdown tables."""

from __future__ import annotations

from typing import Any

OURS = "moe_ops"
TOKENS = (1, 8, 64, 512, 4096, 16384)
Record = dict[str, Any]


def is_ours(impl: str) -> bool:
    """Whether an implementation's name is one of this library's."""
    return impl.startswith(OURS)


def markdown(head: list[str], lines: list[list[str]], labels: int) -> str:
    """A Markdown table; all but the first ``labels`` columns are numbers."""
    rule = ["---"] * labels + ["--:"] * (len(head) - labels)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])

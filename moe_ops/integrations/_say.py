"""Lines in the log of an engine."""

from __future__ import annotations

import logging
from functools import cache


@cache
def say_once(engine: str, text: str) -> None:
    """Write a line to an engine's log, once per process.

    The logger is below the engine's own, which has handlers; the root logger may have none.
    """
    logging.getLogger(f"{engine}.moe_ops").info("moe_ops: %s", text)

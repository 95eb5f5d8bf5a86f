"""What the serving engines that are installed here would take from this library.

`installed` asks each engine in a process of its own, which imports the engine and its plug-in, as
the engine does when it starts: ``python -m moe_ops.integrations.engines vllm`` prints the answer.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from moe_ops.integrations._engines import attribute_of

ENGINES = ("vllm", "sglang")
MARK = "ANSWER "
TIMEOUT_S = 300


@dataclass
class Engine:
    """What one engine takes."""

    version: str | None = None
    """The engine's version; None: it could not be imported."""
    takes: list[str] = field(default_factory=list)
    """Kinds of layers that the plug-in is asked for."""
    leaves: dict[str, str] = field(default_factory=dict)
    """Kinds of layers that the engine keeps, and why."""
    log: list[str] = field(default_factory=list)
    """What the plug-in wrote to the engine's log as it was registered."""

    def __str__(self) -> str:
        lines = [f"takes {'; '.join(self.takes) or 'nothing'}"]
        lines += [f"leaves {name}: {reason}" for name, reason in self.leaves.items()]
        return "\n".join([*lines, *self.log])


def installed() -> dict[str, Engine]:
    """Return what each installed engine takes."""
    return {name: _asked(name) for name in ENGINES if find_spec(name) is not None}


def _asked(name: str) -> Engine:
    """Return the answer of a process of its own; an engine that fails there takes nothing."""
    command = [sys.executable, "-m", __name__, name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Engine(leaves={"everything": f"no answer within {TIMEOUT_S} s"})
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return Engine(**json.loads(line[len(MARK) :]))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return Engine(leaves={"everything": lines[-1].strip() if lines else f"exit {done.returncode}"})


def ask(name: str) -> Engine:
    """Register the plug-in of an engine in this process, and return what the engine takes."""
    plugin = import_module(f"moe_ops.integrations.{name}")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(f"{name}.moe_ops")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    plugin.register()
    logger.removeHandler(handler)
    answer = Engine(attribute_of(name, "__version__"), log=lines)
    switched_off = os.environ.get(plugin.SWITCH) == "0"
    formats: dict[str, Any] = import_module(f"{plugin.__name__}._interface").formats()
    for kind, lacks in formats.items():
        if switched_off:
            answer.leaves[kind] = f"{plugin.SWITCH} is 0"
        elif lacks:
            answer.leaves[kind] = f"it has no {lacks} as the plug-in knows it"
        else:
            answer.takes.append(kind)
    return answer


if __name__ == "__main__":
    print(MARK + json.dumps(asdict(ask(sys.argv[1]))))

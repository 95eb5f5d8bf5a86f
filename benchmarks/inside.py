"""Layers inside a serving engine: its own experts and this library's, timed in one run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import chain
from typing import Any, NamedTuple

from peers import PEERS

from moe_ops.bench import layer
from moe_ops.bench.harness import Row


class Engine(NamedTuple):
    """A serving engine: what its benchmark runs and records, and what the report says of it."""

    name: str
    runs: str
    """What of the engine runs a layer."""
    impls: Mapping[str, str]
    """Name in `PEERS` -> the name in the report's tables."""
    distributions: Mapping[str, str]
    """Name of a part -> the distribution whose version a row has."""
    defaults: Mapping[str, str]
    """Options that are passed on before those that are given."""
    facts: Callable[[layer.Case, str], dict[str, Any]] = lambda case, impl: {}
    """Further facts of a row, of a case and an implementation."""

    @property
    def program(self) -> str:
        """Name of the program, and of its record, without a suffix."""
        return f"inside_{self.name.lower()}"


def time_case(engine: Engine, case: layer.Case, impl: str) -> Row:
    """Time one implementation, and add the versions of the engine and its facts to the row."""
    row = layer.time_case(case, impl)
    installed = {x.metadata["Name"]: x.version for x in metadata.distributions()}
    versions = {x: installed[x] for x in engine.distributions.values() if x in installed}
    return replace(row, config={**row.config, **versions, **engine.facts(case, impl)})


def main(engine: Engine) -> int:
    """Run the layer benchmark on what is installed, and return its exit status."""
    lacks = {name: PEERS[name].missing() for name in engine.impls}
    for name, lack in lacks.items():
        if lack:
            print(f"{name} is left out, it needs {lack}", file=sys.stderr)
    usable = [name for name, lack in lacks.items() if lack is None]
    if not usable:
        return 1
    defaults = {**engine.defaults, "--impls": ",".join(usable)}
    if {"--config", "--sizes"} & {argument.partition("=")[0] for argument in sys.argv}:
        del defaults["--model"]
    arguments = [*chain(*defaults.items()), *sys.argv[1:]]
    work = layer.Work(f"{engine.program}.json", partial(time_case, engine), layer.print_times)
    return layer.main(arguments, prog=f"{engine.program}.py", work=work)

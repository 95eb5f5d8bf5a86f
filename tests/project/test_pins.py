"""Names, signatures, defaults and saved words that others rely on: `data/pins.txt` lists them.

More may be added. Nothing on the list may go, be renamed or get another default.
"""

import ast
import inspect
import re
from enum import Enum
from importlib import import_module
from pathlib import Path

import pytest

from moe_ops.cli import main

DATA = Path(__file__).parents[1] / "data"
NAMED_ONLY, POSITIONAL = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
MANY = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
REQUIRED, ANY = "required", "..."
"""Instead of a default: there is none; any."""


def pins():
    """The records of the list, each on one line."""
    text = re.sub(r"\n +", " ", (DATA / "pins.txt").read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def members(start):
    """The subject of each record of members that starts so, and its members."""
    for line in pins():
        subject, colon, words = line.partition(": ")
        if colon and subject.startswith(start):
            yield subject, words.split()


def found(path):
    """What the dotted name of a function, a class or a method stands for; None: nothing."""
    place, _, name = path.rpartition(".")
    return getattr(import_module(place) if place.islower() else found(place), name, None)


def written(default):
    """A default as the list writes it."""
    if default is inspect.Parameter.empty:
        return REQUIRED
    if isinstance(default, Enum):
        return f"{type(default).__name__}.{default.name}"
    return repr(default)


def parameters_of(function):
    """Each parameter's kind (positional, named only, one for many) and default, by name."""
    there = inspect.signature(function).parameters.values()
    there = [p for p in there if p.name != "self"]
    return {MANY.get(p.kind, "") + p.name: (p.kind, written(p.default)) for p in there}


def pinned_parameters(line):
    """Kinds and defaults of a recorded signature's parameters, by name."""
    given = ast.parse(f"def f{line[line.index('(') :]}: 0").body[0].args
    defaults = [REQUIRED] * (len(given.args) - len(given.defaults))
    defaults += [ast.unparse(x) for x in given.defaults]
    pinned = {a.arg: (POSITIONAL, x) for a, x in zip(given.args, defaults, strict=True)}
    for a, x in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        pinned[a.arg] = NAMED_ONLY, REQUIRED if x is None else ast.unparse(x)
    for kind, a in zip(MANY, (given.vararg, given.kwarg), strict=True):
        if a is not None:
            pinned[MANY[kind] + a.arg] = kind, REQUIRED
    return pinned


def differences(pinned, there):
    """What a caller who relies on pinned parameters would stumble over."""
    order = [name for name, (kind, _) in pinned.items() if kind is POSITIONAL]
    places = [name for name, (kind, _) in there.items() if kind is POSITIONAL]
    for place, name in enumerate(order):
        if name in places and places.index(name) != place:
            yield f"{name} must be argument {place + 1}, not {places.index(name) + 1}"
    for name, (kind, default) in pinned.items():
        if name not in there:
            yield f"{name} is gone"
        elif there[name][0] is not kind:
            yield f"{name} must be {kind.description}, not {there[name][0].description}"
        elif default not in (ANY, there[name][1]):
            yield f"the default of {name} must be {default}, not {there[name][1]}"
    for name, (kind, default) in there.items():
        if name not in pinned and default == REQUIRED and kind not in MANY:
            yield f"{name} is new and has no default"


def test_signatures():
    """Everything can be called as before."""
    pytest.importorskip("transformers")
    wrong, lines = [], [line for line in pins() if "(" in line.partition(":")[0]]
    for line in lines:
        path = line.partition("(")[0]
        function = found(path)
        if function is None:
            wrong.append(f"{path} is gone")
            continue
        problems = differences(pinned_parameters(line), parameters_of(function))
        wrong += [f"{path}: {problem}" for problem in problems]
    assert not wrong and len(lines) > 80


def test_what_differs_is_said():
    """A list that finds nothing would say nothing."""
    pinned = pinned_parameters("moe_ops.f(a, b, c=1, *, d=None, e=..., **rest)")

    def same(a, b, c=1, more=2, *, d=None, e=5, other=None, **rest):
        raise NotImplementedError

    def other(b, a, c=2, *, e, new, d=0):
        raise NotImplementedError

    assert not [*differences(pinned, parameters_of(same))]
    assert [*differences(pinned, parameters_of(other))] == [
        "a must be argument 1, not 2",
        "b must be argument 2, not 1",
        "the default of c must be 1, not 2",
        "the default of d must be None, not 0",
        "**rest is gone",
        "new is new and has no default",
    ]


def test_members():
    """Modules have their names, enums their members and values, and there is every scheme."""
    gone, listed = [], dict(members("moe_ops"))
    for path, words in listed.items():
        place = import_module(path) if path.islower() else found(path)
        for word in words:
            name, _, value = word.partition("=")
            there = place.get(name) if isinstance(place, dict) else getattr(place, name, None)
            if there is None or value not in ("", repr(getattr(there, "value", there))):
                gone.append(f"{path}: {word}, got {there!r}")
    assert not gone and len(listed) > 5


def test_commands(capsys):
    """The help of a command names its options."""
    gone, listed = [], dict(members("python -m "))
    for command, words in listed.items():
        with pytest.raises(SystemExit):
            main([*command.split()[3:], "--help"])
        text = set(re.findall(r"[\w-]+", capsys.readouterr().out))
        gone += [f"{command} {word}" for word in words if word not in text]
    assert not gone and len(listed) == 4


def test_saved_words():
    """Files of version 0.2 contain these words, which `test_saved.py` reads."""
    files = [path.read_bytes() for path in (DATA / "saved_by_0.2").rglob("*.*") if path.is_file()]
    ((_, words),) = members("saved")
    patterns = {word: re.compile(rf"(?<!\w){word}".encode()) for word in words}
    assert not [w for w, pattern in patterns.items() if not any(map(pattern.search, files))]

"""What the documentation site says is in the package, and the site needs nothing from elsewhere."""

import ast
import inspect
import re
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

import moe_ops

ROOT = Path(__file__).parents[2]
SUBMODULES = (
    "functional", "routing", "pipeline", "parallel", "layer", "loading", "scheme", "testing",
    "training", "quantization",
)  # fmt: skip
CHECKS = ("as_scheme", "get_scheme", "kind_and_key")
"""Functions that check an argument, beside those of `moe_ops.checks`."""


def public_functions():
    """Functions in ``__all__`` of the public modules, each once, without decorators."""
    modules = [moe_ops, *(import_module(f"moe_ops.{name}") for name in SUBMODULES)]
    found = [import_module("moe_ops.integrations.transformers").check]
    found += [getattr(module, name) for module in modules for name in module.__all__]
    return list(dict.fromkeys(inspect.unwrap(f) for f in found if is_function(f)))


def is_function(value):
    return inspect.isfunction(inspect.unwrap(value)) and not inspect.isclass(value)


def refuses(call):
    """Whether a call in a function's body checks an argument."""
    name = ast.unparse(call.func)
    return name.startswith("checks.") or name in CHECKS


def lacks(function):
    """The sections that a function's docstring should have and has not."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    sections = re.findall(r"^(\w+):$", inspect.getdoc(function) or "", re.MULTILINE)
    returns = tree.returns is not None and ast.unparse(tree.returns) != "None"
    raises = any(
        isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and refuses(node))
        for node in ast.walk(tree)
    )
    if inspect.isgeneratorfunction(function):  # a context
        returns = False
    wanted = ["Returns"] * returns + ["Raises"] * raises
    return [section for section in wanted if section not in sections]


def test_public_functions_say_what_they_return_and_raise():
    pytest.importorskip("transformers")
    functions = public_functions()
    assert len(functions) > 60
    missing = {f.__qualname__: lacks(f) for f in functions}
    assert not {name: sections for name, sections in missing.items() if sections}


def test_the_site_loads_nothing_from_elsewhere():
    """Search works from disk: the plug-in `offline` would add a script of a network otherwise."""
    config = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"[\w/.-]+\.(?:js|css)\b", config)
    assert any("iframe-worker" in name for name in named)  # the name that the plug-in looks for
    assert all((ROOT / "docs" / name).exists() for name in named)
    assert not re.search(r"polyfills:.*http", config) and "font: false" in config

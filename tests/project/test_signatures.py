"""A signature stands once, in `moe_ops.ops`: the legs of every operator repeat its schema."""

import ast

from house_numbers import trees
from operator_samples import overload

from moe_ops.ops import STAGES

LEGS = ("moe_ops/kernels", "moe_ops/reference", "fake_impls")
REQUIRED, NAMED = "required", "named only"
OUT = ("out", REQUIRED, NAMED)


def of_schema(schema):
    """Each argument's default and whether it is named only, in order."""
    return [
        (a.name, a.default_value if a.has_default_value() else REQUIRED, NAMED * a.kwarg_only)
        for a in schema.arguments
    ]


def of_function(node, named):
    """What a function takes; keyword-only arguments count if they are in ``named``."""
    given = node.args
    defaults = [REQUIRED] * (len(given.args) - len(given.defaults))
    defaults += [ast.literal_eval(x) for x in given.defaults]
    found = [(a.arg, x, "") for a, x in zip(given.args, defaults, strict=True)]
    for a, x in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        if a.arg in named or x is None:
            found.append((a.arg, REQUIRED if x is None else ast.literal_eval(x), NAMED))
    return found


def problems(qualified, folder, tree):
    schema, name = overload(qualified)._schema, qualified.replace(".", "_")
    named = {a.name for a in schema.arguments if a.kwarg_only}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    there = of_function(functions[name], named)
    if there != of_schema(schema):
        yield f"{folder}: {name} takes {there}, its schema has {of_schema(schema)}"
    more = {a.arg for a in functions[name].args.kwonlyargs} - named
    if more and folder == "fake_impls":
        yield f"{folder}: {name} also takes {more}"


def test_legs_have_the_signatures_of_their_schemas():
    """Names, order and defaults; launchers and references may take more, by name."""
    wrong = []
    for folder in LEGS:
        files = trees((folder,))
        for qualified, stage in STAGES.items():
            wrong += problems(qualified, folder, files[f"{folder}/{stage}.py"])
    assert not wrong, "\n".join(wrong)


def test_what_a_function_takes():
    for text, expected in (
        ("a, b=2, *, out, config=None", [("a", REQUIRED, ""), ("b", 2, ""), OUT]),
        ("b, a", [("b", REQUIRED, ""), ("a", REQUIRED, "")]),
        ("a, *, more", [("a", REQUIRED, ""), ("more", REQUIRED, NAMED)]),
    ):
        (node,) = ast.parse(f"def f({text}): ...").body
        assert of_function(node, {"out"}) == expected

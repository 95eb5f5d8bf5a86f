"""One word a thing: names that the table "Words" of CONTRIBUTING.md replaced do not come back."""

import ast
import re
import textwrap

from house_numbers import ROOT, trees

FOLDERS = ("moe_ops", "fake_impls", "benchmarks")
EXEMPT = {
    ("benchmarks/whole_models.py", "decode"): "a step of a language model, as the field says",
}
"""Old words that stay. (Only whole names are compared, so that `pack_weight`, `is_packed`, `packs`,
``weight_packed`` and the form ``packed`` keep their public and saved names.)"""
MOST = 3
"""Values that a call may unpack from a tuple; more of them are passed by name, or as one value."""


def replaced():
    """The words in the last column of the table in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return {word for row in rows[2:] for word in re.findall(r"`(\w+)`", row[-1])}


def defined(tree):
    """Names that a file defines, with their lines: of functions, parameters, fields, variables."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def size(node):
    """The number of values of a tuple or a list, or of an annotation of a tuple; 0 for others."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "tuple":
        return 0 if ast.unparse(node.slice).endswith("...") else size(node.slice)
    return len(node.elts) if isinstance(node, (ast.Tuple, ast.List)) else 0


def tuples(function):
    """The parameters and variables of a function that are tuples, with their sizes."""
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            yield node.arg, size(node.annotation)
        elif isinstance(node, ast.Assign):
            (target, *_), value = node.targets, node.value
            pair = isinstance(target, ast.Tuple) and size(target) == size(value)
            named = zip(target.elts, value.elts, strict=True) if pair else [(target, value)]
            yield from ((name.id, size(x)) for name, x in named if isinstance(name, ast.Name))


def unpacked(tree):
    """Lines of calls that unpack a tuple of more than `MOST` values."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        sizes = dict(tuples(function))
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            for x in (x.value for x in call.args if isinstance(x, ast.Starred)):
                if max(size(x), sizes.get(getattr(x, "id", ""), 0)) > MOST:
                    yield call.lineno


def skipped(file, text):
    """Lines that ruff must not format, though they are no literal.

    The operands of a kernel and of its launch are left as its author ordered them: line by line,
    kernels would be twice as long.
    """
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    for number, line in enumerate(text.splitlines(), start=1):
        if line.endswith("# fmt: skip") and not file.startswith("moe_ops/kernels/"):
            around = [node for node in statements if node.lineno <= number <= node.end_lineno]
            value = getattr(max(around, key=lambda node: node.lineno), "value", None)
            if not isinstance(value, (ast.Dict, ast.List, ast.Set, ast.Tuple)):
                yield number


def test_old_words():
    words = replaced()
    assert {"packed", "decoded", "found", "known", "given", "how"} <= words
    old = {
        (file, name): line
        for file, tree in trees(FOLDERS).items()
        for name, line in defined(tree)
        if name in words
    }
    assert old.keys() == EXEMPT.keys(), old


def test_calls_unpack_no_long_tuples():
    assert not [
        f"{file}:{line}" for file, tree in trees(FOLDERS).items() for line in unpacked(tree)
    ]
    text = (
        "def f(a: tuple[int, str, int, int], b: tuple[int, ...]):\n    c, d = (1, 2), (1, 2, 3, 4)"
    )
    for call, seen in {"*a": 1, "*b": 0, "*c": 0, "*d": 1, "*(1, 2, 3, 4)": 1, "d": 0}.items():
        assert len([*unpacked(ast.parse(f"{text}\n    g({call})"))]) == seen, call


def test_only_literals_are_not_formatted():
    lines = {file: skipped(file, (ROOT / file).read_text()) for file in trees(FOLDERS)}
    assert not [f"{file}:{line}" for file in lines for line in lines[file]]
    text = "x = {  # fmt: skip\n}\nf(\n    1,\n)  # fmt: skip\n"
    assert [*skipped("a.py", textwrap.dedent(text))] == [5]

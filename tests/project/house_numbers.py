"""Numbers that say how much of the code a reader, or the next addition, has to go through.

    python tests/project/house_numbers.py            print all numbers
    python tests/project/house_numbers.py docstrings  list what one number counts
    python tests/project/house_numbers.py --write    record the numbers
    python tests/project/house_numbers.py --since main  count files of a trial addition on a branch

`test_house_numbers.py` compares them with the record: they may only shrink. The size is printed and
not recorded, because features come.
"""

import ast
import functools
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests/data/house_numbers.json"
LIBRARY = ("moe_ops", "fake_impls")
EVERYTHING = (*LIBRARY, "benchmarks", "tests", "examples", "docs")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@functools.cache
def trees(folders: tuple[str, ...] = LIBRARY) -> dict[str, ast.Module]:
    """The syntax tree of every file below folders of the checkout."""
    files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a docstring, of whatever it documents."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def statements(*folders: str) -> int:
    """Statements without docstrings."""
    nodes = (node for tree in trees(folders).values() for node in ast.walk(tree))
    return sum(isinstance(node, ast.stmt) and not is_text(node) for node in nodes)


RULE = re.compile(r"^(Of|Those|By|The same|That of)\b|(?i:\bas many as\b|\bthose of\b)")
"""What a docstring may not begin with, or contain."""


def docstrings() -> list[str]:
    """Docstrings that break a rule of plain English."""
    return [
        f"{file}:{node.lineno}: {node.value.value.splitlines()[0]}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if is_text(node) and RULE.search(node.value.value)
    ]


ASKED = {
    "element",
    "decoded",
    "dequantizes_both",
    "per_tensor",
    "per_row",
    "zero_point",
    "global_scale",
    "static",
}
"""Attributes of a scheme's parts."""


def conditions(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def asks_a_scheme(condition: ast.AST) -> bool:
    """Whether a condition names a scheme, a `Quant` or one of their attributes."""
    nodes = [*ast.walk(condition)]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names = {node.id for node in nodes if isinstance(node, ast.Name)} | attributes
    return bool(attributes & ASKED) or any("scheme" in n or "quant" in n for n in names)


def scheme_conditions() -> list[str]:
    """Conditions that ask about a scheme."""
    return [
        f"{file}:{condition.lineno}: {ast.unparse(condition)}"
        for file, tree in trees().items()
        for condition in conditions(tree)
        if asks_a_scheme(condition)
    ]


def shared_names() -> list[str]:
    """Functions and classes that several modules define, other than the legs of operators."""
    from moe_ops.ops import STAGES

    files, legs = defaultdict(list), {name.replace(".", "_") for name in STAGES}
    for file, tree in trees().items():
        for name in {node.name for node in tree.body if isinstance(node, DEFINITIONS)} - legs:
            files[name].append(file)
    return [f"{name}: {' '.join(where)}" for name, where in sorted(files.items()) if where[1:]]


def problem_places() -> list[str]:
    """Calls that build a `GemmProblem`: of the class, or of a function beside it."""
    module, found = trees()["moe_ops/dispatch/problem.py"], []
    makers = {
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or node) == "GemmProblem"
    }
    for file, tree in trees().items():
        for node in ast.walk(tree):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in makers - {"without_sum"} | {"GemmProblem"}:
                found.append(f"{file}:{node.lineno}: {name}")
    return found


RUN, MOST_PLACES = 6, 8
"""Lines that two places share, and places of the same lines beyond which they do not count."""
TOKEN = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[A-Za-z_]\w*|\d[\w.]*|\S""")
ACTS = re.compile(
    r"(if|for|while|return|else|elif|try|except|with|raise|yield|assert|del|continue|break)\b"
)


def code_lines(path: Path):
    """Lines of code with their number, text, shape, and whether they do something.

    In a shape all names are ``x``, texts ``s`` and numbers ``0``.
    """
    for number, line in enumerate(path.read_text().splitlines()):
        text = " ".join(line.split())
        if re.match(r"#|\"\"\"|import |from ", text) or not re.search(r"\w\w|\w.\w", text):
            continue
        tokens = TOKEN.findall(text)
        kinds = ("s" if t[0] in "\"'" else "0" if t[0].isdigit() else t for t in tokens)
        shape = " ".join("x" if kind[0].isidentifier() and kind != "s" else kind for kind in kinds)
        assigns = re.search(r"(?<![=!<>:]) = (?!=)", f" {shape} ")
        yield number, text, shape, bool(ACTS.match(text) or assigns or len(tokens) >= 8)


def duplicate_pairs() -> list[str]:
    """Pairs of files, or parts of one, with six lines that are equal but for names and values."""
    files = sorted(path for folder in EVERYTHING for path in (ROOT / folder).rglob("*.py"))
    equal, alike = defaultdict(set), defaultdict(set)
    for file in files:
        lines, name = [*code_lines(file)], str(file.relative_to(ROOT))
        for first in range(len(lines) - RUN + 1):
            numbers, texts, shapes, acts = zip(*lines[first : first + RUN], strict=True)
            place = name, numbers[0], numbers[-1]
            equal[texts].add(place)
            if sum(acts) >= 2 and sum(shape.count(" ") + 1 for shape in shapes) >= 4 * RUN:
                alike[shapes].add(place)
    pairs = {}
    for places in (*equal.values(), *alike.values()):
        there = sorted(places) if 1 < len(places) <= MOST_PLACES else []
        for place, (file, first, last) in enumerate(there):
            for other, begin, _ in there[place + 1 :]:
                if file != other or begin > last:
                    pairs.setdefault((file, other), f"{file}:{first + 1} ~ {other}:{begin + 1}")
    return sorted(pairs.values())


def items_a_function(names) -> float:
    """Items that pytest collects, by the number of test functions; from the items' names."""
    counts = Counter(name.partition("[")[0] for name in names)
    return round(counts.total() / len(counts), 2)


def start_collecting():
    """A process that prints the name of every item of `make test`."""
    command = [sys.executable, "-m", "pytest", "tests", "--collect-only", "-p", "no:cacheprovider"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def own_calls(kind: str) -> list[str]:
    """The library's functions that the second call of a kind enters: see `walks.own_calls`."""
    from walks import own_calls_of

    return own_calls_of(kind)


CALLS = {
    "calls_fused_moe": "unquantized",
    "calls_fp8_block128": "fp8_block128",
    "calls_layer": "layer",
    "calls_dp_ep": "dp+ep",
}
SOURCES = {
    "duplicate_pairs": duplicate_pairs,
    "shared_names": shared_names,
    "scheme_conditions": scheme_conditions,
    "problem_places": problem_places,
    "docstrings": docstrings,
}
MEASURES = {**SOURCES, **{name: functools.partial(own_calls, kind) for name, kind in CALLS.items()}}
"""What is counted, as functions that list it."""
ITEMS = "items_a_function"


def additions(since: str) -> int:
    """Files of the library that differ from a commit: what an addition on a branch takes."""
    command = ["git", "diff", "--name-only", f"{since}...", "--", *LIBRARY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return len(done.stdout.split())


def main(arguments):
    """Print numbers, or what one of them counts."""
    if arguments[:1] == ["--since"]:
        print(f"{additions(arguments[1])} files of {' and '.join(LIBRARY)}")
    elif arguments and arguments[0] in MEASURES:
        print(*MEASURES[arguments[0]](), sep="\n")
    else:
        collecting = start_collecting()
        numbers = {name: len(measure()) for name, measure in MEASURES.items()}
        output, _ = collecting.communicate()
        numbers[ITEMS] = items_a_function(re.findall(r"^tests/.*::.*$", output, re.MULTILINE))
        sizes = {"statements": (*LIBRARY, "benchmarks"), "statements of tests": ("tests",)}
        for name, number in (numbers | {n: statements(*f) for n, f in sizes.items()}).items():
            print(f"{name:20} {number:7}")
        if "--write" in arguments:
            RECORD.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/support")]
    main(sys.argv[1:])

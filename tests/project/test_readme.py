"""The examples of README and documentation run, and what the pages name is there."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "generated")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXAMPLES = BLOCK.findall(README)
BY_ITSELF = "tutorials/quantize.md"
"""Whose results `test_quantize_tutorial` compares with its table."""
WITH_EXAMPLES = [
    page for page in PAGES
    if BLOCK.search(page.read_text()) and not page.as_posix().endswith(BY_ITSELF)
]  # fmt: skip


def name_of(page):
    return str(page.relative_to(ROOT))


def run(text, name, namespace):
    if "transformers" in text:
        pytest.importorskip("transformers")
    exec(compile(text, name, "exec"), namespace)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number):
    run(EXAMPLES[number], f"README example {number + 1}", {"__name__": "readme"})


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_page(page):
    """The examples of a page run one after another, each with the names of those before it."""
    namespace = {"__name__": page.stem}
    for number, text in enumerate(BLOCK.findall(page.read_text()), 1):
        run(text, f"{name_of(page)}, example {number}", namespace)


def test_both_commands_are_named():
    assert "make demo" in README and "make test" in README
    assert len(EXAMPLES) == 3
    assert len(README.splitlines()) <= 150


def test_make_help_lists_every_target():
    make = (ROOT / "Makefile").read_text()
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    targets = set(re.search(r"^\.PHONY: (.*)", make, re.MULTILINE)[1].split())
    assert {line.split()[1] for line in shown.splitlines()} == targets


def test_what_a_snippet_needs_is_installed_above_it():
    """A page's first snippet that imports transformers comes after the extra that brings it."""
    late = []
    for page in (ROOT / "README.md", *PAGES):
        text = page.read_text()
        needs = [block for block in BLOCK.finditer(text) if "from transformers" in block[1]]
        if needs and "torch-moe-ops[transformers]" not in text[: needs[0].start()]:
            late.append(name_of(page))
    assert not late


def test_what_pages_name_is_there():
    """Every path in backquotes, every target of make, and every link of the README."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = []
    for page in (ROOT / "README.md", *PAGES):
        text = page.read_text()
        paths = re.findall(r"`((?:benchmarks|docs|examples|moe_ops|tests)/[\w./-]+)`", text)
        paths += re.findall(r"(?:python|torchrun .*?) ((?:examples|benchmarks)/\w+\.py)", text)
        named = re.findall(r"^make ([\w-]+)|`make ([\w-]+)", text, re.MULTILINE)
        missing += [f"{name_of(page)}: {path}" for path in paths if not (ROOT / path).exists()]
        missing += [f"{name_of(page)}: make {a or b}" for a, b in named if (a or b) not in targets]
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    missing += [f"README.md: {link}" for link in links if not (ROOT / link).exists()]
    assert not missing


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {name_of(page).removeprefix("docs/") for page in PAGES} <= listed


def test_tables_are_made_where_pages_include_them():
    """Each generated file is on a page, and each included file is generated."""
    made = set(re.findall(r'^    "(\w+)": ', (ROOT / "docs/generate.py").read_text(), re.MULTILINE))
    shown = {n for p in PAGES for n in re.findall(r"docs/generated/(\w+)\.md", p.read_text())}
    assert shown == made


def test_pages_install_this_distribution():
    """Every ``pip install`` names the distribution of `pyproject.toml`, with extras that it has."""
    project = (ROOT / "pyproject.toml").read_text()
    name = re.search(r'^name = "(.+)"', project, re.MULTILINE)[1]
    extras = re.findall(r"^(\w+) = \[", project, re.MULTILINE)
    for page in (ROOT / "README.md", *PAGES):
        for found, extra in re.findall(r'pip install "?([\w-]+)(?:\[(\w+)\])?', page.read_text()):
            assert found == name and (not extra or extra in extras), name_of(page)

"""The text of the demo's language model: the documentation inside the running Python.

It consists of the topics of ``pydoc_data``, and the standard library's docstrings and longer
comments, all under PSF-2.0 like Python itself. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

HELDOUT_BYTES = 150_000

# One part of a document: a heading (a dotted name and a signature) and a text.
Entry = tuple[str, str]
Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# Modules with a permission notice of their own may carry another licence than PSF-2.0.
OWN_LICENCE = re.compile(
    "Permission to use, copy|Permission is hereby granted|Redistribution and use|Licensed under"
)
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#[^\n]*\n){3,}", re.MULTILINE)


def source_entries(module: str, source: str) -> Iterator[Entry]:
    """Yield the docstrings and the comment blocks of a module written in Python."""

    def visit(node: Node, name: str, signature: str) -> Iterator[Entry]:
        yield name + signature, ast.get_docstring(node) or ""
        for child in node.body:
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{name}.{child.name}", "")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(child, f"{name}.{child.name}", f"({ast.unparse(child.args)})")

    yield from visit(ast.parse(source), module, "")
    for block in COMMENT_BLOCK.findall(source):
        yield module, re.sub(r"^[ \t]*#+ ?", "", block, flags=re.MULTILINE)


def compiled_entries(module: str) -> Iterator[Entry]:
    """Yield the docstrings of a module written in C, of its functions, classes and methods."""
    namespace = vars(importlib.import_module(module))
    yield module, namespace.get("__doc__") or ""
    for key, value in namespace.items():
        members = vars(value) if isinstance(value, type) else {}
        for name, item in [(key, value)] + [(f"{key}.{k}", v) for k, v in members.items()]:
            # Everything else shows the docstring of its class.
            if callable(item) or inspect.isdatadescriptor(item):
                signature = getattr(item, "__text_signature__", None) or ""
                yield f"{module}.{name}{signature.replace('$', '')}", inspect.getdoc(item) or ""


def read_documents() -> dict[str, list[Entry]]:
    """Collect the documents by name: one for each topic and one for each module."""
    documents = {name: [(name, text)] for name, text in topics.topics.items()}
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        source = path.read_text(encoding="utf-8", errors="replace")
        if not NOT_LIBRARY.intersection(parts) and not OWN_LICENCE.search(source):
            module = ".".join(parts).removesuffix(".__init__")
            documents[module] = list(source_entries(module, source))
    for module in sorted(sys.stdlib_module_names):
        spec = importlib.util.find_spec(module)
        if spec and not (spec.origin or "").endswith(".py"):
            try:
                documents[module] = list(compiled_entries(module))
            except ImportError:  # its shared library is not installed, as tkinter's often is not
                continue
    return documents


def deduplicate(documents: dict[str, list[Entry]]) -> dict[str, str]:
    """Keep the first occurrence of every paragraph, so that no held-out one is trained on."""
    seen: set[str] = set()
    result = {}
    for name, entries in sorted(documents.items()):
        kept = []
        for heading, text in entries:
            paragraphs = {p.strip(): p for p in re.split(r"\n\s*\n", text.strip())}
            new = [p for key, p in paragraphs.items() if key and key not in seen]
            seen.update(paragraphs)
            if new:
                kept.append("\n\n".join([heading, *new]))
        if kept:
            result[name] = "\n\n".join(kept) + "\n"
    return result


def build_corpus() -> tuple[list[str], list[str]]:
    """Split the documents into training and held-out ones; their names' checksums decide."""
    documents = deduplicate(read_documents())
    train: list[str] = []
    heldout: list[str] = []
    size = 0
    for name in sorted(documents, key=lambda name: zlib.crc32(name.encode())):
        (heldout if size < HELDOUT_BYTES else train).append(documents[name])
        size += len(documents[name].encode())
    return train, heldout

"""The description of the distribution: the README without what an index cannot show.

Everything else is in pyproject.toml.
"""

from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from mdformat.renderer import MDRenderer
from setuptools import setup


def description(readme: str) -> str:
    """The README without pictures and links to files of the repository (a link's text stays)."""
    markdown = MarkdownIt("commonmark", renderer_cls=MDRenderer)
    markdown.options["mdformat"] = {"wrap": "keep"}
    markdown.core.ruler.push("without_files", _without_files)
    return str(markdown.render(readme))


def _without_files(state: StateCore) -> None:
    for token in state.tokens:
        if token.children:
            token.children = _kept(token.children)


def _kept(children: list[Token]) -> list[Token]:
    kept, dropped = [], []  # whether each link that is open is dropped
    for token in children:
        place = str(token.attrs.get("src") or token.attrs.get("href") or "")
        is_file = bool(place) and not place.startswith(("http:", "https:", "#"))
        if token.type == "link_open":
            dropped.append(is_file)
        elif token.type == "link_close":
            is_file = dropped.pop()
        if not is_file:
            kept.append(token)
    return kept


if __name__ == "__main__":
    setup(
        long_description=description(
            Path(__file__).with_name("README.md").read_text(encoding="utf-8")
        ),
        long_description_content_type="text/markdown",
    )

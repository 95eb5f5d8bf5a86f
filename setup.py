"""The description of the distribution: the README without what an index cannot show.

Everything else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

RELATIVE = r"(?!https?:|#)[^)]*"


def description(readme: str) -> str:
    """The README without pictures and links to files of the repository (a link's text stays)."""
    without = re.sub(rf"!\[[^]]*\]\({RELATIVE}\)\n*", "", readme)
    return re.sub(rf"\[([^]]*)\]\({RELATIVE}\)", r"\1", without)


setup(
    long_description=description(Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)

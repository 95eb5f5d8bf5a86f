"""In a checkout, the path to the top-level folder ``fake_impls``, whose files are its modules.

The build installs that folder as ``moe_ops.fake_impls`` in place of this file (``package-dir`` in
pyproject.toml). Unlike a symbolic link, this also works in checkouts and archives without links.
"""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "fake_impls")]

"""Safe reading of files from anywhere: regular files only, and JSON of any content."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from stat import S_ISREG
from typing import Any

MAX_JSON = 100_000_000
"""Largest size of a JSON file, in bytes."""
LONGEST_SHOWN = 200
"""Characters of a path or a name that an error quotes."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def shown(name: object) -> str:
    """Return a path or a name for an error message: printable, and cut if it is very long."""
    text = str(name)
    if len(text) > LONGEST_SHOWN:
        text = f"{text[:LONGEST_SHOWN]}... ({len(text)} characters)"
    return text if text.isprintable() else repr(text)[1:-1]


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn the system's errors for ``path`` within this context into errors with its name and why.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it cannot be read, or no file can have this name.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        missing = f"{shown(path)} must be a file, got none{_download(path)}"
        raise FileNotFoundError(missing) from None
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"{shown(path)} must be a file that can be read, got {why!r}") from None


def regular(path: Path) -> Path:
    """Return ``path`` if it is a regular file or a link to one; reading a pipe would never return.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a folder, a pipe or a device; a file that cannot be read; a name that no file
            can have.
    """
    with file_errors(path):
        try:
            mode = path.stat().st_mode
        except ValueError as error:  # such as a null character
            raise ValueError(f"{shown(path)} must be the name of a file, got {error}") from None
    if not S_ISREG(mode):
        raise ValueError(f"{shown(path)} must be a regular file, got a folder, a pipe or a device")
    return path


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Read the JSON object in a file.

    Args:
        path: the file.
        what: what the file must be, for the error message.

    Raises:
        FileNotFoundError, ValueError: as `regular`. Also ValueError for text that is not a JSON
            object, is nested too deeply, or is longer than `MAX_JSON`.
    """
    with file_errors(regular(path)):
        size = path.stat().st_size
        if size > MAX_JSON:
            raise ValueError(f"{path} must be {what} of at most {MAX_JSON} bytes, got {size}")
        try:
            return parse_object(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} must be {what}, got {error}") from None


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object whose keys are unique.

    Raises:
        ValueError: the message says what the text is instead.
    """
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, which is no object")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} twice")
    return entries


def weight_map(index: Path) -> dict[str, Path]:
    """Return the file of each tensor by an index: files in the index's folder or below it.

    Links in the folder are followed, because download caches consist of them.

    Raises:
        ValueError: not an index, or a file name that leads out of the folder.
    """
    entries = read_object(index, "an index with a weight_map").get("weight_map")
    if not isinstance(entries, Mapping):
        got = type(entries).__name__
        raise ValueError(f"{index} must be an index with a weight_map, got {got} for it")
    for name, file in entries.items():
        if not isinstance(file, str) or not _is_inside(file):
            raise ValueError(
                f"{index}: the file of {shown(name)!r} must be a name inside the index's folder, "
                f"got {shown(repr(file))}"
            )
    return {name: index.parent / file for name, file in entries.items()}


def _is_inside(file: str) -> bool:
    """Whether a file name is relative and has no ``..``, by the rules of POSIX and Windows."""
    paths = PurePosixPath(file), PureWindowsPath(file)
    leaves = any(path.anchor or path.drive or ".." in path.parts for path in paths)
    return bool(file) and "\0" not in file and not leaves


def reject_other_formats(path: Path) -> None:
    """Raise ValueError for a file in a known other format, and say how to load it."""
    suffix = path.suffix.lower()
    if suffix in PICKLED:
        raise ValueError(
            f"source must be safetensors, got {shown(path)}: pass what it holds, "
            f"torch.load({path.name!r}, map_location='cpu', weights_only=True, mmap=True)"
        )
    if suffix == ".gguf":
        raise ValueError(
            f"source must be safetensors, got {path}: load the model with transformers' "
            "from_pretrained(.., gguf_file=..) and save it with save_pretrained"
        )


def _download(path: Path) -> str:
    """Return a hint for a path that looks like a model's name on a hub."""
    if _HUB_ID.fullmatch(str(path)) is None or path.suffix in (".json", ".safetensors", *PICKLED):
        return ""
    return (
        " (if it is a model's name on a hub: download it first, "
        f"huggingface_hub.snapshot_download({str(path)!r}), and pass the folder)"
    )

"""Sources of tensors: files, a folder, an index, a mapping, or an iterable of pairs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from moe_ops.loading.files import file_errors, regular, reject_other_formats, shown, weight_map
from moe_ops.loading.safetensors import SafetensorsFile

try:
    from tqdm import tqdm
except ImportError:  # the progress bar is optional
    tqdm = None

WHOLE_MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
Source = Any
"""A path, several paths, a mapping of names to tensors, or an iterable of ``(name, tensor)``."""


class Entry(NamedTuple):
    """A named tensor that can be read."""

    name: str
    read: Callable[[], Tensor]


class Opened(NamedTuple):
    """A source that can be read, entry by entry."""

    entries: Iterable[Entry]
    total: int | None = None
    """The number of entries, if it is known."""
    folder: Path | None = None
    """The folder of the files, where a ``config.json`` may say how they are quantized."""


def open_source(source: Source, wanted: Callable[[str], bool], *, progress: bool) -> Opened:
    """Open every tensor of ``source`` in its order; of files with an index, the wanted ones.

    One file is open at a time, and a tensor is read when it is asked for.

    Args:
        source: see `load_checkpoint`.
        wanted: whether a tensor of this name is wanted.
        progress: whether to show a progress bar.

    Raises:
        TypeError: an unknown kind of source.
        FileNotFoundError: a path, or a file that an index names, does not exist.
        ValueError: a file that is broken or of another format, or an empty folder.
    """
    opened = _opened(source, wanted)
    if progress and tqdm is not None:
        bar = tqdm(opened.entries, total=opened.total, unit="tensor", leave=False, desc="loading")
        return opened._replace(entries=bar)
    return opened


def _opened(source: Source, wanted: Callable[[str], bool]) -> Opened:
    if isinstance(source, Mapping):
        pairs = [entry_of(item, "source") for item in source.items()]
        return Opened(pairs, len(pairs))
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        opened = _files(*_shards(path, wanted))
        return opened._replace(folder=path if path.is_dir() else path.parent)
    if isinstance(source, Iterable):
        items = iter(source)
        first = next(items, None)
        if first is None:
            return Opened([], 0)
        if isinstance(first, (str, os.PathLike)):
            return _files([Path(p) for p in (first, *items)], None)
        return Opened(entry_of(item, "source") for group in ([first], items) for item in group)
    raise TypeError(
        "source must be a path, paths, a mapping or an iterable of (name, tensor), "
        f"got {type(source).__name__}"
    )


def entry_of(item: Any, argument: str) -> Entry:
    """Return a ``(name, tensor)`` pair as an entry; TypeError if an argument's item is none."""
    if not isinstance(item, (tuple, list)) or len(item) != 2 or not isinstance(item[0], str):
        raise TypeError(f"{argument} must hold (name, tensor) pairs, got {type(item).__name__}")
    name, x = item
    if not isinstance(x, Tensor):
        raise TypeError(f"{argument} must hold tensors, got {type(x).__name__} for {name}")
    return Entry(name, lambda: x)


def _shards(
    path: Path, wanted: Callable[[str], bool]
) -> tuple[list[Path], dict[Path, list[str]] | None]:
    """Return the files of a checkpoint, and which tensors of each are wanted (None: all)."""
    with file_errors(path):
        listed = sorted(path.iterdir()) if path.is_dir() else None
    if listed is not None:
        if path / WHOLE_MODEL in listed:
            return [path / WHOLE_MODEL], None
        if path / INDEX in listed:
            return _shards(path / INDEX, wanted)
        files = [file for file in listed if file.name.endswith(".safetensors")]
        if not files:
            for other in listed:
                reject_other_formats(other)
            raise ValueError(f"source must be a folder with safetensors files, got {path}")
        return files, None
    if path.suffix != ".json":
        return [path], None
    pairs = sorted((file, name) for name, file in weight_map(path).items())
    # If no tensor is wanted, all are listed, so that the error can name some.
    asked = [(file, name) for file, name in pairs if wanted(name)] or pairs
    groups = {f: [name for _, name in group] for f, group in groupby(asked, lambda item: item[0])}
    return list(groups), groups


def _files(paths: list[Path], wanted: dict[Path, list[str]] | None) -> Opened:
    for path in paths:
        reject_other_formats(regular(path))
    total = None if wanted is None else sum(map(len, wanted.values()))
    return Opened(_read(paths, wanted), total, paths[0].parent if paths else None)


def _read(paths: list[Path], wanted: dict[Path, list[str]] | None) -> Iterator[Entry]:
    for path in paths:
        file = SafetensorsFile(path)
        names = dict.fromkeys(file.names())
        for name in names if wanted is None else wanted[path]:
            if name not in names:
                raise ValueError(f"{path} must hold {shown(name)}, as its index says, got none")
            yield Entry(name, partial(file.tensor, name))

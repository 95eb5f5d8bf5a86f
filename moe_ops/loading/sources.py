"""Where tensors come from: files, a folder, an index, a mapping, or pairs one after another."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from moe_ops.loading.safetensors import SafetensorsFile

try:
    from tqdm import tqdm
except ImportError:  # the bar is a convenience
    tqdm = None

INDEX = "model.safetensors.index.json"
Source = Any
"""A path, several paths, a mapping of names to tensors, or an iterable of ``(name, tensor)``."""


class Entry(NamedTuple):
    """A tensor that can be read."""

    name: str
    read: Callable[[], Tensor]


def entries(source: Source, prefix: str, *, progress: bool) -> Iterator[Entry]:
    """Every tensor of ``source``, in its order; of files with an index, those under ``prefix``.

    One file is open at a time, and a tensor is read when it is asked for.

    Raises:
        TypeError: no kind of source.
        FileNotFoundError: a path that does not exist, a shard that an index names.
        ValueError: a file that is broken, an empty folder.
    """
    found, total = _entries(source, prefix)
    if progress and tqdm is not None:
        return iter(tqdm(found, total=total, unit="tensor", leave=False, desc="loading"))
    return iter(found)


def _entries(source: Source, prefix: str) -> tuple[Iterable[Entry], int | None]:
    if isinstance(source, Mapping):
        pairs = [_pair(item) for item in source.items()]
        return pairs, len(pairs)
    if isinstance(source, (str, os.PathLike)):
        return _files(*_shards(Path(source), prefix))
    if isinstance(source, Iterable):
        items = iter(source)
        first = next(items, None)
        if first is None:
            return [], 0
        if isinstance(first, (str, os.PathLike)):
            return _files([Path(p) for p in (first, *items)], None)
        return (_pair(item) for group in ([first], items) for item in group), None
    raise TypeError(
        "source must be a path, paths, a mapping or an iterable of (name, tensor), "
        f"got {type(source).__name__}"
    )


def _pair(item: Any) -> Entry:
    if not isinstance(item, (tuple, list)) or len(item) != 2 or not isinstance(item[0], str):
        raise TypeError(f"source must hold (name, tensor) pairs, got {type(item).__name__}")
    name, x = item
    if not isinstance(x, Tensor):
        raise TypeError(f"source must hold tensors, got {type(x).__name__} for {name}")
    return Entry(name, lambda: x)


def _shards(path: Path, prefix: str) -> tuple[list[Path], dict[Path, list[str]] | None]:
    """The files of a checkpoint, and which of their tensors are wanted (None: all)."""
    if path.is_dir():
        if (path / INDEX).exists():
            return _shards(path / INDEX, prefix)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"source must be a folder with safetensors files, got {path}")
        return files, None
    if path.suffix != ".json":
        return [path], None
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        wanted = sorted((path.parent / file, name) for name, file in weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be an index with a weight_map, got {error!r}") from None
    # Without any tensor under the prefix all are listed, for the error to say what there is.
    under = [(file, name) for file, name in wanted if name.startswith(prefix)] or wanted
    groups = {f: [name for _, name in group] for f, group in groupby(under, lambda item: item[0])}
    return list(groups), groups


def _files(
    paths: list[Path], wanted: dict[Path, list[str]] | None
) -> tuple[Iterable[Entry], int | None]:
    total = None if wanted is None else sum(map(len, wanted.values()))
    return _read(paths, wanted), total


def _read(paths: list[Path], wanted: dict[Path, list[str]] | None) -> Iterator[Entry]:
    for path in paths:
        file = SafetensorsFile(path)
        names = file.names()
        for name in names if wanted is None else wanted[path]:
            if name not in names:
                raise ValueError(f"{path} must hold {name}, as its index says, got none")
            yield Entry(name, _reader(file, name))


def _reader(file: SafetensorsFile, name: str) -> Callable[[], Tensor]:
    return lambda: file.tensor(name)

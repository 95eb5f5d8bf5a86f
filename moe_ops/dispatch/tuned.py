"""Look-up of tuned tiles.

Tuned files (see `tuned_file`) are read once in a process, when the first GEMM is planned: first the
package's, then the user's, which take the place of the package's for the same layer. The user's
folder, to which ``moe-ops tune`` writes, is ``MOE_OPS_TUNED_DIR``, or ``moe_ops/tuned`` in the
user's cache. A file that cannot be used is skipped with a warning. Reading is work of the CPU
alone, so the first plan may be made while a CUDA graph is captured.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from moe_ops.dispatch.device import Device, plain_name
from moe_ops.dispatch.families import BY_NAME, Family, serving
from moe_ops.dispatch.hopper import HopperTiles, KernelTiles
from moe_ops.dispatch.plan import DEFAULT
from moe_ops.dispatch.problem import GemmProblem
from moe_ops.dispatch.tiles import Gemm, last_class, load_class
from moe_ops.dispatch.tuned_file import Sizes, TunedEntry, TunedLayer, check_name, parse_tuned_layer

VARIABLE = "MOE_OPS_TUNED_DIR"
"""Environment variable that names the user's folder of tuned files."""


def cache_folder() -> Path | None:
    """The folder of tuned files in the user's cache; None for a user without a home.

    Source:
        XDG base directories: ``XDG_CACHE_HOME`` if that is an absolute path, else ``~/.cache``.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = named if os.path.isabs(named) else os.path.expanduser("~/.cache")
    return Path(base, "moe_ops", "tuned") if os.path.isabs(base) else None


CACHE = cache_folder()
FOLDER: str | Path | None = os.environ.get(VARIABLE) or CACHE
"""The user's folder of tuned files; None: there is none."""
PACKAGED = files("moe_ops") / "configs"
"""The package's folder of tuned files."""


class Contents(NamedTuple):
    """What is in a folder of tuned files."""

    layers: list[TunedLayer]
    problems: list[str]
    """A sentence for the folder, or for each JSON file, that cannot be used."""


def look_into(folder: Any) -> Contents:
    """Read all JSON files in a folder (a path or a resource) that `parse_tuned_layer` accepts."""
    contents = Contents([], [])
    try:
        if not folder.is_dir():
            raise ValueError(f"{VARIABLE} must name a folder, got {str(folder)!r}")
        names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".json"))
    except (OSError, ValueError) as error:
        return Contents([], [f"no tuned file is used: {error}"])
    for name in names:
        try:
            contents.layers.append(parse_tuned_layer(name, read_file(folder / name)))
        except (OSError, ValueError) as error:
            contents.problems.append(f"a file in {folder} is not used: {error}")
    return contents


def read_file(file: Any) -> str:
    """The text of a tuned file (a path or a resource).

    Raises:
        OSError: the file cannot be read.
        ValueError: its name is no tuned file's, it is not a regular file, or it is not UTF-8.
    """
    check_name(file.name)  # before a large file of another program is read
    if not file.is_file():  # reading a pipe would wait for ever
        raise ValueError(f"{file.name}: it must be a regular file, got a folder or a pipe")
    try:
        return file.read_text(encoding="utf-8")  # type: ignore[no-any-return]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name}: it must be text in UTF-8, got {error}") from None


def read_folder(folder: Any) -> list[TunedLayer]:
    """The layers of all tuned files in a folder; warns of each file that cannot be used."""
    contents = look_into(folder)
    for problem in contents.problems:
        warnings.warn(problem, stacklevel=2)
    return contents.layers


class Tables(Mapping[tuple[str, str], dict[Sizes, TunedLayer]]):
    """Layers by GPU and scheme, then by their sizes; a later layer replaces an earlier one.

    Hashed by identity, so that a table can be part of a cache key without being read.

    Args:
        read: returns the layers; called once, when the table is first looked into.
    """

    def __init__(self, read: Callable[[], Iterable[TunedLayer]]) -> None:
        self._read = read

    @cached_property
    def _by_gpu(self) -> dict[tuple[str, str], dict[Sizes, TunedLayer]]:
        layers: dict[tuple[str, str], dict[Sizes, TunedLayer]] = {}
        for layer in self._read():
            layers.setdefault((layer.device, layer.scheme), {})[layer.sizes] = layer
        return layers

    def __getitem__(self, key: tuple[str, str]) -> dict[Sizes, TunedLayer]:
        return self._by_gpu[key]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._by_gpu)

    def __len__(self) -> int:
        return len(self._by_gpu)

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def tables(layers: Iterable[TunedLayer]) -> Tables:
    """The tables of ``layers``."""
    return Tables(lambda: layers)


def folders() -> list[Any]:
    """The folders of the files in use: the package's, then the user's.

    A cache that does not exist is none; a folder that was named must.
    """
    absent = FOLDER == CACHE and not os.path.isdir(FOLDER or "")
    return [PACKAGED] if FOLDER is None or absent else [PACKAGED, Path(FOLDER)]


def read_all() -> Tables:
    """The tables of the files in use, read anew when they are first looked into."""
    return Tables(lambda: [layer for folder in folders() for layer in read_folder(folder)])


TABLES = read_all()
"""The tables of the files in use."""


def choose(
    problem: GemmProblem, device: Device, tables: Tables
) -> tuple[tuple[Family, KernelTiles] | None, str]:
    """The family and the tiles that a tuned file has for a GEMM, if one does, and the source.

    A tuned entry applies to loads in its rows-per-expert bucket if the plan has the row tile that
    the entry was timed with; of several entries, the one with the nearest number of tokens is used.
    Batch-invariant plans and float32 rows were not timed. Packed weights have kernels of their own,
    and their entries apply to no other GEMM.

    Args:
        problem: the GEMM.
        device: the GPU.
        tables: tables of tuned files.

    Returns:
        A family that takes the GEMM with these tiles, or None; and where tiles come from, with why
        a tuned file that exists is not used.
    """
    gemm = problem.gemm
    layer = tables.get((plain_name(device.name), problem.scheme), {}).get(_layer_sizes(gemm))
    if layer is None or gemm.rule.batch_invariant or gemm.itemsize == 4:
        return None, DEFAULT
    entry = _nearest(layer, gemm, fragments=problem.fragments)
    if entry is None:
        at = "packed weights at this load" if problem.fragments else "this load"
        return None, f"{DEFAULT} ({layer.file} has nothing for {at})"
    tiles = _tiles_of(entry, gemm)
    family = serving(tiles, problem, device)
    if isinstance(family, str):
        return None, f"{DEFAULT} ({layer.file} {family})"
    return (family, tiles), f"tuned ({layer.file})"


def _layer_sizes(gemm: Gemm) -> Sizes:
    """Sizes of the layer of a GEMM, which is GEMM 1 if it computes gate and up together."""
    n, k = (gemm.n, gemm.k) if gemm.halves == 2 else (gemm.k, gemm.n)
    return gemm.num_experts, n, k


def _tiles_of(entry: TunedEntry, gemm: Gemm) -> KernelTiles:
    """The config of a GEMM, which is GEMM 1 if it computes gate and up together."""
    return entry.gemm1 if gemm.halves == 2 else entry.gemm2


def _nearest(layer: TunedLayer, gemm: Gemm, *, fragments: bool) -> TunedEntry | None:
    """The entry with the same bucket, row tile and form of weights, nearest in number of rows."""
    last = last_class(gemm.rule)

    def class_of(rows: int) -> int:
        return min(load_class(rows, gemm.num_experts), last)

    def distance(entry: TunedEntry) -> float:
        own = gemm.num_slots * gemm.num_experts / gemm.routed_experts
        ratio = entry.num_tokens * layer.top_k / max(own, 1)
        return max(ratio, 1 / ratio)

    mine, block_m = min(gemm.load_class, last), gemm.row_tile
    near = [
        entry
        for entry in layer.entries
        if class_of(entry.num_tokens * layer.top_k) == mine
        and entry.gemm1.block_m == block_m
        and reads_fragments(_tiles_of(entry, gemm)) == fragments
    ]
    return min(near, key=distance, default=None)


def reads_fragments(tiles: KernelTiles) -> bool:
    """Whether a kernel for packed weights has such tiles."""
    return isinstance(tiles, HopperTiles) and BY_NAME[tiles.kernel].fragments

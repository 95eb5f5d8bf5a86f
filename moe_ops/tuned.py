"""Tiles that were timed: files that map token counts to tiles, and where they are looked up.

A file serves one GPU, one scheme and layers of one size, all of which its name tells:
``E=128,N=768,K=2048,device_name=NVIDIA_H200,scheme=fp8_block128.json`` (E local experts, N the
intermediate size, K the hidden size). It holds the ``top_k`` of the layer that was timed, and by
number of tokens the row tile of a plan and the rest of both GEMMs' tiles. Files are read once, when
this module is imported: those in the package, then those in the folder that ``MOE_OPS_TUNED_DIR``
names, which take the place of the package's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_ops.gemm_tiles import shared_bytes
from moe_ops.scheme import WHOLE, Scheme, get_scheme
from moe_ops.tiles import (
    EIGHT_BIT_ROW_TILES,
    ROW_TILES,
    Device,
    Gemm,
    TileConfig,
    load_class,
    pick_row_tile,
)

FOLDER = os.environ.get("MOE_OPS_TUNED_DIR")
"""Where a user's files lie, if anywhere."""
DEFAULT = "analytic default"
_NAME = re.compile(r"E=(\d+),N=(\d+),K=(\d+),device_name=([^,]+),scheme=([^,]+)\.json")
SIZES = ("BLOCK_N", "BLOCK_K", "GROUP_M", "num_warps", "num_stages")
"""Of one GEMM, in the order of a `TileConfig` after its row tile."""
Sizes = tuple[int, int, int]
"""E, N and K of a layer."""


class Entry(NamedTuple):
    """What won at one number of tokens."""

    num_tokens: int
    gemm1: TileConfig
    gemm2: TileConfig
    """Of the same rows."""


class TunedLayer(NamedTuple):
    """What one file says."""

    file: str
    """Its name, without a folder."""
    sizes: Sizes
    device: str
    """The GPU's name; spaces are ``_``."""
    scheme: str
    top_k: int
    row_tiles: tuple[int, ...]
    """By class of load: those that won, else the default's."""
    entries: tuple[Entry, ...]


class Choice(NamedTuple):
    """The tiles of a GEMM."""

    tiles: TileConfig
    source: str
    """Where they come from, and why not from a file that there is."""


def file_name(sizes: Sizes, device: str, scheme: str) -> str:
    """The name of the file for a layer, a GPU (by PyTorch's name) and a scheme."""
    experts, n, k = sizes
    return f"E={experts},N={n},K={k},device_name={plain_name(device)},scheme={scheme}.json"


def plain_name(device: str) -> str:
    """A GPU's name as it stands in the names of files."""
    return device.replace(" ", "_").replace("/", "_")


def default_row_tiles(scheme: Scheme) -> tuple[int, ...]:
    """The row tiles that the plan and the GEMMs of a scheme choose from where nothing was timed."""
    wide = scheme.activation is None or scheme.decoded
    return ROW_TILES if wide else EIGHT_BIT_ROW_TILES


# Reading


def read_folder(folder: Any) -> list[TunedLayer]:
    """The layers of every JSON file in a folder (a path, or a resource).

    Raises:
        ValueError: no such folder, or a file that `parse` refuses.
    """
    if not folder.is_dir():
        raise ValueError(f"MOE_OPS_TUNED_DIR must name a folder, got {str(folder)!r}")
    found = sorted((f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    return [parse(f.name, f.read_text()) for f in found]


def parse(file: str, text: str) -> TunedLayer:
    """The layer that a file of this name and text holds.

    Raises:
        ValueError: naming the file, the key and the rule that is broken.
    """
    named = _NAME.fullmatch(file)
    _require(named, file, "the name", f"match {_NAME.pattern}", file)
    *sizes, device, scheme = named.groups()  # type: ignore[union-attr]
    try:
        known, record = get_scheme(scheme), json.loads(text)
    except ValueError as error:  # of the name, or of the text
        raise ValueError(f"{file}: {error}") from None
    _require(isinstance(record, dict), file, "the file", "be an object", record)
    top_k = record.pop("top_k", None)
    _whole(file, "top_k", top_k)
    entries = tuple(_entry(file, key, record[key], known) for key in record)
    experts, n, k = map(int, sizes)
    row_tiles = _row_tiles(file, entries, top_k, experts, known)
    return TunedLayer(file, (experts, n, k), device, known.name, top_k, row_tiles, entries)


def _require(holds: Any, file: str, key: str, rule: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{file}: {key} must {rule}, got {got!r}")


def _whole(file: str, key: str, value: Any, least: int = 1) -> None:
    _require(type(value) is int and value >= least, file, key, f"be a number >= {least}", value)


def _power(file: str, key: str, value: Any, least: int) -> None:
    _whole(file, key, value, least)
    _require(value & (value - 1) == 0, file, key, "be a power of two", value)


def _entry(file: str, key: str, value: Any, scheme: Scheme) -> Entry:
    _require(key.isdecimal() and int(key) > 0, file, "a key", "be top_k or a token count", key)
    _require(isinstance(value, dict), file, key, "be an object", value)
    block_m = value.get("BLOCK_M")
    known = type(block_m) is int and block_m in ROW_TILES
    _require(known, file, f"{key}.BLOCK_M", f"be among {ROW_TILES}", block_m)
    both = []
    for name in ("gemm1", "gemm2"):
        at, tiles = f"{key}.{name}", value.get(name)
        _require(isinstance(tiles, dict), file, at, "be an object", tiles)
        for size in SIZES:
            least = 16 if size.startswith("BLOCK") else 1
            check = _power if least == 16 or size == "num_warps" else _whole
            check(file, f"{at}.{size}", tiles.get(size), least)
        group = scaled_group(scheme)
        fits = group is None or tiles["BLOCK_K"] <= group
        _require(fits, file, f"{at}.BLOCK_K", f"not cross a scale's {group}", tiles["BLOCK_K"])
        both.append(TileConfig(block_m, *(tiles[size] for size in SIZES)))
    return Entry(int(key), *both)


def scaled_group(scheme: Scheme) -> int | None:
    """Elements along K that share the scale of a row, which a K block may not cross; None: any."""
    quant = scheme.activation
    if quant is None or scheme.decoded or quant.group.cols == WHOLE:
        return None
    return quant.group.cols


def _row_tiles(
    file: str, entries: Iterable[Entry], top_k: int, experts: int, scheme: Scheme
) -> tuple[int, ...]:
    """By class of load. One plan serves a class, so that its entries have to agree."""
    won: dict[int, Entry] = {}
    for entry in entries:
        load = load_class(entry.num_tokens * top_k, experts)
        first = won.setdefault(load, entry)
        rule = f"be {first.gemm1.block_m} as for {first.num_tokens}, of the same load"
        got = entry.gemm1.block_m
        _require(got == first.gemm1.block_m, file, f"{entry.num_tokens}.BLOCK_M", rule, got)
    default = default_row_tiles(scheme)
    tiles = list(default) + [default[-1]] * (max(won, default=0) + 1 - len(default))
    for load, entry in won.items():
        tiles[load] = entry.gemm1.block_m
    return tuple(tiles)


# Looking up

Tables = dict[tuple[str, str], dict[Sizes, TunedLayer]]
"""Layers by GPU and scheme, then by their sizes."""


def tables(layers: Iterable[TunedLayer]) -> Tables:
    """``layers`` to look up; of two for the same the later one counts."""
    found: Tables = {}
    for layer in layers:
        found.setdefault((layer.device, layer.scheme), {})[layer.sizes] = layer
    return found


def read_all() -> Tables:
    """What is in the package and in the user's folder."""
    shipped = read_folder(files("moe_ops") / "configs")
    return tables(shipped + (read_folder(Path(FOLDER)) if FOLDER else []))


TABLES = read_all()


def row_tiles(scheme: Scheme, sizes: Sizes, device: str) -> tuple[int, ...]:
    """The row tiles that the plan and the GEMMs of a layer choose from, by class of load.

    Dynamo traces this, and ``sizes`` may be symbols: where a file has them, they get their values.
    """
    for known, layer in TABLES.get((device, scheme.name), {}).items():
        if known == sizes:
            return layer.row_tiles
    return default_row_tiles(scheme)


def device_name(device: torch.device) -> str:
    """What files call a GPU; empty where there is none."""
    if device.type != "cuda":
        return ""
    # Dynamo folds the properties of a GPU, and warns where it has to look into a cache.
    return _name(device) if torch.compiler.is_compiling() else _known_name(device)


def _name(device: torch.device) -> str:
    known = torch.cuda.is_available()  # else a device that only fake tensors are on
    return plain_name(torch.cuda.get_device_properties(device).name) if known else ""


_known_name = cache(_name)


def choose(
    gemm: Gemm, scheme: str, weight_bits: int, device: Device, default: TileConfig
) -> Choice:
    """A file's tiles for a GEMM, or the default.

    An entry serves the loads of its class; of several that whose number of tokens is nearest. A
    plan of one row tile, which does not follow the load, is nobody's that was timed, and neither
    are float32 rows.

    Args:
        gemm: its sizes.
        scheme: the name of its scheme.
        weight_bits: of a stored weight.
        device: the GPU.
        default: what to use without a file.
    """
    layer = TABLES.get((plain_name(device.name), scheme), {}).get(_layer_sizes(gemm))
    if layer is None or len(gemm.row_tiles) == 1 or gemm.itemsize == 4:
        return Choice(default, DEFAULT)
    entry = _nearest(layer, gemm)
    if entry is None:
        return Choice(default, f"{DEFAULT} ({layer.file} has nothing for this load)")
    tiles = entry.gemm1 if gemm.halves == 2 else entry.gemm2
    taken = shared_bytes(tiles, gemm, weight_bits)
    if taken > device.shared_memory:
        why = f"takes {taken} bytes of shared memory, there are {device.shared_memory}"
        return Choice(default, f"{DEFAULT} ({layer.file} {why})")
    return Choice(tiles, f"tuned ({layer.file})")


def _layer_sizes(gemm: Gemm) -> Sizes:
    """Of the layer that has this GEMM: the first one where gate and up are computed together."""
    n, k = (gemm.n, gemm.k) if gemm.halves == 2 else (gemm.k, gemm.n)
    return gemm.num_experts, n, k


def _nearest(layer: TunedLayer, gemm: Gemm) -> Entry | None:
    """The entry of the same class of load and row tile whose number of rows is nearest."""
    last = len(gemm.row_tiles) - 1

    def load_of(rows: int) -> int:
        return min(load_class(rows, gemm.num_experts), last)

    def distance(entry: Entry) -> float:
        ratio = entry.num_tokens * layer.top_k / gemm.num_slots
        return max(ratio, 1 / ratio)

    load = load_of(gemm.num_slots)
    block_m = pick_row_tile(gemm.row_tiles, gemm.num_slots, gemm.num_experts)
    near = [
        entry
        for entry in layer.entries
        if load_of(entry.num_tokens * layer.top_k) == load and entry.gemm1.block_m == block_m
    ]
    return min(near, key=distance, default=None)

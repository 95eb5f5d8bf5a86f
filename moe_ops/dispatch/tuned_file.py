"""Parsing of tuned files.

A tuned file applies to one GPU, one scheme and layers of one size, which its name states:
``E=128,N=768,K=2048,device_name=NVIDIA_H200,scheme=fp8_block128.json`` (E local experts, N the
intermediate size, K the hidden size). Characters of a scheme's key that some systems do not allow
in file names are replaced as in `SPELLED`. The file holds the ``top_k`` of the layer that was timed
and, by number of tokens, the row tile that the plan had and the config of both GEMMs: the kernel's
name (none: the portable kernel) and its other tile sizes. (A file does not choose the row tile of a
plan: `moe_ops.dispatch.row_tiles` does, and an entry applies only to plans with its row tile.)
Kernels named `hopper_decode_few` and `hopper_decode_many` are for packed weights.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from moe_ops.dispatch.device import plain_name
from moe_ops.dispatch.families import TUNABLE
from moe_ops.dispatch.families.many_rows import Persistent
from moe_ops.dispatch.hopper import HopperTiles, KernelTiles
from moe_ops.dispatch.portable import scaled_group
from moe_ops.dispatch.tiles import KNOWN_ROW_TILES, ROW_TILES, TileConfig
from moe_ops.scheme import Scheme, get_scheme

_NUMBER = r"([1-9][0-9]{0,8})"
_NAME = re.compile(rf"E={_NUMBER},N={_NUMBER},K={_NUMBER},device_name=([^,]+),scheme=([^,]+)\.json")
_COUNT = re.compile(_NUMBER)
SIZES = ("BLOCK_N", "BLOCK_K", "GROUP_M", "num_warps", "num_stages")
"""Keys of a portable kernel's config, in the order of a `TileConfig` after its row tile."""
LARGEST = {"BLOCK_N": 256, "BLOCK_K": 256, "GROUP_M": 128, "num_warps": 16, "num_stages": 64}
"""The largest accepted values. Larger ones take forever to compile, or no GPU can run the kernel.
Whether tiles fit in shared memory depends on the GPU and the GEMM: `tuned` checks that on use."""
MAX_TOP_K = 2**16
HOPPER_SIZES = ("BLOCK_N", "GROUP_M", "num_stages")
"""Keys of a Hopper kernel's config, in the order of `HopperTiles`; ``BLOCK_N``: weight rows.

``ON_DEMAND`` (default: false) and, for a kernel with a choice, ``CTAS`` (CTAs per SM) follow."""
NAMED = {family.kernel: family for family in TUNABLE if isinstance(family, Persistent)}
"""Kernels that a file may name."""
Sizes = tuple[int, int, int]
"""E, N and K of a layer."""


SPELLED = {":": "-", "*": "@", "|": "+"}
"""Replacements for characters of a scheme's key in a file name. No key contains a character on the
right, so each file name has exactly one key."""
_SPELL = str.maketrans(SPELLED)
_READ = str.maketrans({spelled: character for character, spelled in SPELLED.items()})


class TunedEntry(NamedTuple):
    """The fastest configs at one number of tokens."""

    num_tokens: int
    gemm1: KernelTiles
    gemm2: KernelTiles
    """Config of GEMM 2, with the same row tile."""


class TunedLayer(NamedTuple):
    """The content of one file."""

    file: str
    """The file's name, without a folder."""
    sizes: Sizes
    device: str
    """The GPU's name, with ``_`` for spaces."""
    scheme: str
    """Key of the scheme."""
    top_k: int
    entries: tuple[TunedEntry, ...]


def file_name(sizes: Sizes, device: str, scheme: str) -> str:
    """The file name for a layer, a GPU (named as in PyTorch) and a scheme's key."""
    (experts, n, k), name = sizes, scheme.translate(_SPELL)
    return f"E={experts},N={n},K={k},device_name={plain_name(device)},scheme={name}.json"


def written(tiles: KernelTiles) -> dict[str, Any]:
    """A GEMM's config as a file stores it, without the row tile."""
    own = isinstance(tiles, HopperTiles)
    sizes = {size: getattr(tiles, size.lower()) for size in (HOPPER_SIZES if own else SIZES)}
    if not isinstance(tiles, HopperTiles):
        return sizes
    more = {"CTAS": tiles.ctas} if NAMED[tiles.kernel].ctas(tiles.block_m) != (1,) else {}
    return {"kernel": tiles.kernel, **sizes, "ON_DEMAND": tiles.on_demand, **more}


def check_name(file: str) -> tuple[str, ...]:
    """The parts of a tuned file's name: E, N, K, the GPU and the scheme.

    Raises:
        ValueError: the file has another name.
    """
    named = _NAME.fullmatch(file)
    _require(named, file, "the name", f"match {_NAME.pattern}", file)
    return named.groups()  # type: ignore[union-attr]


def parse_tuned_layer(file: str, text: str) -> TunedLayer:
    """Parse the text of a tuned file.

    Raises:
        ValueError: the file is invalid; the message names the file, the key and the broken rule.
    """
    *sizes, device, spelled = check_name(file)
    try:
        scheme, record = get_scheme(spelled.translate(_READ)), json.loads(text)
    except (NotImplementedError, ValueError) as error:  # of the name, or of the text
        raise ValueError(f"{file}: {error}") from None
    except RecursionError:
        raise ValueError(f"{file}: the file must not be nested so deeply") from None
    _require(isinstance(record, dict), file, "the file", "be an object", record)
    top_k = record.pop("top_k", None)
    _whole(file, "top_k", top_k, most=MAX_TOP_K)
    entries = tuple(_tuned_entry(file, key, record[key], scheme) for key in record)
    experts, n, k = map(int, sizes)
    return TunedLayer(file, (experts, n, k), device, scheme.key, top_k, entries)


def _require(holds: Any, file: str, key: str, rule: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{file}: {key} must {rule}, got {got!r}")


def _whole(file: str, key: str, value: Any, least: int = 1, most: int | None = None) -> None:
    _require(type(value) is int and value >= least, file, key, f"be a number >= {least}", value)
    if most is not None:
        _require(value <= most, file, key, f"be a number <= {most}", value)


def _power(file: str, key: str, value: Any, least: int, most: int) -> None:
    _whole(file, key, value, least, most)
    _require(value & (value - 1) == 0, file, key, "be a power of two", value)


def _one_of(file: str, key: str, value: Any, allowed: tuple[int, ...]) -> None:
    _require(type(value) is int and value in allowed, file, key, f"be among {allowed}", value)


def _tuned_entry(file: str, key: str, value: Any, scheme: Scheme) -> TunedEntry:
    _require(_COUNT.fullmatch(key), file, "a key", "be top_k or a token count", key)
    _require(isinstance(value, dict), file, key, "be an object", value)
    block_m = value.get("BLOCK_M")
    allowed = type(block_m) is int and block_m in KNOWN_ROW_TILES
    _require(allowed, file, f"{key}.BLOCK_M", f"be among {KNOWN_ROW_TILES}", block_m)
    both = []
    for name in ("gemm1", "gemm2"):
        at, tiles = f"{key}.{name}", value.get(name)
        _require(isinstance(tiles, dict), file, at, "be an object", tiles)
        read = _hopper_tiles if "kernel" in tiles else _portable_tiles
        both.append(read(file, at, tiles, block_m, scheme))
    return TunedEntry(int(key), *both)


def _portable_tiles(
    file: str, at: str, tiles: dict[str, Any], block_m: int, scheme: Scheme
) -> TileConfig:
    _require(block_m in ROW_TILES, file, at, f"have a kernel in tiles of {block_m} rows", tiles)
    for size in SIZES:
        least = 16 if size.startswith("BLOCK") else 1
        check = _power if least == 16 or size == "num_warps" else _whole
        check(file, f"{at}.{size}", tiles.get(size), least, LARGEST[size])
    group = scaled_group(scheme)
    fits = group is None or tiles["BLOCK_K"] <= group
    _require(fits, file, f"{at}.BLOCK_K", f"not cross a scale's {group}", tiles["BLOCK_K"])
    return TileConfig(block_m, *(tiles[size] for size in SIZES))


def _hopper_tiles(
    file: str, at: str, tiles: dict[str, Any], block_m: int, scheme: Scheme
) -> HopperTiles:
    kernel = tiles["kernel"]
    named = type(kernel) is str and kernel in NAMED
    _require(named, file, f"{at}.kernel", f"be among {(*NAMED,)}", kernel)
    family = NAMED[kernel]
    there, allowed = family.widths(block_m, scheme), family.ctas(block_m)
    rule = f"be one that has {scheme.name} in tiles of {block_m} rows"
    _require(there, file, f"{at}.kernel", rule, kernel)
    _one_of(file, f"{at}.BLOCK_N", tiles.get("BLOCK_N"), there)
    _whole(file, f"{at}.GROUP_M", tiles.get("GROUP_M"), most=LARGEST["GROUP_M"])
    most = LARGEST["num_stages"]
    _whole(file, f"{at}.num_stages", tiles.get("num_stages"), family.LEAST_STAGES, most)
    on_demand = tiles.get("ON_DEMAND", False)
    ctas: Any = tiles.get("CTAS", 1 if allowed == (1,) else None)
    _require(type(on_demand) is bool, file, f"{at}.ON_DEMAND", "be true or false", on_demand)
    rule = f"be false for {kernel}"
    _require(on_demand in family.on_demand, file, f"{at}.ON_DEMAND", rule, on_demand)
    _one_of(file, f"{at}.CTAS", ctas, allowed)
    block_n, group_m, num_stages = (tiles[size] for size in HOPPER_SIZES)
    return HopperTiles(kernel, block_m, block_n, group_m, num_stages, on_demand, ctas)

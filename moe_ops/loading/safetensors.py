"""Reading safetensors files with the ``safetensors`` package, which maps them into memory.

The package is imported when the first file is read: nothing else in the library needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ops.loading.files import MAX_JSON, file_errors, parse_object, regular, shown

MOST_AXES = 64
"""Axes of a tensor that PyTorch's operators take."""
MOST_NUMBERS = 2**48
"""Limit of the product of a tensor's sizes, with 1 in place of 0. No memory holds as many numbers,
and a few times as many still fit into int64."""


def package() -> Any:
    """Import the ``safetensors`` package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return import_module("safetensors")
    except ImportError as error:
        raise ImportError(
            "reading a checkpoint needs the safetensors package: pip install 'moe_ops[safetensors]'"
        ) from error


class SafetensorsFile:
    """One file; its data stays mapped as long as one of its tensors is alive.

    The package refuses data that overlaps, has holes, or ends before or after the file; sizes that
    are negative or do not match the data; and headers that are too long or not JSON. Of duplicate
    names it would take the last; they are refused here. So are shapes that PyTorch cannot hold,
    which a tensor without data may have.

    Raises:
        FileNotFoundError: the file does not exist.
        ImportError: the package is not installed.
        ValueError: not a safetensors file, or an incomplete one.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._package = regular(path), package()
        with file_errors(path), path.open("rb") as file:
            try:
                self._file = self._package.safe_open(str(path), framework="pt", device="cpu")
                length = min(int.from_bytes(file.read(8), "little"), MAX_JSON)
                _check_shapes(parse_object(file.read(length).decode()))
            except (self._package.SafetensorError, ValueError) as error:
                raise self._broken(str(error)) from None

    def names(self) -> list[str]:
        """Return the names of the tensors, in the order of their data."""
        return list(self._file.offset_keys())

    def tensor(self, name: str) -> Tensor:
        """Return a view of the mapped file, or a copy if it is not aligned; do not write to it."""
        try:
            x = self._file.get_tensor(name)
        except self._package.SafetensorError as error:
            raise self._broken(f"{error} ({shown(name)})") from None
        if x.data_ptr() % x.element_size():
            x = x.reshape(-1).view(torch.uint8).clone().view(x.dtype).view(x.shape)
        return x

    def _broken(self, what: str) -> ValueError:
        return ValueError(f"{shown(self.path)} must be a whole safetensors file, got {what}")


def _check_shapes(header: Mapping[str, Any]) -> None:
    """Raise ValueError if a header that is valid otherwise has a shape that PyTorch cannot hold."""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape = entry["shape"]
        if len(shape) > MOST_AXES:
            raise ValueError(f"a shape of {len(shape)} axes for {shown(name)}")
        if prod(max(1, size) for size in shape) >= MOST_NUMBERS:
            raise ValueError(f"the shape {shape} for {shown(name)}")

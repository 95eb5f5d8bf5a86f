"""Reading safetensors files without copying them: a file is mapped, and tensors are views of it.

The format is eight bytes with the length of a JSON header, the header (dtype, shape and offsets of
every tensor), and the data; so nothing has to be installed for it, and a rank that needs a slice
reads no more than that from disk.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip
MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""


class SafetensorsFile:
    """One file; the data stays mapped for as long as a tensor of it is alive.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a safetensors file, or not all of one.
    """

    def __init__(self, path: Path) -> None:
        self.path, size = path, path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
                raise self._broken(f"a header of {length} bytes in a file of {size}")
            try:
                header = json.loads(file.read(length))
            except ValueError as error:
                raise self._broken(f"a header that is no JSON: {error}") from None
        if not isinstance(header, dict):
            raise self._broken(f"a header that is a {type(header).__name__}")
        header.pop("__metadata__", None)
        self._header, self._start, self._size = header, 8 + length, size
        for name, entry in header.items():
            self._check(name, entry)
        self._bytes = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)

    def names(self) -> list[str]:
        """Of its tensors."""
        return list(self._header)

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file (a copy where it is not aligned); not to be written to."""
        entry = self._header[name]
        if entry["dtype"] not in DTYPES:
            raise self._broken(f"dtype {entry['dtype']} of {name}, which is not known")
        begin, end = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        data = self._bytes[self._start + begin : self._start + end]
        if (self._start + begin) % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(entry["shape"])

    def _check(self, name: str, entry: Any) -> None:
        """The data is inside the file, and as long as the shape says."""
        try:
            (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
            fits = 0 <= begin <= end <= self._size - self._start
            itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else None
            exact = itemsize is None or end - begin == prod(shape) * itemsize
        except (KeyError, TypeError, ValueError):
            raise self._broken(f"no dtype, shape and offsets of {name}") from None
        if not fits:
            have = self._size - self._start
            raise self._broken(f"{name} at bytes {begin} to {end} of {have}: the file is cut off")
        if not exact:
            raise self._broken(f"{end - begin} bytes for {name}, a {dtype} of shape {shape}")

    def _broken(self, what: str) -> ValueError:
        return ValueError(f"{self.path} must be a whole safetensors file, got {what}")

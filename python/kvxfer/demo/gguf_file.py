"""Reads the header of a GGUF file and maps its tensors.

The `gguf` package has a reader too, but it builds several numpy arrays for each string of the vocabulary,
which takes about 3 s for this model, in every process. This one walks the header once (about 0.1 s) and
leaves the rest mapped, so that ranks share the file's memory and dequantise only what they need.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from . import DemoUnavailable

__all__ = ["GgufError", "GgufFile", "TensorInfo", "block_size", "dequantize"]

T = TypeVar("T")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# GGUF value type -> struct format; every GGUF file in use is little-endian.
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_MAX_NESTING = 4


class GgufError(ValueError):
    """The file is not GGUF, is cut short, or lacks something that the demo needs."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and how it is encoded."""

    name: str
    shape: tuple[int, ...]
    """Row-major shape, as numpy writes it: `[output, input]` for a matrix."""
    ggml_type: int
    offset: int
    """First byte, from the beginning of the file."""


class _Cursor:
    """Reads the header front to back and refuses to pass the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.pos = 0

    def scalar(self, fmt: str) -> Any:
        size = struct.calcsize(fmt)
        self.need(size)
        (value,) = struct.unpack_from(fmt, self.data, self.pos)
        self.pos += size
        return value

    def need(self, size: int) -> None:
        if size > len(self.data) - self.pos:
            raise GgufError(
                f"file ends at byte {len(self.data)}, but {size} bytes are due at byte {self.pos}"
            )

    def string(self) -> str:
        size = self.scalar("<Q")
        self.need(size)
        start, self.pos = self.pos, self.pos + size
        return self.data[start : self.pos].decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            if depth >= _MAX_NESTING:
                raise GgufError(f"arrays nested more than {_MAX_NESTING} deep at byte {self.pos}")
            return self.array(depth + 1)
        fmt = _SCALARS.get(kind)
        if fmt is None:
            raise GgufError(f"unknown value type {kind} at byte {self.pos}")
        return self.scalar(fmt)

    def array(self, depth: int) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        fmt = _SCALARS.get(kind)
        if fmt is None:
            # Each element takes at least its length field, so a count past that is a lie.
            self.need(count * 8)
            return [self.value(kind, depth) for _ in range(count)]
        size = struct.calcsize(fmt) * count
        self.need(size)
        start, self.pos = self.pos, self.pos + size
        return [x for (x,) in struct.iter_unpack(fmt, self.data[start : self.pos])]


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as err:
        raise DemoUnavailable("the demo needs package gguf: pip install gguf") from err
    return gguf


def block_size(kind: Any) -> tuple[int, int]:
    """How many values a block of an encoding holds, and in how many bytes."""
    values, size = _gguf().GGML_QUANT_SIZES[kind]
    return int(values), int(size)


def dequantize(raw: npt.NDArray[np.uint8], kind: Any) -> npt.NDArray[np.float32]:
    """Encoded rows (`[..., bytes of a row]`) as float32, contiguous."""
    # gguf works in steps of 16 rows. Blocks don't know of rows, so rows are joined: half as many seconds.
    rows = raw.size // raw.shape[-1]
    joined = gcd(rows, 16)
    values = _gguf().dequantize(raw.reshape(rows // joined, joined * raw.shape[-1]), kind)
    return np.ascontiguousarray(values, dtype=np.float32).reshape(*raw.shape[:-1], -1)


class GgufFile:
    """One GGUF file: `metadata` (by key) and `tensors` (by name), with the data mapped read-only.

    Args:
        path: the file.

    Raises:
        GgufError: if it is not a GGUF file of a known version, or is cut short.
        OSError: if it cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            size = file.seek(0, 2)
            if size < len(_MAGIC):
                raise GgufError(f"{self.path}: {size} bytes are too few for a GGUF file")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header()
        except GgufError as err:
            raise GgufError(f"{self.path}: {err}") from None
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    def _read_header(self) -> None:
        if self._map[: len(_MAGIC)] != _MAGIC:
            raise GgufError(f"not a GGUF file, it begins with {self._map[: len(_MAGIC)]!r}")
        cursor = _Cursor(self._map)
        cursor.pos = len(_MAGIC)
        version = cursor.scalar("<I")
        if version not in _VERSIONS:
            raise GgufError(f"GGUF version {version}, known are {', '.join(map(str, _VERSIONS))}")
        tensors, keys = cursor.scalar("<Q"), cursor.scalar("<Q")
        for _ in range(keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        found: list[TensorInfo] = []
        for _ in range(tensors):
            name, dims = cursor.string(), cursor.scalar("<I")
            cursor.need(dims * 8)
            shape = tuple(cursor.scalar("<Q") for _ in range(dims))[::-1]
            found.append(TensorInfo(name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"general.alignment is {alignment!r}")
        base = -(-cursor.pos // alignment) * alignment
        for info in found:
            self.tensors[info.name] = TensorInfo(info.name, info.shape, info.ggml_type, base + info.offset)

    def get(self, key: str, kind: type[T]) -> T:
        """The metadata value of `key`, checked to be a `kind`.

        Raises:
            GgufError: if it is missing or of another type.
        """
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            what = "is missing" if value is None else f"is a {type(value).__name__}"
            raise GgufError(f"{self.path}: metadata {key} {what}, a {kind.__name__} is needed")
        return value

    def raw(self, name: str) -> tuple[npt.NDArray[np.uint8], Any]:
        """The encoded bytes of a tensor as `[..., bytes of a row]` (a view, no copy), and its `gguf` type.

        Raises:
            GgufError: if there is no such tensor, its encoding is unknown, or the file is cut short.
            DemoUnavailable: if the `gguf` package is missing.
        """
        gguf = _gguf()
        info = self.tensors.get(name)
        if info is None:
            raise GgufError(f"{self.path}: no tensor named {name}")
        try:
            kind = gguf.GGMLQuantizationType(info.ggml_type)
            shape = gguf.quant_shape_to_byte_shape(info.shape, kind)
        except (ValueError, KeyError) as err:
            raise GgufError(f"{self.path}: tensor {name} of shape {info.shape}: {err}") from err
        end = info.offset + prod(shape)
        if end > len(self._bytes):
            raise GgufError(f"{self.path}: tensor {name} ends at byte {end}, the file at {len(self._bytes)}")
        return self._bytes[info.offset : end].reshape(shape), kind

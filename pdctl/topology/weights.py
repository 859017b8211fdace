"""Safetensors as bytes: which tensors stand where, checked, without loading one.

The format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec

from pdctl.topology.checkpoint import read_json

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""

DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8,
}  # fmt: skip

INDEX = "model.safetensors.index.json"


class WeightsError(ValueError):
    """Weights that are missing, truncated or garbled; the text names the file."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor in one file; `start` is its first byte, counted from the file's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    length_bytes: int


def weight_files(model_dir: Path) -> list[Path]:
    """The files that engines load: `model*.safetensors`, else every `*.safetensors`.

    Raises:
        WeightsError: there is none, or the index names one that is missing.
    """
    found = sorted(model_dir.glob("model*.safetensors")) or sorted(model_dir.glob("*.safetensors"))
    try:
        index = read_json(model_dir / INDEX).get("weight_map")
    except FileNotFoundError:
        index = {}
    except ValueError as error:
        raise WeightsError(str(error)) from None
    if not isinstance(index, dict) or not all(isinstance(v, str) for v in index.values()):
        raise WeightsError(f"{model_dir / INDEX} has no valid weight_map")
    for name in sorted(set(index.values())):
        if not any(path.name == name for path in found):
            raise WeightsError(f"{model_dir / name} is missing, although {INDEX} names it")
    if not found:
        raise WeightsError(f"{model_dir} holds no safetensors file")
    return found


def read_tensors(path: Path) -> list[Tensor]:
    """The tensors of one file, in the order of their bytes.

    Raises:
        WeightsError: the header is garbage, or tensors overlap, leave holes, or end where the
            file does not.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 1 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise WeightsError(f"{path} is truncated or no safetensors file")
            header = json.loads(file.read(length))
    except OSError as error:
        raise WeightsError(f"{path} can't be read: {error.strerror}") from None
    except WeightsError:
        raise
    except (ValueError, RecursionError):
        raise WeightsError(f"{path} has a garbled header") from None
    if not isinstance(header, dict):
        raise WeightsError(f"{path} has a garbled header")
    header.pop("__metadata__", None)
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.length_bytes))
    position = 8 + length
    for tensor in tensors:
        if tensor.start != position:
            what = "overlaps another" if tensor.start < position else "leaves a hole before it"
            raise WeightsError(f"{path}: tensor {tensor.name} {what}")
        position += tensor.length_bytes
    if position != size:
        what = "is truncated" if size < position else "has bytes after its last tensor"
        raise WeightsError(f"{path} {what}: {size} bytes, the header describes {position}")
    return tensors


def _tensor(path: Path, name: str, entry: Any, base: int) -> Tensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        bits = DTYPE_BITS[dtype]
        numbers = (*shape, start, end)
        if any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers) or end < start:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise WeightsError(f"{path}: the header's entry for tensor {name} is garbled") from None
    if math.prod(shape) * bits != (end - start) * 8:
        raise WeightsError(f"{path}: tensor {name} has {end - start} bytes, which is not {shape}")
    return Tensor(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        file=os.fspath(path),
        start=base + start,
        length_bytes=end - start,
    )

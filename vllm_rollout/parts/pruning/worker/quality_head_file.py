"""Quality heads as safetensors: tensors by name, and what they are in the metadata, which is text.

Invariant: what is read was written here for the same kind of file, and every number in it is one that a head can have;
everything else is a ValueError that says what. What is written is a snapshot, and can be written in parts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from vllm_rollout.checks import MAX_COUNT, shown

FORMAT_VERSION = 1

FileKind = Literal["quality head", "quality head state"]

DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}
"""Names of what is written, the widest first: tensors then lie at multiples of their size."""


class HeadMismatch(ValueError):
    """A head made for something else than where it is put."""

    def __init__(self, field: str, found: int | str, expected: int | str) -> None:
        super().__init__(
            f"the head's {field} is {shown(found)}, but {expected!r} is served: use a head trained for that"
        )


class HeadFile:
    """The content of a file, every part of which is checked when it is read."""

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self.tensors = tensors
        self.metadata = metadata
        self._read: set[str] = set()

    def tensor(
        self, name: str, *shape: int, dtype: torch.dtype = torch.float32, least: float, most: float
    ) -> Tensor:  # fmt: skip
        """A copy of a tensor of that shape and dtype, all of whose numbers are in [least, most]. Raises: ValueError."""
        value = self.tensors.get(name)
        if value is None:
            raise ValueError(f"the head has no tensor {name!r}: it has {shown(sorted(self.tensors))}")
        if value.dtype != dtype or value.shape != shape:
            got = f"{value.dtype} {shown(list(value.shape))}"
            raise ValueError(f"tensor {name!r} must be {dtype} {list(shape)}, got {got}")
        if value.numel():
            low, high = value.aminmax()  # NaN if any is
            if not (low >= least and high <= most):
                wanted = f"finite and in [{least:g}, {most:g}]"
                raise ValueError(f"tensor {name!r} must be {wanted}, got {low.item():g} to {high.item():g}")
        self._read.add(name)
        return value.clone(memory_format=torch.contiguous_format)

    def dtype(self, name: str, *allowed: torch.dtype) -> torch.dtype:
        """Raises: ValueError."""
        if name not in self.tensors:
            raise ValueError(f"the head has no tensor {name!r}")
        dtype = self.tensors[name].dtype
        if dtype not in allowed:
            raise ValueError(f"tensor {name!r} must be one of {', '.join(map(str, allowed))}, got {dtype}")
        return dtype

    def series(self, name: str, *, max_length: int, most: float) -> list[float]:
        """At most so many numbers from 0 to `most`. Raises: ValueError."""
        length = self.tensors[name].numel() if name in self.tensors else 0
        if length > max_length:
            raise ValueError(f"tensor {name!r} must have at most {max_length} numbers, got {length}")
        return self.tensor(name, length, dtype=torch.float64, least=0.0, most=most).tolist()

    def count(self, name: str, most: int = MAX_COUNT) -> int:
        """A count that is kept as a tensor. Raises: ValueError."""
        return int(self.tensor(name, dtype=torch.int64, least=0, most=most))

    def integer(self, name: str, minimum: int = 0, maximum: int = MAX_COUNT) -> int:
        """A number of the metadata. Raises: ValueError."""
        text = self.metadata.get(name)
        is_number = text is not None and text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_COUNT))
        if not is_number or not minimum <= int(text) <= maximum:  # type: ignore[arg-type]
            raise ValueError(
                f"metadata {name!r} must be a whole number from {minimum} to {maximum}, got {shown(text)}"
            )  # fmt: skip
        return int(text)  # type: ignore[arg-type]

    def check_all_read(self) -> None:
        """Raises: ValueError for a tensor that nobody has read."""
        more = self.tensors.keys() - self._read
        if more:
            raise ValueError(f"the head has tensors that no head has: {shown(sorted(more))}")


class HeadBytes:
    """A head file that can be read in parts. The tensors belong to it: nobody writes to them any more."""

    def __init__(self, kind: FileKind, tensors: Mapping[str, Tensor], metadata: Mapping[str, int | str]) -> None:
        texts = {name: str(min(value, MAX_COUNT) if isinstance(value, int) else value)
                 for name, value in metadata.items()}  # fmt: skip
        texts |= {"kind": kind, "format_version": str(FORMAT_VERSION)}
        header: dict[str, object] = {"__metadata__": texts}
        widest_first = sorted(tensors.items(), key=lambda item: list(DTYPES).index(item[1].dtype))
        parts, size = [], 0
        for name, tensor in widest_first:
            flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
            header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [size, size + len(flat)],
            }
            parts.append(flat)
            size += len(flat)
        text = json.dumps(header, ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._head = struct.pack("<Q", len(text)) + text
        self._parts = parts

    def __len__(self) -> int:
        return len(self._head) + sum(map(len, self._parts))

    def read(self, start: int, end: int) -> bytes:
        """Bytes of the file from `start` to `end`, `end` excluded."""
        found, offset = [self._head[start:end]], len(self._head)
        for part in self._parts:
            if offset < end and start < offset + len(part):
                found.append(part[max(0, start - offset) : end - offset].numpy().tobytes())
            offset += len(part)
        return b"".join(found)

    def whole(self) -> bytes:
        return self.read(0, len(self))


def read_head_file(data: bytes, kind: FileKind, *, hidden_size: int, model: str) -> HeadFile:
    """Raises: HeadMismatch for another hidden size or model; ValueError for anything but such a file."""
    try:
        tensors = load(data)
        # `load` leaves the metadata out; that the header is sound is known by now.
        (length,) = struct.unpack_from("<Q", data)
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError, RecursionError) as error:
        said = str(error)[:200]
        raise ValueError(f"a {kind} must be safetensors, got {len(data)} bytes that are not: {said}") from error
    file = HeadFile(tensors, metadata)
    if metadata.get("kind") != kind:
        raise ValueError(f"the metadata must say kind {kind!r}, got {shown(metadata.get('kind'))}")
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise ValueError(f"format_version must be {FORMAT_VERSION}, got {shown(metadata.get('format_version'))}")
    if (found := file.integer("hidden_size", minimum=1)) != hidden_size:
        raise HeadMismatch("hidden_size", found, hidden_size)
    if (name := metadata.get("model")) != model:
        raise HeadMismatch("model", str(name), model)
    return file

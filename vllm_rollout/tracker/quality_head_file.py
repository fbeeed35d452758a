"""Quality heads as safetensors: tensors by name, and what they are in the metadata, which is text.

Invariant: what is read was written here for the same kind of file; everything else is a ValueError that says what.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

FORMAT_VERSION = 1

FileKind = Literal["quality head", "quality head state"]


class HeadMismatch(ValueError):
    """A head made for something else than where it is put."""

    def __init__(self, field: str, found: int | str, expected: int | str) -> None:
        super().__init__(f"the head's {field} is {found!r}, but {expected!r} is served: use a head trained for that")
        self.field = field
        self.found = found
        self.expected = expected


@dataclass(frozen=True, slots=True)
class HeadFile:
    """The content of a file."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A copy of a finite tensor of that shape and dtype. Raises: ValueError."""
        value = self.tensors.get(name)
        if value is None:
            raise ValueError(f"the head has no tensor {name!r}: it has {', '.join(sorted(self.tensors)) or 'none'}")
        if value.dtype != dtype or value.shape != shape:
            raise ValueError(f"tensor {name!r} must be {dtype} {list(shape)}, got {value.dtype} {list(value.shape)}")
        if not value.isfinite().all():
            raise ValueError(f"tensor {name!r} must be finite, got NaN or infinity")
        return value.clone(memory_format=torch.contiguous_format)

    def dtype(self, name: str) -> torch.dtype:
        """Raises: ValueError."""
        if name not in self.tensors:
            raise ValueError(f"the head has no tensor {name!r}")
        return self.tensors[name].dtype

    def series(self, name: str) -> list[float]:
        """Numbers, any number of them. Raises: ValueError."""
        return self.tensor(
            name, self.tensors[name].numel() if name in self.tensors else 0, dtype=torch.float64
        ).tolist()

    def integer(self, name: str, minimum: int = 0) -> int:
        """A number of the metadata. Raises: ValueError."""
        text = self.metadata.get(name)
        if text is None or not text.isdecimal() or int(text) < minimum:
            raise ValueError(f"metadata {name!r} must be a whole number >= {minimum}, got {text!r}")
        return int(text)


def write_head_file(kind: FileKind, tensors: Mapping[str, Tensor], metadata: Mapping[str, int | str]) -> bytes:
    """Safetensors whose metadata also says what they are."""
    texts = {name: str(value) for name, value in metadata.items()}
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    return save(contiguous, {"kind": kind, "format_version": str(FORMAT_VERSION), **texts})


def read_head_file(data: bytes, kind: FileKind, *, hidden_size: int, model: str) -> HeadFile:
    """Raises: HeadMismatch for another hidden size or model; ValueError for anything but such a file."""
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError(f"a {kind} must be safetensors, got {len(data)} bytes that are not: {error}") from error
    # `load` leaves the metadata out; that the header is sound is known by now.
    (length,) = struct.unpack_from("<Q", data)
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    file = HeadFile(tensors, metadata)
    if metadata.get("kind") != kind:
        raise ValueError(f"the metadata must say kind {kind!r}, got {metadata.get('kind')!r}")
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise ValueError(f"format_version must be {FORMAT_VERSION}, got {metadata.get('format_version')!r}")
    if (found := file.integer("hidden_size", minimum=1)) != hidden_size:
        raise HeadMismatch("hidden_size", found, hidden_size)
    if (name := metadata.get("model")) != model:
        raise HeadMismatch("model", str(name), model)
    return file

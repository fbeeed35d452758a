"""The content of a draft memory as bytes that another process can load.

Invariant: loaded bytes have been checked as a whole. The checksum finds torn bytes. Every count and token is compared
with the bytes that are there, so that no data asks for more memory than it has bytes.

All numbers are little-endian. The file has a magic number, a checksum of the rest and the number of prompts. A prompt
has the number of bytes of its key, of tokens of its stem and of its sequences, then key and stem. A sequence has the
number of stem tokens that it begins with, of versions since it ended and of its own tokens, then these tokens.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

from vllm_rollout.parts.drafts.worker.memory_reference import KeptPrompt, KeptSequence

MAGIC = b"vllm-rollout drafts 1\n"

CHECKSUM = struct.Struct("<I")
COUNT = struct.Struct("<Q")
PROMPT = struct.Struct("<QQQ")
SEQUENCE = struct.Struct("<QQQ")
TOKEN = np.dtype("<i4")
MAX_VERSIONS_OLD = 2**31


def dump_prompts(prompts: list[KeptPrompt]) -> bytes:
    parts = [COUNT.pack(len(prompts))]
    for key, stem, sequences in prompts:
        parts += [PROMPT.pack(len(key), len(stem) // TOKEN.itemsize, len(sequences)), key, _swapped(stem)]
        for branch, versions_old, tokens in sequences:
            parts += [
                SEQUENCE.pack(branch, min(versions_old, MAX_VERSIONS_OLD), len(tokens) // TOKEN.itemsize),
                _swapped(tokens),
            ]
    body = b"".join(parts)
    return MAGIC + CHECKSUM.pack(zlib.crc32(body)) + body


def load_prompts(data: bytes) -> list[KeptPrompt]:
    """The prompts that `dump_prompts` was given.

    Raises ValueError for data that is torn, of another format or impossible.
    """
    if not data.startswith(MAGIC):
        raise ValueError(f"drafts must begin with {MAGIC!r}, got {data[: len(MAGIC)]!r}: they are of another format")
    reader = _Reader(data, len(MAGIC))
    (checksum,) = reader.unpack(CHECKSUM)
    if checksum != zlib.crc32(data[reader.position :]):
        raise ValueError("drafts are torn: their checksum is that of other data")
    (num_prompts,) = reader.unpack(COUNT)
    prompts: list[Any] = []
    while len(prompts) < num_prompts:
        prompts.append(_prompt(reader))
    if reader.position != len(data):
        raise ValueError(f"drafts must end after their last prompt, got {len(data) - reader.position} more bytes")
    return prompts


def _prompt(reader: _Reader) -> KeptPrompt:
    key_bytes, stem_length, num_sequences = reader.unpack(PROMPT)
    key = reader.take(key_bytes)
    stem = reader.tokens(stem_length)
    if not num_sequences:
        raise ValueError("a prompt of drafts must have a sequence, got none")
    sequences: list[KeptSequence] = []
    while len(sequences) < num_sequences:
        branch, versions_old, length = reader.unpack(SEQUENCE)
        if branch > stem_length:
            raise ValueError(f"a sequence begins with at most the {stem_length} tokens of its stem, got {branch}")
        if versions_old > MAX_VERSIONS_OLD:
            raise ValueError(f"a sequence ended at most {MAX_VERSIONS_OLD} versions ago, got {versions_old}")
        if not length:
            raise ValueError("a sequence of drafts must have a token, got none")
        sequences.append((branch, versions_old, reader.tokens(length)))
    return key, stem, sequences


class _Reader:
    """Reads bytes from a position on."""

    def __init__(self, data: bytes, position: int) -> None:
        self.data = data
        self.position = position

    def take(self, size: int) -> bytes:
        left = len(self.data) - self.position
        if size > left:
            raise ValueError(f"drafts are torn: {size} bytes must follow, got {left}")
        self.position += size
        return self.data[self.position - size : self.position]

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.take(form.size))

    def tokens(self, length: int) -> bytes:
        values = np.frombuffer(self.take(length * TOKEN.itemsize), TOKEN)
        if (values < 0).any():
            raise ValueError(f"tokens must not be negative, got {values.min()}")
        return values.astype(np.int32).tobytes()


def _swapped(tokens: bytes) -> bytes:
    """Native tokens as little-endian tokens."""
    return np.frombuffer(tokens, np.int32).astype(TOKEN).tobytes()

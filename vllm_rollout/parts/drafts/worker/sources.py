"""The texts that drafts come from, as the specification of the draft memory has them.

A source is a text that tokens are drafted from: a sequence's own tokens, or the stem of a prompt. The stem is the
context that the prompt was first begun with. A sequence stores only the tokens that differ from the stem. Every stored
token is a place, kept by the `min_match` tokens that it follows, also if these are the stem's.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

BLOCK_TOKENS = 64
BLOCK_BYTES = 560
"""A block holds so many tokens of a source, and their links to the places before them, in so many bytes."""
SEQUENCE_BYTES = 320
PROMPT_BYTES = 768

Ngram = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Source:
    """Tokens that follow one another, of which the first `branch` are the stem's."""

    tokens: list[int]
    branch: int
    recent: list[int]
    """All of its tokens, also those that there was no room for."""
    version: int | None = None
    """Version of the weights that it ended under. None while it runs, and for a stem."""
    is_cut: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens) - self.branch

    @property
    def block_bytes(self) -> int:
        return -(-self.length // BLOCK_TOKENS) * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    source: Source
    position: int

    @property
    def token(self) -> int:
        return self.source.tokens[self.position]


@dataclass(slots=True, eq=False)
class Prompt:
    key: bytes
    used: int = 0
    num_bytes: int = 0
    stem: Source | None = None
    ended: list[Source] = field(default_factory=list)
    running: list[Source] = field(default_factory=list)
    places: dict[Ngram, list[Place]] = field(default_factory=lambda: defaultdict(list))
    """Places by the tokens that they follow, the most recent last."""


def common_tokens(prompt: Prompt, tokens: list[int]) -> int:
    """Number of leading tokens that `tokens` and the prompt's stem share."""
    stem = prompt.stem.tokens if prompt.stem else []
    pairs = enumerate(zip(tokens, stem, strict=False))
    return next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(tokens), len(stem)))


def table_bytes(num_ngrams: int) -> int:
    """A place, four bytes, for each n-gram, in a table of which at most three quarters are taken."""
    if num_ngrams == 0:
        return 0
    capacity = 16
    while 4 * num_ngrams > 3 * capacity:
        capacity *= 2
    return 4 * capacity

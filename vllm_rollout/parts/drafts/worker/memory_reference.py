"""A draft memory in plain Python: the specification of csrc/memory.cpp.

Invariant: the same calls give the same drafts, probabilities, bytes and errors in both.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from vllm_rollout.parts.drafts.worker.sources import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    PROMPT_BYTES,
    SEQUENCE_BYTES,
    Ngram,
    Place,
    Prompt,
    Source,
    common_tokens,
    table_bytes,
)

MAX_VERSIONS_OLD = 30
"""A source that is older counts as one of this age."""
VOTE_KEPT = 0.98
"""Factor by which each weights update multiplies the votes of answers that ended before it."""
DOUBT = 2.6
"""Weight against any draft. Fitted by hand, with the exponents, to the drafts that recorded answers accepted
(docs/development/log.md)."""

KeptSequence = tuple[int, int, bytes]
"""Tokens of the stem that it begins with, versions since it ended, its own tokens."""
KeptPrompt = tuple[bytes, bytes, list[KeptSequence]]
"""A prompt's key, stem and sequences."""


class DraftMemoryReference:
    def __init__(self, max_bytes: int, min_match: int, max_match: int, max_places: int) -> None:
        self.max_bytes = max_bytes
        self.min_match = min_match
        self.max_match = max_match
        self.max_places = max_places
        self.version = 0
        self.clock = 0
        self.next_number = 0
        self.num_bytes = 0
        """Bytes of all prompts."""
        self.prompts: dict[bytes, Prompt] = {}
        self.running: dict[int, tuple[Prompt, Source]] = {}

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def begin(self, key: bytes, context: bytes) -> int:
        tokens = _tokens(context)
        prompt = self._prompt(key)
        source = self._add_source(prompt)
        self._make_stem(prompt, tokens)
        branch = common_tokens(prompt, tokens)
        self._follow(prompt, source, tokens[:branch], tokens[branch:])
        number = self.next_number
        self.next_number += 1
        self.running[number] = (prompt, source)
        return number

    def step(self, sequences: bytes, tokens: bytes, longest: bytes) -> tuple[bytearray, bytearray]:
        numbers = _numbers(sequences)
        limits = _tokens(longest)
        for row, limit in enumerate(limits):
            if limit < 0:
                raise ValueError(f"longest[{row}] must not be negative, got {limit}")
        self._check_running(numbers)
        rows = np.frombuffer(tokens, np.int32).reshape(len(numbers), -1 if numbers else 0).tolist()
        for row, sampled in enumerate(rows):
            _check_row(row, sampled)
        for number, sampled in zip(numbers, rows, strict=True):
            prompt, source = self.running[number]
            self._touch(prompt)
            for token in sampled:
                if token != -1:
                    self._append(prompt, source, token)
        drafts = np.full((len(numbers), max(limits, default=0)), -1, np.int32)
        probabilities = np.zeros(drafts.shape, np.float32)
        for row, (number, limit) in enumerate(zip(numbers, limits, strict=True)):
            for column, (token, probability) in enumerate(self._draft(*self.running[number], limit)):
                drafts[row, column] = token
                probabilities[row, column] = probability
        return bytearray(drafts.tobytes()), bytearray(probabilities.tobytes())

    def end(self, sequences: bytes, keep: bool) -> None:
        numbers = _numbers(sequences)
        self._check_running(numbers)
        for number in numbers:
            prompt, source = self.running.pop(number)
            self._touch(prompt)
            self._end(prompt, source, self.version if keep else None)
            self._drop_if_empty(prompt)

    def age(self) -> None:
        self.version += 1

    def kept(self) -> list[KeptPrompt]:
        """Stored ended and running sequences, the least recently used prompt first."""
        result = []
        for prompt in sorted(self.prompts.values(), key=lambda prompt: prompt.used):
            sequences = [
                (source.branch, self._versions_old(source), _bytes(source.tokens[source.branch :]))
                for source in [*prompt.ended, *prompt.running]
                if source.length
            ]
            if sequences:
                result.append((prompt.key, _bytes(prompt.stem.tokens if prompt.stem else []), sequences))
        return result

    def restore(self, key: bytes, stem: bytes, sequences: list[KeptSequence]) -> None:
        """Add the sequences that `kept` gave of one prompt, as sequences that end now. If another stem is here, those
        that branch off behind the common part are left out. Each would bring its part of the stem along."""
        prompt = self._prompt(key)
        context = _tokens(stem)
        self._make_stem(prompt, context)
        shared = common_tokens(prompt, context)
        for branch, versions_old, tokens in sequences:
            if branch > shared:
                continue
            source = self._add_source(prompt)
            self._follow(prompt, source, context[:branch], _tokens(tokens))
            self._end(prompt, source, self.version - versions_old)
        self._drop_if_empty(prompt)

    def _prompt(self, key: bytes) -> Prompt:
        prompt = self.prompts.setdefault(key, Prompt(key))
        self._count(prompt)
        self._touch(prompt)
        return prompt

    def _touch(self, prompt: Prompt) -> None:
        self.clock += 1
        prompt.used = self.clock

    def _add_source(self, prompt: Prompt) -> Source:
        source = Source([], 0, [])
        prompt.running.append(source)
        self._count(prompt)
        if self.num_bytes > self.max_bytes:
            self._evict(0)
        return source

    def _make_stem(self, prompt: Prompt, context: list[int]) -> None:
        if prompt.stem is None:
            prompt.stem = Source([], 0, [])
            for token in context:
                self._append(prompt, prompt.stem, token)

    def _follow(self, prompt: Prompt, source: Source, shared: list[int], own: list[int]) -> None:
        """Begin with tokens of the stem and then with others."""
        source.branch = len(shared)
        source.tokens = shared[:]
        source.recent = shared[:]
        for token in own:
            self._append(prompt, source, token)

    def _end(self, prompt: Prompt, source: Source, version: int | None) -> None:
        """End a source. It is kept as of `version`, or not at all if `version` is None."""
        prompt.running.remove(source)
        prompt.ended.append(source)
        source.version = version
        if version is None or not source.length:
            self._remove(prompt, [source])

    def _append(self, prompt: Prompt, source: Source, token: int) -> None:
        """Store a token if there is room, or room can be made. Otherwise nothing more of this source is stored."""
        while not source.is_cut and self.num_bytes + (needed := self._bytes_needed(prompt, source)) > self.max_bytes:
            source.is_cut = not self._evict(needed)
        if not source.is_cut:
            prompt.num_bytes += needed
            self.num_bytes += needed
            source.tokens.append(token)
            position = len(source.tokens) - 1
            if position >= self.min_match:
                prompt.places[self._ngram(source.tokens[:position])].append(Place(source, position))
        source.recent.append(token)

    def _bytes_needed(self, prompt: Prompt, source: Source) -> int:
        block = 0 if source.length % BLOCK_TOKENS else BLOCK_BYTES
        if len(source.tokens) < self.min_match or self._ngram(source.tokens) in prompt.places:
            return block
        return block + table_bytes(len(prompt.places) + 1) - table_bytes(len(prompt.places))

    def _count(self, prompt: Prompt) -> None:
        """Count the prompt's bytes anew."""
        before, prompt.num_bytes = prompt.num_bytes, self._prompt_bytes(prompt)
        self.num_bytes += prompt.num_bytes - before

    def _prompt_bytes(self, prompt: Prompt) -> int:
        sources = [*prompt.ended, *prompt.running]
        blocks = sum(source.block_bytes for source in sources) + (prompt.stem.block_bytes if prompt.stem else 0)
        records = len(sources) * self._record_bytes
        return PROMPT_BYTES + 2 * len(prompt.key) + records + blocks + table_bytes(len(prompt.places))

    @property
    def _record_bytes(self) -> int:
        return SEQUENCE_BYTES + 16 * self.max_match

    def _evict(self, needed: int) -> bool:
        """Drop whole ended sequences until an eighth is free, and the bytes needed. The least recently used prompt
        loses first, and of one prompt the sequence that ended first. False if none has ended."""
        target = self.max_bytes - max(self.max_bytes // 8, needed)
        prompts = sorted((p for p in self.prompts.values() if p.ended), key=lambda prompt: prompt.used)
        for prompt in prompts:
            excess = self.num_bytes - target
            dead: list[Any] = []
            while excess > 0 and len(dead) < len(prompt.ended):
                dead.append(prompt.ended[len(dead)])
                excess -= self._record_bytes + dead[-1].block_bytes
            self._remove(prompt, dead)
            self._drop_if_empty(prompt)
        return bool(prompts)

    def _remove(self, prompt: Prompt, dead: Iterable[Source]) -> None:
        """Forget sources. Of each n-gram the most recent `max_places` places stay."""
        gone = list(dead)
        prompt.ended = [source for source in prompt.ended if source not in gone]
        if any(source.length for source in gone):
            for ngram, places in list(prompt.places.items()):
                left = [place for place in places if place.source not in gone]
                prompt.places[ngram] = left[-self.max_places :]
                if not left:
                    del prompt.places[ngram]
        self._count(prompt)

    def _drop_if_empty(self, prompt: Prompt) -> None:
        if not prompt.ended and not prompt.running and self.prompts.pop(prompt.key, None) is not None:
            self.num_bytes -= prompt.num_bytes

    def _ngram(self, tokens: Sequence[int]) -> Ngram:
        return tuple(tokens[len(tokens) - self.min_match :])

    def _draft(self, prompt: Prompt, source: Source, longest: int) -> list[tuple[int, float]]:
        """Drafted tokens and their probabilities. The places with the longest match vote on each token. Those that
        voted for it go on. If none can, places that follow the drafted tokens are looked up."""
        context = source.recent[-self.max_match :]
        drafts: list[tuple[int, float]] = []
        places: list[Place] = []
        probability = 1.0
        match = 0
        while len(drafts) < longest:
            if not places:
                places, match = self._find(prompt, context)
            if not places:
                break
            token, accepted = self._vote(places, match)
            probability *= accepted
            drafts.append((token, probability))
            context.append(token)
            match = min(match + 1, self.max_match)
            places = [
                Place(place.source, place.position + 1)
                for place in places
                if place.token == token and place.position + 1 < len(place.source.tokens)
            ]
        return drafts

    def _find(self, prompt: Prompt, context: list[int]) -> tuple[list[Place], int]:
        """Recent places in stored sequences with the longest match to the last tokens, and the length of that match."""
        if len(context) < self.min_match:
            return [], 0
        places = prompt.places.get(self._ngram(context), [])
        matches = [(place, self._match(place, context)) for place in islice(reversed(places), self.max_places)]
        longest = max((match for _, match in matches), default=0)
        return [place for place, match in matches if match == longest], longest

    def _match(self, place: Place, context: list[int]) -> int:
        before = place.source.tokens[max(0, place.position - self.max_match) : place.position]
        match = 0
        while match < min(len(before), len(context), self.max_match) and before[-1 - match] == context[-1 - match]:
            match += 1
        return match

    def _vote(self, places: list[Place], match: int) -> tuple[int, float]:
        """The token with most votes, and its probability to be accepted. Of equals it is the most recently voted one.

        The probability is share^1.5 x support / (support + DOUBT). Support is (match + 1/2) x the root of all votes.
        A divided vote is worse than its share says, because the winner was chosen by it. Many votes are worse than
        their number says, because places with many are places with common words."""
        votes: dict[int, float] = defaultdict(float)
        total = 0.0
        for place in places:
            vote = VOTE_KEPT ** min(self._versions_old(place.source), MAX_VERSIONS_OLD)
            votes[place.token] += vote
            total += vote
        token = max(votes, key=votes.__getitem__)
        share = votes[token] / total
        support = math.sqrt(total) * (match + 0.5)
        return token, share * math.sqrt(share) * (support / (support + DOUBT))

    def _versions_old(self, source: Source) -> int:
        return 0 if source.version is None else self.version - source.version

    def _check_running(self, numbers: list[int]) -> None:
        seen = set()
        for i, number in enumerate(numbers):
            if number not in self.running:
                raise ValueError(f"sequences[{i}] must be one that runs, got {number}")
            if number in seen:
                raise ValueError(f"sequences must differ, got {number} twice")
            seen.add(number)


def _check_row(row: int, sampled: list[int]) -> None:
    is_padding = False
    for column, token in enumerate(sampled):
        if token < -1 or (is_padding and token != -1):
            raise ValueError(
                f"tokens[{row}] must be tokens, which are not negative, and then -1, got {token} at {column}"
            )
        is_padding = token == -1


def _tokens(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


def _numbers(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int64).tolist()


def _bytes(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()

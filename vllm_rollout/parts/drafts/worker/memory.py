"""Answers to the prompts of one worker, as a source of drafts.

Invariant: drafts of a prompt come from sequences of the same key only, and stored bytes stay within `max_bytes`.

The rule is in memory_reference.py. If it is built, csrc/memory.cpp serves. `VLLM_ROLLOUT_OPS=torch` forces the
reference, as for operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_rollout.build_command import build_command
from vllm_rollout.parts.drafts.worker.memory_file import dump_prompts, load_prompts
from vllm_rollout.parts.drafts.worker.memory_reference import DraftMemoryReference
from vllm_rollout.parts.observing.tracker.dispatch import extension_fault, reference_is_forced

MAX_TOKEN = 2**31 - 1


class Drafts(NamedTuple):
    """Proposed next tokens, by row."""

    tokens: NDArray[np.int32]
    """[num_rows, num_columns], padded with -1."""
    probabilities: NDArray[np.float32]
    """[num_rows, num_columns]: probability that this token and all before it are accepted. 0 where padded."""


@dataclass(frozen=True, slots=True)
class DraftMemoryImplementation:
    """The implementation that serves."""

    name: Literal["c++", "python"]
    reason: str | None
    """Reason why the faster one is not active. None when it is."""
    store: type[Any] = field(repr=False, compare=False)
    """DraftMemoryReference, or csrc's of the same methods: arrays travel as their bytes, keys in UTF-8."""


def draft_memory_implementation() -> DraftMemoryImplementation:
    """The implementation that a memory made now has."""
    fault = reference_is_forced() or extension_fault()
    if fault is None:
        from vllm_rollout import _C

        if hasattr(_C, "DraftMemory"):
            return DraftMemoryImplementation("c++", None, _C.DraftMemory)
        fault = f"vllm_rollout._C was built before it had DraftMemory: run `{build_command()}` to rebuild it"
    return DraftMemoryImplementation("python", fault, DraftMemoryReference)


class DraftMemory:
    """Answers to the prompts of one worker, as a source of drafts.

    max_bytes: bytes of prompts and sequences together. Above it whole ended sequences are evicted until an eighth is
    free. The least recently used prompt loses first, and of one prompt the sequence that ended first. If none has
    ended, nothing more is stored of a running sequence that needs room. It goes on, and drafts from the stored tokens.
    Beyond that a running sequence itself takes 320 + 16 x max_match bytes. Its prompt takes 768, and two for each byte
    of the key.
    min_match: tokens before a place that must equal the row's last tokens, or the place is not considered.
    max_match: largest number of tokens of a match that count.
    max_places: number of places to look at, the most recent ones.

    With min_match 1 recorded answers accepted more tokens, for as many drafted ones, than with 2 or 3. Its table of
    n-grams is the smallest.

    A token is drafted by a vote of the places with the longest match. For v of t votes and a match of L tokens, its
    probability is (v / t)^1.5 x s / (s + 2.6). Here s = (L + 1/2) x sqrt(t). A row's probabilities are the products of
    these. Drafted tokens of recorded answers of a 0.5B model were grouped by tenths of probability in [0.1, 1]. In each
    tenth the accepted share was within 0.05 of the mean probability (docs/development/log.md).
    """

    def __init__(self, max_bytes: int, *, min_match: int = 1, max_match: int = 16, max_places: int = 64) -> None:
        for name, value, least in (
            ("max_bytes", max_bytes, 0),
            ("min_match", min_match, 1),
            ("max_match", max_match, min_match),
            ("max_places", max_places, 1),
        ):
            if not least <= value < 2**62:
                raise ValueError(f"{name} must be at least {least} and below 2^62, got {value}")
        self.implementation = draft_memory_implementation()
        self._settings = max_bytes, min_match, max_match, max_places
        self.clear()

    def clear(self) -> None:
        """Forget everything. Running sequences are not known any more."""
        self._store: DraftMemoryReference = self.implementation.store(*self._settings)

    @property
    def max_bytes(self) -> int:
        return self._settings[0]

    @property
    def num_bytes(self) -> int:
        return self._store.num_bytes

    @property
    def num_prompts(self) -> int:
        return self._store.num_prompts

    def begin(self, prompt: str, context: Sequence[int] | NDArray[Any]) -> int:
        """Begin a candidate of this prompt. Returns its sequence number.

        prompt: an opaque key. Sequences of different keys never see each other.
        context: the prompt's tokens, and any answer tokens it resumes. Leading tokens that the prompt's first context
        has, too, are not stored again.
        """
        tokens = np.asarray(context, np.int64)
        if tokens.ndim != 1 or ((tokens < 0) | (tokens > MAX_TOKEN)).any():
            raise ValueError(f"context must be tokens of 0 to {MAX_TOKEN} in one dimension, got {context!r:.80}")
        return self._store.begin(_key(prompt), tokens.astype(np.int32).tobytes())

    def step(self, sequences: NDArray[Any], tokens: NDArray[Any], longest: NDArray[Any]) -> Drafts:
        """Append the sampled tokens of all rows, then draft for each row.

        sequences: integers [num_rows], distinct: running sequences.
        tokens: int32 [num_rows, width], padded with -1. A row may have none.
        longest: integers [num_rows]: largest number of tokens to draft. 0 drafts none.

        Raises ValueError for a wrong shape or dtype, a sequence that does not run or comes twice, or a negative
        longest. A token below -1 or after padding raises it, too. Nothing is changed then.
        """
        num_rows = len(sequences)
        for name, values in (("sequences", sequences), ("longest", longest)):
            if values.shape != (num_rows,) or values.dtype.kind not in "iu":
                raise ValueError(f"{name} must be integers [{num_rows}], got {values.dtype} {list(values.shape)}")
        if tokens.ndim != 2 or tokens.shape[0] != num_rows or tokens.dtype != np.int32:
            raise ValueError(f"tokens must be int32 [{num_rows}, width], got {tokens.dtype} {list(tokens.shape)}")
        numbers = sequences.astype(np.int64, copy=False)
        limits = longest.astype(np.int32, copy=False)
        if limits is not longest and (limits != longest).any():
            raise ValueError(f"longest must be below 2^31, got {longest.max()}")
        drafts, probabilities = self._store.step(numbers.tobytes(), tokens.tobytes(), limits.tobytes())
        shape = (num_rows, len(drafts) // 4 // num_rows if num_rows else 0)
        return Drafts(
            np.frombuffer(drafts, np.int32).reshape(shape), np.frombuffer(probabilities, np.float32).reshape(shape)
        )

    def end(self, sequences: Sequence[int], keep: bool = True) -> None:
        """End these sequences. Kept ones stay as a source until they are evicted. Of others nothing stays.

        Raises ValueError for a sequence that does not run or comes twice, before anything is changed.
        """
        self._store.end(np.asarray(sequences, np.int64).tobytes(), keep)

    def age(self) -> None:
        """The weights changed: ended sequences count as older by one version.

        A place of a sequence that ended n versions ago has 0.98^n of a vote, among places of the same match. So newer
        places are preferred, and tokens that only old places follow get a lower probability. For one vote of one
        version ago, after a match of two, it is 0.488 instead of 0.490. A running sequence counts as new until its end.
        """
        self._store.age()

    def dump(self) -> bytes:
        """Ended and running sequences by prompt, the least recently used one first."""
        return dump_prompts(self._store.kept())

    def load(self, data: bytes) -> None:
        """Add the sequences of another memory's `dump`. They count as ended, as many versions ago as in that memory.

        If `max_bytes` has no room, sequences are evicted as usual. If a prompt is known here by another context,
        sequences that branch off behind the common part of both contexts are left out.

        Raises ValueError for data that is torn, of another format or impossible. Nothing is changed then.
        """
        for key, stem, sequences in load_prompts(data):
            self._store.restore(key, stem, sequences)


def _key(prompt: str) -> bytes:
    return prompt.encode("utf-8", "surrogatepass")

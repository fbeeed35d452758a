"""What a session has become: tokens as the engine saw them, with a mask of those that the policy generated.

Invariant: the tokens of a segment are the prompt of its last turn and what that generated, so that each was seen after
exactly those before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

History = Literal["first", "extended", "mended", "reformatted", "rewritten"]
"""How a turn's prompt goes on from the turn before.

extended     it begins with the tokens that were there
mended       its text does, in other tokens: these were replaced by those that were there
reformatted  its text does, but for white space or a stop string: a new segment begins
rewritten    it tells another history: a new segment begins, where the group allows it
"""
MAX_SHOWN_CHARS = 40
Decode = Callable[[Sequence[int]], str]


class Continuation(NamedTuple):
    """How a prompt goes on."""

    history: History
    token_ids: Sequence[int]
    """The prompt's, mended."""
    where: str | None = None
    """What a rewritten one says differently; None: nothing."""


@dataclass(slots=True)
class Segment:
    """A stretch of a session's history that no turn has changed."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    mask: bytearray = field(default_factory=bytearray)
    """1: the policy generated this token."""
    logprobs: array[float] | None = None
    """Each token's; 0 for those that were given. None where a turn asked for none."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One that has ended."""

    history: History
    segment: int
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str | None
    waited_s: float
    """Between the end of the turn before and this one: tools, mostly."""
    seconds: float
    began_s: float
    """By the clock of its service."""
    num_cached_tokens: int | None = None
    """How many tokens of its prompt had their KV there already; None: nobody knows."""


@dataclass(slots=True)
class Conversation:
    """The turns of a session."""

    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    _sent: str = ""
    """The text of the last answer, as its client got it."""
    _num_before: int = 0
    """Tokens of the last prompt."""

    @property
    def num_held_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def halves(self) -> tuple[Sequence[int], Sequence[int]]:
        """What the policy was asked at first, and all that follows in what its last turn saw.

        Where the history was rewritten from its beginning on, that of the last turn alone.
        """
        first, last = self.segments[0], self.segments[-1]
        began = _num_given(first)
        if last.token_ids[:began] != first.token_ids[:began]:
            first, began = last, _num_given(last)
        return first.token_ids[:began], last.token_ids[began:]

    def follow(self, prompt: Sequence[int], decode: Decode) -> Continuation:
        """How the next turn's prompt goes on. Text is compared only where tokens differ."""
        if not self.segments:
            return Continuation("first", prompt)
        known = self.segments[-1].token_ids
        at = _first_difference(known, prompt)
        if at == len(known):
            return Continuation("extended", prompt)
        before = max(0, at - 1)  # some tokenizers leave out a space at the beginning of a text
        num_same = _length_with_text(prompt[before:], decode(known[before:]), decode)
        if num_same is not None:
            return Continuation("mended", [*known, *prompt[before + num_same :]])
        asked = decode(prompt)
        said = decode(known[: self._num_before]) + self._sent
        if _without_spaces(asked).startswith(_without_spaces(said)):
            return Continuation("reformatted", prompt)
        return Continuation("rewritten", prompt, _shown_difference(said, asked))

    def add(
        self, turn: Turn, prompt: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float] | None, text: str
    ) -> None:
        """A turn has ended, whose prompt went on as `turn.history` says."""
        if turn.history in ("first", "reformatted", "rewritten"):
            self.segments.append(Segment())
        segment = self.segments[-1]
        given = prompt[len(segment.token_ids) :]
        before = len(segment.token_ids)
        segment.token_ids.extend(given)
        segment.token_ids.extend(token_ids)
        segment.mask += bytes(len(given)) + b"\1" * len(token_ids)
        if logprobs is not None and (segment.logprobs is not None or not before):
            segment.logprobs = segment.logprobs or array("f")
            segment.logprobs.extend([0.0] * len(given))
            segment.logprobs.extend(logprobs)
        else:
            segment.logprobs = None
        self.turns.append(turn)
        self._sent, self._num_before = text, len(prompt)


def _num_given(segment: Segment) -> int:
    """Tokens before the first one that the policy generated."""
    at = segment.mask.find(b"\1")
    return len(segment.mask) if at < 0 else at


def _first_difference(known: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens are the same from the beginning."""
    return next(
        (at for at, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), min(len(known), len(prompt))
    )


def _length_with_text(tokens: Sequence[int], text: str, decode: Decode) -> int | None:
    """How many of these tokens say exactly `text`; None where no such number does."""
    low, high = 0, len(tokens)
    while low < high:
        middle = (low + high) // 2
        if len(decode(tokens[:middle])) < len(text):
            low = middle + 1
        else:
            high = middle
    return low if text and "�" not in text and decode(tokens[:low]) == text else None


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _shown_difference(said: str, asked: str) -> str:
    """The first character at which they differ, with what stands there."""
    at = next((at for at, (a, b) in enumerate(zip(said, asked, strict=False)) if a != b), min(len(said), len(asked)))
    return (
        f"character {at} of the conversation: it was {said[at : at + MAX_SHOWN_CHARS]!r}, "
        f"the request has {asked[at : at + MAX_SHOWN_CHARS]!r}"
    )

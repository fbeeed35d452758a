"""The trajectory of a session: tokens as the engine processed them, with a mask of those that the policy generated.

Invariant: a segment's tokens are the prompt of its last turn and the output of that turn. So each token follows exactly
those before it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

History = Literal["first", "extended", "mended", "reformatted", "rewritten"]
"""Relation of a turn's prompt to the turns before.

extended     it begins with the earlier tokens
mended       its text does, in other tokens, which were replaced by the earlier ones
reformatted  its text does, apart from white space or a stop string: a new segment begins
rewritten    its history differs: a new segment begins, if the group allows it
"""
MAX_SHOWN_CHARS = 40
PIECE_TOKENS = 256
"""Tokens decoded at once. A tokenizer may keep the interpreter's lock while it decodes."""
OVERLAP_TOKENS = 8
"""Tokens decoded again with the next piece: more than one character takes."""
NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""The decoded form of bytes that are not a whole character."""
Decode = Callable[[Sequence[int]], str]


class Continuation(NamedTuple):
    """A prompt's continuation of the turns before."""

    history: History
    token_ids: Sequence[int]
    """Tokens of the prompt, mended."""
    where: str | None = None
    """The difference of a rewritten history, in words. None without one."""


@dataclass(slots=True)
class Segment:
    """A stretch of a session's history that no turn has changed."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    mask: bytearray = field(default_factory=bytearray)
    """1 if the policy generated the token, else 0."""
    logprobs: array[float] | None = None
    """Log probability of each token, 0 for given tokens. None if a turn asked for none."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that has ended."""

    history: History
    segment: int
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str | None
    waited_s: float
    """Seconds between the end of the turn before and this one, mostly spent on tools."""
    seconds: float
    began_s: float
    """Start by the clock of its service, in seconds."""
    num_cached_tokens: int | None = None
    """Tokens of its prompt whose KV was cached. None if unknown."""
    weight_versions: Sequence[dict[str, Any]] = ()
    """Spans `{"version", "start", "end"}` over the tokens that it generated."""


@dataclass(slots=True)
class Conversation:
    """The turns of a session, and the tokens of its segments."""

    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    _sent: str = ""
    """Text of the last answer, as its client got it."""
    _num_before: int = 0
    """Number of tokens of the last prompt."""

    @property
    def num_held_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def halves(self) -> tuple[Sequence[int], Sequence[int]]:
        """The first prompt, and everything after it as the last turn's prompt and output have it.

        If the history was rewritten from its beginning on, both are of the last segment alone.
        """
        first, last = self.segments[0], self.segments[-1]
        began = _num_given(first)
        if last.token_ids[:began] != first.token_ids[:began]:
            first, began = last, _num_given(last)
        return first.token_ids[:began], last.token_ids[began:]

    def follow(self, prompt: Sequence[int]) -> Continuation | Comparison:
        """The continuation by the next turn's prompt. A `Comparison` if only the prompt's text can decide."""
        if not self.segments:
            return Continuation("first", prompt)
        known = self.segments[-1].token_ids
        at = _first_difference(known, prompt)
        if at == len(known):
            return Continuation("extended", prompt)
        return Comparison(known[:], prompt, at, self._num_before, self._sent)

    def add(
        self, turn: Turn, prompt: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float] | None, text: str
    ) -> None:
        """Record a finished turn, whose prompt continued the turns before as `turn.history` says."""
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


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prompt whose tokens differ from those of the turns before, so that its text has to be compared. It holds
    copies."""

    known: array[int]
    """Tokens of the turns before."""
    prompt: Sequence[int]
    at: int
    """Position of the first token that differs."""
    num_before: int
    """Number of tokens of the last prompt."""
    sent: str
    """Text of the last answer, as its client got it."""

    def continuation(self, decode: Decode) -> Continuation:
        """Compare both texts, from the token before the first difference as far as they are the same."""
        start = max(0, self.at - 1)
        known, asked = _Text(self.known, start, decode), _Text(self.prompt, start, decode)
        rest, more = _differ(known, asked)
        if not rest and asked.piece and known.is_whole:
            num_same = asked.num_tokens(asked.piece[: len(asked.piece) - len(more)])
            if num_same is not None:
                return Continuation("mended", [*self.known, *self.prompt[start + num_same :]])
        if not _differ(*map(_without_spaces, self._texts(decode)))[0]:
            return Continuation("reformatted", self.prompt)
        return Continuation("rewritten", self.prompt, self._shown_difference(decode))

    def _texts(self, decode: Decode) -> tuple[Iterator[str], Iterator[str]]:
        """The known text and the client's text, from a token on before which they are the same."""
        start = max(0, min(self.at - 1, self.num_before))
        told = _Text(self.known[: self.num_before], start, decode)
        return chain(told, filter(None, [self.sent])), _Text(self.prompt, start, decode)

    def _shown_difference(self, decode: Decode) -> str:
        texts = self._texts(decode)
        rests = _differ(*texts)
        was, has = ((rest + next(text, ""))[:MAX_SHOWN_CHARS] for rest, text in zip(rests, texts, strict=True))
        return f"token {self.at} of its prompt or later: it was {was!r}, the request has {has!r}"


def _num_given(segment: Segment) -> int:
    """Number of tokens before the first one that the policy generated."""
    at = segment.mask.find(b"\1")
    return len(segment.mask) if at < 0 else at


def _first_difference(known: array[int], prompt: Sequence[int]) -> int:
    """Number of tokens that are the same from the beginning."""
    num = min(len(known), len(prompt))
    for begin in range(0, num, PIECE_TOKENS):
        ours, theirs = known[begin : min(num, begin + PIECE_TOKENS)].tolist(), prompt[begin : begin + PIECE_TOKENS]
        if ours != theirs[: len(ours)]:
            return begin + next(at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    return num


class _Text(Iterator[str]):
    """The text of tokens from `start` on, in pieces that are decoded on demand.

    A piece is decoded with some tokens before it, since a tokenizer may leave out a space where a text begins. It ends
    where later tokens do not change it, so never inside a character of several tokens.
    """

    def __init__(self, tokens: Sequence[int], start: int, decode: Decode) -> None:
        self._tokens, self._start, self._decode = tokens, start, decode
        self._begin = self._end = start
        self._before = self._after = ""
        """Texts of the overlaps before the newest piece and at its end."""
        self.piece = ""
        """The newest piece."""
        self.is_whole = True
        """True if the text so far has whole characters only."""

    def __next__(self) -> str:
        self.piece = ""
        while not self.piece:
            if self._end >= len(self._tokens):
                raise StopIteration
            self._begin, self._before = self._end, self._after
            self._end, self._after = self._cut(self._end + PIECE_TOKENS)
            self.piece = self._up_to(self._end)
        self.is_whole &= NO_CHARACTER not in self.piece
        return self.piece

    def num_tokens(self, text: str) -> int | None:
        """Fewest tokens after `start` with which the newest piece's beginning is `text`. None if no number of tokens
        gives it."""
        ends = range(self._begin, self._end + 1)
        end = ends[bisect_left(ends[:-1], len(text), key=lambda end: len(self._up_to(end)))]
        return end - self._start if self._up_to(end) == text else None

    def _up_to(self, end: int) -> str:
        """Text of the newest piece, up to token `end`."""
        return self._decode(self._tokens[self._overlap(self._begin) : end])[len(self._before) :]

    def _overlap(self, at: int) -> int:
        return max(self._start, at - OVERLAP_TOKENS)

    def _cut(self, first: int) -> tuple[int, str]:
        """The first position from `first` on where a piece may end, and the text of the overlap before it."""
        text = ""
        for end in range(first, first + OVERLAP_TOKENS):
            if end >= len(self._tokens):
                return len(self._tokens), ""
            before = self._overlap(end)
            text = self._decode(self._tokens[before:end])
            longer = self._decode(self._tokens[before : end + OVERLAP_TOKENS])
            if not text.endswith(NO_CHARACTER) and longer.startswith(text):
                return end, text
        return end, text


def _differ(said: Iterator[str], asked: Iterator[str]) -> tuple[str, str]:
    """Read two texts until one has ended or they differ. Returns the rest of each that was read.

    An empty rest means that this text has ended, or that nothing more of it was read.
    """
    ours = theirs = ""
    while ours := ours or next(said, ""):
        if not (theirs := theirs or next(asked, "")):
            return ours, ""
        num = min(len(ours), len(theirs))
        if ours[:num] != theirs[:num]:
            at = next(at for at in range(num) if ours[at] != theirs[at])
            return ours[at:], theirs[at:]
        ours, theirs = ours[num:], theirs[num:]
    return "", theirs


def _without_spaces(pieces: Iterable[str]) -> Iterator[str]:
    return filter(None, ("".join(piece.split()) for piece in pieces))

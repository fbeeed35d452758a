"""What a session has become: tokens as the engine saw them, with a mask of those that the policy generated.

Invariant: the tokens of a segment are the prompt of its last turn and what that generated, so that each was seen after
exactly those before it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

History = Literal["first", "extended", "mended", "reformatted", "rewritten"]
"""How a turn's prompt goes on from the turn before.

extended     it begins with the tokens that were there
mended       its text does, in other tokens: these were replaced by those that were there
reformatted  its text does, but for white space or a stop string: a new segment begins
rewritten    it tells another history: a new segment begins, where the group allows it
"""
MAX_SHOWN_CHARS = 40
PIECE_TOKENS = 256
"""Tokens decoded at once: a tokenizer may keep the interpreter's lock while it decodes."""
OVERLAP_TOKENS = 8
"""Tokens decoded again with the next piece: more than one character takes."""
NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What bytes that are no whole character are decoded to."""
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
    weight_versions: Sequence[dict[str, Any]] = ()
    """Spans `{"version", "start", "end"}` over the tokens that it generated."""


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

    def follow(self, prompt: Sequence[int]) -> Continuation | Comparison:
        """How the next turn's prompt goes on; a comparison where only its text can say."""
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


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prompt in other tokens than the turns before, whose text says how it goes on. It shares nothing with them."""

    known: array[int]
    """Tokens of the turns before."""
    prompt: Sequence[int]
    at: int
    """The first token that differs."""
    num_before: int
    """Tokens of the last prompt."""
    sent: str
    """The text of the last answer, as its client got it."""

    def continuation(self, decode: Decode) -> Continuation:
        """Reads both texts from the token before the first that differs, as far as they are the same."""
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
        """What the client was told, and what it has sent, from a token on before which they are the same."""
        start = max(0, min(self.at - 1, self.num_before))
        told = _Text(self.known[: self.num_before], start, decode)
        return chain(told, filter(None, [self.sent])), _Text(self.prompt, start, decode)

    def _shown_difference(self, decode: Decode) -> str:
        texts = self._texts(decode)
        rests = _differ(*texts)
        was, has = ((rest + next(text, ""))[:MAX_SHOWN_CHARS] for rest, text in zip(rests, texts, strict=True))
        return f"token {self.at} of its prompt or later: it was {was!r}, the request has {has!r}"


def _num_given(segment: Segment) -> int:
    """Tokens before the first one that the policy generated."""
    at = segment.mask.find(b"\1")
    return len(segment.mask) if at < 0 else at


def _first_difference(known: array[int], prompt: Sequence[int]) -> int:
    """How many tokens are the same from the beginning."""
    num = min(len(known), len(prompt))
    for begin in range(0, num, PIECE_TOKENS):
        ours, theirs = known[begin : min(num, begin + PIECE_TOKENS)].tolist(), prompt[begin : begin + PIECE_TOKENS]
        if ours != theirs[: len(ours)]:
            return begin + next(at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    return num


class _Text(Iterator[str]):
    """The text of tokens from `start` on, piece by piece: each is decoded when it is asked for.

    A piece is decoded with some tokens before it, since a tokenizer may leave out a space where a text begins. It ends
    where the tokens after it change nothing of it, so not within a character of several tokens.
    """

    def __init__(self, tokens: Sequence[int], start: int, decode: Decode) -> None:
        self._tokens, self._start, self._decode = tokens, start, decode
        self._begin = self._end = start
        self._before = self._after = ""
        """Texts of the overlaps before the newest piece and at its end."""
        self.piece = ""
        """The newest one."""
        self.is_whole = True
        """Each character so far is one."""

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
        """The fewest tokens after `start` with which the newest piece's beginning is `text`; None where none are."""
        ends = range(self._begin, self._end + 1)
        end = ends[bisect_left(ends[:-1], len(text), key=lambda end: len(self._up_to(end)))]
        return end - self._start if self._up_to(end) == text else None

    def _up_to(self, end: int) -> str:
        """The newest piece's text, as far as these tokens."""
        return self._decode(self._tokens[self._overlap(self._begin) : end])[len(self._before) :]

    def _overlap(self, at: int) -> int:
        return max(self._start, at - OVERLAP_TOKENS)

    def _cut(self, first: int) -> tuple[int, str]:
        """The first place from there on where a piece may end, and the text of the overlap before it."""
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
    """Read two texts until one has ended or they differ. Returns what was read of each from there on; an empty text has
    ended, or nothing more of it was read."""
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

"""Reads a judge's answer as a reward: a word or number in its text, or the probabilities of some tokens.

Invariant: a verdict is a finite number. Without one, a ValueError says why.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
import regex

from vllm_rollout.checks import shown
from vllm_rollout.config import MAX_REWARD
from vllm_rollout.kernel.rules.rewards import Grade

SEARCH_LENGTH = 4096
"""Last characters of a text that are searched: verdicts stand at the end."""
PATTERN_S = 1.0
"""CPU seconds for one text. The policy influences the judge's text: `(a+)+$` could search for ever."""
MAX_LOGPROB = 1e-3
"""Largest log probability: zero but for rounding."""


class PatternVerdict:
    """Verdict from the only group of the pattern's last match: a number, or a word of `values`.

    Raises: ValueError for an invalid pattern.
    """

    def __init__(self, pattern: str, values: Mapping[str, float] | None) -> None:
        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"pattern: is no regular expression ({error}), got {shown(pattern)}") from error
        if self._pattern.groups != 1:
            raise ValueError(
                f"pattern: must have one group, around the verdict, got {self._pattern.groups} in {shown(pattern)}; "
                "(?:…) groups without counting"
            )
        self._values = None if values is None else _named("values", values)

    async def of(self, text: str | None) -> Grade:
        try:
            word = await asyncio.to_thread(self._last, text or "")
        except TimeoutError:
            raise ValueError(f"its pattern takes more than {PATTERN_S:g} s for {shown((text or '')[-60:])}") from None
        if word is None:
            raise ValueError(f"no verdict: its pattern is not in {shown((text or '')[-60:])}")
        if self._values is None:
            return Grade("ok", _number(word))
        if word.strip().casefold() not in self._values:
            raise ValueError(f"no verdict: {shown(word)} is none of {', '.join(self._values)}")
        return Grade("ok", self._values[word.strip().casefold()])

    def _last(self, text: str) -> str | None:
        # concurrent: the search lets go of the interpreter's lock, so that the event loop goes on.
        found = self._pattern.finditer(text[-SEARCH_LENGTH:], concurrent=True, timeout=PATTERN_S)
        matches = deque((match[1] for match in found if match[1] is not None), maxlen=1)
        return matches[0] if matches else None


class ChoiceVerdict:
    """Verdict from next-token probabilities: the mean of the choices' rewards, weighted by probability among the
    choices.

    Spaces around a token and its case do not count. A choice that is not among the likeliest tokens has probability 0.
    """

    def __init__(self, choices: Mapping[str, float]) -> None:
        self._choices = _named("choices", choices)

    def of(self, logprobs: list[tuple[str, float]]) -> Grade:
        """`logprobs`: (token, log probability) of the likeliest next tokens."""
        weights = dict.fromkeys(self._choices, 0.0)
        for token, logprob in logprobs:
            if not logprob <= MAX_LOGPROB:
                raise ValueError(f"no verdict: {shown(logprob)} is no log probability")
            name = token.strip().casefold()
            if name in weights:
                weights[name] += math.exp(logprob)
        total = sum(weights.values())
        if not total:
            said = shown([token for token, _ in logprobs])
            raise ValueError(f"no verdict: none of {', '.join(weights)} is among its likeliest tokens {said}")
        shares = {name: weight / total for name, weight in weights.items()}
        return Grade("ok", sum(shares[name] * self._choices[name] for name in shares), parts=shares)


class _Message(msgspec.Struct):
    content: str | None = None


class _Likely(msgspec.Struct):
    token: str
    logprob: float


class _Token(msgspec.Struct):
    top_logprobs: list[_Likely]


class _ChatLogprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _ChatChoice(msgspec.Struct):
    message: _Message
    logprobs: _ChatLogprobs | None = None


class _Chat(msgspec.Struct):
    choices: list[_ChatChoice]


class _TextLogprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float]] | None = None


class _TextChoice(msgspec.Struct):
    text: str
    logprobs: _TextLogprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_TextChoice]


class Said(msgspec.Struct, frozen=True):
    """An OpenAI-compatible answer, of either endpoint."""

    text: str | None
    logprobs: list[tuple[str, float]]
    """The likeliest first tokens with their log probabilities. Empty if the answer has none."""

    @classmethod
    def by_chat(cls, answer: Any) -> Said:
        """Read the answer of a chat. Raises: ValueError for any other answer."""
        first = _first(answer, _Chat)
        tokens = first.logprobs.content if first.logprobs and first.logprobs.content else []
        return cls(first.message.content, [(each.token, each.logprob) for t in tokens[:1] for each in t.top_logprobs])

    @classmethod
    def by_completion(cls, answer: Any) -> Said:
        first = _first(answer, _Completion)
        tokens = first.logprobs.top_logprobs if first.logprobs and first.logprobs.top_logprobs else []
        return cls(first.text, list(tokens[0].items()) if tokens else [])


def _first(answer: Any, kind: type[_Chat] | type[_Completion]) -> Any:
    try:
        choices = msgspec.convert(answer, kind).choices
    except msgspec.ValidationError as error:
        raise ValueError(f"it answered what is no OpenAI answer: {error}") from error
    if not choices:
        raise ValueError("it answered with no choice")
    return choices[0]


def _named(where: str, rewards: Mapping[str, float]) -> dict[str, float]:
    """Rewards by word, in lower case and without spaces around it. Raises: ValueError."""
    known = {name.strip().casefold(): reward for name, reward in rewards.items()}
    if not known or len(known) < len(rewards):
        raise ValueError(
            f"{where}: must name words that differ in more than case and spaces, got {shown(dict(rewards))}"
        )
    for name, reward in known.items():
        if not abs(reward) <= MAX_REWARD:
            raise ValueError(f"{where}: a reward must be a finite number up to {MAX_REWARD:g}, got {reward} for {name}")
    return known


def _number(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        raise ValueError(
            f"no verdict: {shown(word)} is no finite number up to {MAX_REWARD:g}; say values = {{…}} for words"
        )
    return number

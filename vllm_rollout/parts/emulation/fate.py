"""The outcome of an emulated candidate: its length, success and early score.

Invariant: the outcome is a function of the settings, the prompt and the candidate's key. The key is the sampling seed,
or the request id if there is no seed. With a trace it also depends on the order in which prompts come.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from statistics import NormalDist
from struct import Struct
from typing import Any, NamedTuple

from vllm_rollout.adapter.arguments import ArgumentError
from vllm_rollout.kernel.rules.prompt_key import KEY_OF_TOKENS, digest_of
from vllm_rollout.parts.emulation.settings import LogNormal, Settings, Success, traced_prompts
from vllm_rollout.parts.shaping.rules.trace import TracedPrompt

LENGTHS_FIELD = "emulate_lengths"
"""Field of `extra_args` (`vllm_xargs`) with the number of output tokens. A list has one number for each candidate, by
its index. If the list is too short, it begins again."""
PROMPT_FIELD = "emulate_prompt"
"""Field of `extra_args` with the name of the prompt in the trace."""
ENDLESS = 2**62
"""Length of a candidate that does not end by itself."""
STANDARD = NormalDist()
_FOUR = Struct("<4Q")


class Fate(NamedTuple):
    length: int
    """Output tokens. The last one ends the sequence."""
    succeeds: bool
    score: float
    """About 0, with standard deviation 1 among those that succeed and among those that do not."""
    salt: int
    """Source of everything else that is made up of this candidate."""
    asks: bool = False
    """True for a turn that asks for a tool, so that its conversation goes on."""


def forced_length(extra_args: Mapping[str, Any], index: int | None = None) -> int | None:
    """The length that a request asks for, or None.

    Raises: ArgumentError with name, value and what is allowed.
    """
    if (wanted := extra_args.get(LENGTHS_FIELD)) is None:
        return None
    lengths = wanted if isinstance(wanted, list) else [wanted]
    if not lengths or any(type(length) is not int or length < 1 for length in lengths):
        raise ArgumentError(
            LENGTHS_FIELD, f"must be a number of tokens, 1 or more, or a list of such numbers, got {wanted!r:.60}"
        )
    length: int = lengths[(index or 0) % len(lengths)]
    return length


def chances(*key: object) -> tuple[float, ...]:
    """Four numbers in (0, 1) that follow from a key."""
    digest = blake2b(repr(key).encode(), digest_size=_FOUR.size).digest()
    return tuple((number + 0.5) / 2**64 if number < 2**64 - 2**11 else 1 - 2**-53 for number in _FOUR.unpack(digest))


class Fates:
    """Draws fates. `rank` of `num_ranks`: where and how far this engine steps through a trace's prompts."""

    def __init__(self, settings: Settings, rank: int = 0, num_ranks: int = 1) -> None:
        self._seed = settings.seed
        self._success = settings.success
        self._turns = settings.turns
        self._distance = math.sqrt(2) * STANDARD.inv_cdf(settings.score.auc)
        """Distance between the mean scores of candidates that succeed and of others. The wanted AUC follows from it."""
        if settings.lengths.trace is not None:
            prompts = traced_prompts(settings.lengths.trace)
            self._lengths: DrawnLengths | TracedLengths = TracedLengths(prompts, rank, num_ranks)
        else:
            self._lengths = DrawnLengths(settings.lengths.log_normal or LogNormal())

    def of(
        self, prompt_token_ids: Sequence[int], key: object, index: int | None, extra_args: Mapping[str, Any]
    ) -> Fate:
        """Raises: ValueError for a length that is asked for and cannot be."""
        prompt = digest_of(prompt_token_ids)
        of_prompt = chances(self._seed, prompt)
        own = chances(self._seed, prompt, key)
        length = forced_length(extra_args, index)
        if length is None:
            length = self._lengths.of(prompt, str(extra_args.get(PROMPT_FIELD, "")), index, of_prompt[0], own[0])
        succeeds = own[1] < success_rate(self._success, length, of_prompt[1])
        score = STANDARD.inv_cdf(own[2]) + self._distance * (0.5 if succeeds else -0.5)
        asks = self._turns is not None and chances(self._seed, prompt, key, "turn")[0] >= 1 / self._turns.mean
        return Fate(length, succeeds, score, int(own[3] * 2**53), asks)


def success_rate(success: Success, length: int, prompt_chance: float) -> float:
    if success.rate in (0.0, 1.0):
        return success.rate
    log_odds = math.log(success.rate / (1 - success.rate)) + success.prompt_sigma * STANDARD.inv_cdf(prompt_chance)
    log_odds += success.log_odds_per_doubling * math.log2(length / success.reference_length)
    return 1 / (1 + math.exp(-max(-700.0, min(700.0, log_odds))))


class DrawnLengths:
    def __init__(self, distribution: LogNormal) -> None:
        its = self._its = distribution
        self._median = math.log(its.mean) - (its.sigma**2 + its.prompt_sigma**2) / 2

    def of(self, prompt: str, name: str, index: int | None, prompt_chance: float, chance: float) -> int:
        its = self._its
        log_length = self._median + its.prompt_sigma * STANDARD.inv_cdf(prompt_chance)
        log_length += its.sigma * STANDARD.inv_cdf(chance)
        return max(1, min(round(math.exp(min(log_length, 40.0))), its.cap or ENDLESS))


class TracedLengths:
    """Recorded lengths by prompt. A prompt is found by its digest or its name (`PROMPT_FIELD`). An unknown prompt takes
    the next one in turn, and keeps it. Ranks take different ones at a time, and each takes all of them in time."""

    def __init__(self, prompts: Sequence[TracedPrompt], rank: int, num_ranks: int) -> None:
        self._prompts = [lengths_of(prompt) for prompt in prompts]
        # If a prompt was recorded several times, the row with the most whole answers counts, the newest of equals.
        rows = sorted(range(len(prompts)), key=lambda row: sum(not c.is_stopped for c in prompts[row].candidates))
        self._known = {prompts[row].history_key.removeprefix(KEY_OF_TOKENS): row for row in rows}
        self._known |= {prompts[row].id: row for row in rows}
        self._rank, self._stride = rank, num_ranks
        self._period = len(prompts) // math.gcd(num_ranks, len(prompts))
        """Turns after which a rank would come to where it began."""
        self._num_turns = 0
        self._seen: defaultdict[str, int] = defaultdict(int)
        """Candidates that came without an index, by prompt."""

    def of(self, prompt: str, name: str, index: int | None, prompt_chance: float, chance: float) -> int:
        row = self._known.get(name or prompt, self._known.get(prompt))
        if row is None:
            place = self._rank + self._num_turns * self._stride + self._num_turns // self._period
            row = self._known[prompt] = place % len(self._prompts)
            self._num_turns += 1
        if index is None:
            index = self._seen[prompt]
            self._seen[prompt] += 1
        lengths = self._prompts[row]
        return lengths[index % len(lengths)]


def lengths_of(prompt: TracedPrompt) -> list[int]:
    """The lengths of a prompt's candidates. Stopped candidates count only if there are no others, since their full
    length is not known."""
    candidates = [candidate for candidate in prompt.candidates if candidate.num_tokens]
    known = [candidate for candidate in candidates if not candidate.is_stopped]
    return [ENDLESS if c.end == "length" else c.num_tokens for c in known or candidates] or [1]

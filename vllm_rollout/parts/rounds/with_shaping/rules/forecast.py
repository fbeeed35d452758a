"""Forecasts the time of a round at each tensor-parallel size, and chooses the size to begin with.

A small size may have too little KV cache for the round, so that candidates are preempted.

Invariant: if the KV cache holds all candidates, and all are wanted, a forecast is `cost.rollout_time` without
preemptions.

Source: RollPacker section 4.2: optimal sizes are profiled, and are those of the beginning. The choice of a size from
profiles is ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from vllm_rollout.parts.rounds.rules.planner import SLOWER
from vllm_rollout.parts.shaping.rules.cost import CostModel, log_normal_lengths

KV_BLOCK_TOKENS = 16
"""Free tokens per candidate that an admission leaves for the next blocks, so that it is not preempted at once."""
EXPECTED_SHARE = 1 / 8
"""Mean length over `max_tokens`, before any is measured.

Source: RollPacker section 2.2, a P75 of 755 to 1,100 tokens where 8k to 32k are allowed. The larger share is used,
since missing KV cache costs more than unused KV cache.
"""
EXPECTED_DEVIATION = 1.3
"""Standard deviation over mean, before it is measured: that of a log-normal distribution with sigma 1.

Source: RollPacker section 2.2.
"""


class Forecast(NamedTuple):
    seconds: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class EngineSize:
    """An engine at one tensor-parallel size."""

    cost: CostModel
    kv_tokens: int
    """Capacity of its KV cache, in tokens."""


@dataclass(frozen=True, slots=True)
class ExpectedRound:
    """Candidates that start together, in this order."""

    lengths: Sequence[int]
    """Output tokens of each candidate."""
    num_wanted: int
    """Ended candidates that end the round: at least 1, at most all of them."""
    prompt_tokens: int = 0
    group_size: int = 1
    """Siblings that share a prompt's KV."""


@dataclass(frozen=True, slots=True)
class StartChoice:
    """The tensor-parallel size to begin with, and the forecast for each size."""

    size: int
    forecasts: Mapping[int, Forecast]

    def __str__(self) -> str:
        said = [
            f"{size}: {expected.seconds:.3g} s and {expected.num_preemptions} preemptions"
            for size, expected in sorted(self.forecasts.items())
        ]
        return "; ".join(said)


def expected_round(
    num_candidates: int,
    num_wanted: int,
    max_tokens: int,
    *,
    mean_tokens: float | None = None,
    std_tokens: float | None = None,
    prompt_tokens: int = 0,
    group_size: int = 1,
) -> ExpectedRound:
    """A round whose lengths are quantiles of a log-normal distribution, cut at `max_tokens`.

    Args:
        mean_tokens: of measured lengths. None: `EXPECTED_SHARE` of `max_tokens`.
    """
    mean = max(1.0, EXPECTED_SHARE * max_tokens) if mean_tokens is None else mean_tokens
    std = EXPECTED_DEVIATION * mean if std_tokens is None else std_tokens
    lengths = log_normal_lengths(mean, std, num_candidates, max_tokens)
    return ExpectedRound(lengths, num_wanted, prompt_tokens, group_size)


def choose_start(engines: Mapping[int, EngineSize], expected: ExpectedRound) -> StartChoice:
    """The smallest size at which the round takes at most `SLOWER` times as long as at the best size."""
    forecasts = {size: forecast(engine, expected) for size, engine in engines.items()}
    best_s = min(each.seconds for each in forecasts.values())
    return StartChoice(min(size for size, each in forecasts.items() if each.seconds <= SLOWER * best_s), forecasts)


def forecast(engine: EngineSize, expected: ExpectedRound) -> Forecast:
    """Seconds and preemptions of a round, as vLLM schedules it: first come, first served.

    When the KV cache is full, the candidate admitted last waits, first in line, and all of its tokens are computed
    again.
    """
    lengths, prompt, cost = expected.lengths, expected.prompt_tokens, engine.cost
    kv_prompt = prompt / expected.group_size
    slots = cost.max_num_seqs or len(lengths)
    waiting = deque(candidate for candidate, length in enumerate(lengths) if length > 0)
    num_over = len(lengths) - len(waiting)
    num_tokens = [0] * len(lengths)
    """Output tokens of waiting candidates."""
    starts: dict[int, int] = {}
    """Step at which each running candidate would have begun without its waits, in the order of admission."""
    ends: list[tuple[int, int]] = []
    step = start_sum = num_preemptions = 0
    seconds = 0.0

    def kv_tokens(at_step: int) -> float:
        return len(starts) * (kv_prompt + at_step) - start_sum

    def leave(candidate: int) -> None:
        nonlocal start_sum
        start_sum -= starts.pop(candidate)

    while num_over < expected.num_wanted:
        while len(starts) > 1 and kv_tokens(step + 1) > engine.kv_tokens:
            candidate = next(reversed(starts))
            num_tokens[candidate] = step - starts[candidate]
            leave(candidate)
            waiting.appendleft(candidate)
            num_preemptions += 1
        prefill_tokens, num_before = 0.0, len(starts)
        while waiting and len(starts) < slots:
            candidate = waiting[0]
            needed = kv_prompt + num_tokens[candidate] + (len(starts) + 1) * KV_BLOCK_TOKENS
            if starts and kv_tokens(step) + needed > engine.kv_tokens:
                break
            waiting.popleft()
            starts[candidate] = step - num_tokens[candidate]
            start_sum += starts[candidate]
            heappush(ends, (starts[candidate] + lengths[candidate], candidate))
            prefill_tokens += kv_prompt + num_tokens[candidate]
        if len(starts) > num_before:
            seconds += cost.step_prefill_s + prefill_tokens * cost.prefill_s_per_token
        while ends[0][1] not in starts or ends[0][0] != starts[ends[0][1]] + lengths[ends[0][1]]:
            heappop(ends)  # it was preempted
        batch_size = len(starts)
        full = inf if batch_size == 1 else (engine.kv_tokens - kv_tokens(0)) // batch_size
        to_step = int(min(ends[0][0], max(full, step + 1)))
        context = prompt + step - start_sum / batch_size
        seconds += cost.decode_time(batch_size, context, to_step - step)
        step = to_step
        while ends and ends[0][0] <= step:
            end, candidate = heappop(ends)
            if candidate in starts and starts[candidate] + lengths[candidate] == end:
                leave(candidate)
                num_over += 1
    return Forecast(seconds, num_preemptions)

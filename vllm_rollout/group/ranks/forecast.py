"""What a round will take at a tensor-parallel size whose KV cache may be too small for it, and at which size to begin.

Invariant: with room for everybody, and all candidates wanted, a forecast is `cost.rollout_time` without preemptions.

Source: RollPacker section 4.2: optimal sizes are profiled, and are those of the beginning. How one is chosen from a
profile is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from vllm_rollout.group.lengths.cost import CostModel, log_normal_lengths

SLOWER = 1.05
"""Times in this ratio count as the same: profiles predict rollouts with a median error of 1.3 %, at most 6.7 %
(docs/results.md). Of sizes that are the same the smallest is taken."""
KV_BLOCK_TOKENS = 16
"""Room that is left for everybody's next block when a candidate is admitted, so that it is not preempted at once."""
EXPECTED_SHARE = 1 / 8
"""Mean length over `max_tokens`, before any is known. Source: RollPacker section 2.2, a P75 of 755 to 1,100 tokens
where 8k to 32k are allowed; the larger share, since room that is missing costs more than room that is left."""
EXPECTED_DEVIATION = 1.3
"""Standard deviation over mean, before it is known: of a log-normal distribution with sigma 1. Source: the same."""


class Forecast(NamedTuple):
    seconds: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class EngineSize:
    """An engine at one tensor-parallel size."""

    cost: CostModel
    kv_tokens: int
    """Tokens that its KV cache holds."""


@dataclass(frozen=True, slots=True)
class ExpectedRound:
    """Candidates that start together, in this order."""

    lengths: Sequence[int]
    """Output tokens."""
    num_wanted: int
    """The round is over when so many have ended; 1 or more, and no more than there are."""
    prompt_tokens: int = 0
    group_size: int = 1
    """Siblings that share a prompt's KV."""


@dataclass(frozen=True, slots=True)
class StartChoice:
    """Where to begin, and what was expected of each size."""

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
        mean_tokens: of lengths that were seen; `EXPECTED_SHARE` of `max_tokens` when none was.
    """
    mean = max(1.0, EXPECTED_SHARE * max_tokens) if mean_tokens is None else mean_tokens
    std = EXPECTED_DEVIATION * mean if std_tokens is None else std_tokens
    lengths = log_normal_lengths(mean, std, num_candidates, max_tokens)
    return ExpectedRound(lengths, num_wanted, prompt_tokens, group_size)


def choose_start(engines: Mapping[int, EngineSize], expected: ExpectedRound) -> StartChoice:
    """The smallest size at which the round takes at most `SLOWER` times as long as at the best."""
    forecasts = {size: forecast(engine, expected) for size, engine in engines.items()}
    best_s = min(each.seconds for each in forecasts.values())
    return StartChoice(min(size for size, each in forecasts.items() if each.seconds <= SLOWER * best_s), forecasts)


def forecast(engine: EngineSize, expected: ExpectedRound) -> Forecast:
    """Seconds and preemptions of a round, as vLLM schedules it: first come, first served; when the KV cache is full the
    last admitted waits, first in line, and all that it has is computed again."""
    lengths, prompt, cost = expected.lengths, expected.prompt_tokens, engine.cost
    kv_prompt = prompt / expected.group_size
    slots = cost.max_num_seqs or len(lengths)
    waiting = deque(candidate for candidate, length in enumerate(lengths) if length > 0)
    num_over = len(lengths) - len(waiting)
    num_tokens = [0] * len(lengths)
    """Output tokens of those that wait."""
    starts: dict[int, int] = {}
    """Step at which each that runs would have begun, had it never waited; in the order of admission."""
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

"""How long a candidate will go on: on average, and when it goes on for long.

Invariant: at least one token, and never beyond `max_tokens`.

With a history: the mean of a log-normal length given that it is longer than what there is (mean residual life). Without
one: as long again as it has lived. That is the mean residual life of a Pareto tail with exponent 2: under heavy tails,
such as those of lengths, who is old still has long to live.

An average of many ends is no bound on the last of them, and whoever shares its steps with others waits for each of them
to end. So `late_remaining` says what one candidate of twenty exceeds, by the same two distributions.
"""

from __future__ import annotations

import math

from vllm_rollout.group.censoring import LogLengthFit, bounded_log_std, expected_length, length_beyond
from vllm_rollout.group.moments import LengthMoments

LATE_SHARE = 0.05
"""Of candidates that go on for longer than is called late."""


def expected_remaining(num_tokens: int, lengths: LengthMoments | None = None, max_tokens: int | None = None) -> float:
    """Output tokens still to come of a candidate that has `num_tokens` and runs.

    lengths: of its prompt; else of the data set; None before anything was seen.
    """
    if lengths is None:
        remaining = float(num_tokens)
    else:
        remaining = expected_length(_log_normal(lengths), num_tokens) - num_tokens
    return _bounded(remaining, num_tokens, max_tokens)


def late_remaining(num_tokens: int, lengths: LengthMoments | None = None, max_tokens: int | None = None) -> float:
    """What `LATE_SHARE` of such candidates exceed."""
    if lengths is None:
        remaining = num_tokens * (LATE_SHARE**-0.5 - 1)
    else:
        remaining = length_beyond(_log_normal(lengths), num_tokens, LATE_SHARE) - num_tokens
    return _bounded(remaining, num_tokens, max_tokens)


def _bounded(remaining: float, num_tokens: int, max_tokens: int | None) -> float:
    most = math.inf if max_tokens is None else max_tokens - num_tokens
    return max(1.0, min(remaining, most))


def _log_normal(lengths: LengthMoments) -> LogLengthFit:
    mean = max(lengths.mean, 1.0)
    std = bounded_log_std(math.sqrt(math.log1p(lengths.variance / mean**2)))
    return LogLengthFit(math.log(mean) - std**2 / 2, std, 0.0)

"""How long a candidate will go on.

Invariant: at least one token, and never beyond `max_tokens`.

With a history: the mean of a log-normal length given that it is longer than what there is (mean residual life). Without
one: as long again as it has lived. That is the mean residual life of a Pareto tail with exponent 2: under heavy tails,
such as those of lengths, who is old still has long to live.
"""

from __future__ import annotations

import math

from vllm_rollout.group.censoring import LogLengthFit, bounded_log_std, expected_length
from vllm_rollout.group.moments import LengthMoments


def expected_remaining(num_tokens: int, lengths: LengthMoments | None = None, max_tokens: int | None = None) -> float:
    """Output tokens still to come of a candidate that has `num_tokens` and runs.

    lengths: of its prompt; else of the data set; None before anything was seen.
    """
    if lengths is None:
        remaining = float(num_tokens)
    else:
        remaining = expected_length(_log_normal(lengths), num_tokens) - num_tokens
    most = math.inf if max_tokens is None else max_tokens - num_tokens
    return max(1.0, min(remaining, most))


def _log_normal(lengths: LengthMoments) -> LogLengthFit:
    mean = max(lengths.mean, 1.0)
    std = bounded_log_std(math.sqrt(math.log1p(lengths.variance / mean**2)))
    return LogLengthFit(math.log(mean) - std**2 / 2, std, 0.0)

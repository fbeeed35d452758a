"""Lengths beyond a stop. Invariant: a drawn length is longer than what was seen of the candidate."""

from __future__ import annotations

import math
from statistics import NormalDist

from vllm_rollout.group.censoring import LogLengthFit

FAR = 20.0
"""Standard deviations beyond which the normal tail is taken as its asymptote."""
MAX_LOG_TOKENS = 700.0


def length_beyond(fit: LogLengthFit, num_tokens: int, uniform: float) -> int:
    """Of log-normal lengths above `num_tokens`, the one that a share of `uniform`, in (0, 1), exceeds."""
    if num_tokens <= 0:
        z = -NormalDist().inv_cdf(uniform)
    else:
        z = (math.log(num_tokens) - fit.location) / fit.std
        if z < FAR:
            z = -NormalDist().inv_cdf(uniform * 0.5 * math.erfc(z / math.sqrt(2)))
        else:
            z -= math.log(uniform) / z
    length = math.exp(min(fit.location + fit.std * z, MAX_LOG_TOKENS))
    return max(num_tokens + 1, round(length))

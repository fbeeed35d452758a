"""Draws survivors by their survival probabilities.

The number of survivors varies as little as possible. Pairs are *not* kept with p_i p_j: of two siblings at 1/2 one is
kept, never both. A sum over survivors weighted by 1 / p_i is unbiased. A product of two siblings (a leave-one-out
baseline, an unbiased variance) is not.

Invariant: every reported probability is the one with which the candidate was kept, and the floor `at_least` holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import fsum


@dataclass(frozen=True, slots=True)
class Survivors:
    """Survivors of one batch of siblings."""

    kept: frozenset[int]
    probabilities: dict[int, float]
    """Inclusion probabilities in force: the requested ones, raised if the floor demands it."""


def chance(seed: int, group: str, index: int) -> float:
    """A uniform number in [0, 1) that depends only on its arguments.

    It is a multiple of 2**-32, so that the addition of a small integer is exact.
    """
    digest = blake2b(f"{seed}:{index}:{group}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") * 2.0**-32


def choose_survivors(probabilities: Mapping[int, float], *, seed: int, group: str, at_least: int = 0) -> Survivors:
    """Decide on siblings that are due in the same step. At least `at_least` of them are kept.

    The probabilities are first raised until they sum to `at_least`. The raised ones are in force, and are reported.

    Siblings lie in random order on a line, each as long as its probability. A comb with a tooth at every unit falls on
    the line, and a sibling that a tooth hits is kept. Each is hit with exactly its probability. The number kept is the
    sum rounded down or up, so that the floor holds. A sibling alone is kept with one draw below p.
    """
    raised = _raise(probabilities, at_least)
    kept = _comb(raised, seed, group) if raised else ()
    return Survivors(frozenset(kept), raised)


def _comb(lengths: Mapping[int, float], seed: int, group: str) -> list[int]:
    """A systematic sample: each index with exactly its length as probability."""
    order = sorted(lengths, key=lambda index: (chance(seed, group, index), index))
    tooth = chance(seed, group, -1 - min(lengths))  # a separate draw: the order must not determine it
    hit = []
    end = 0.0
    for index in order:
        end += lengths[index]
        if tooth < end:
            hit.append(index)
            tooth += 1.0
    return hit


def _raise(probabilities: Mapping[int, float], at_least: int) -> dict[int, float]:
    """Raise all probabilities by the same shift, clipped at 1, so that their sum is at least `at_least`."""
    if at_least >= len(probabilities):
        return dict.fromkeys(probabilities, 1.0)
    rest = fsum(probabilities.values())
    if rest >= at_least:
        return dict(probabilities)
    shift = 0.0
    for num_certain, p in enumerate(sorted(probabilities.values(), reverse=True)):
        shift = (at_least - num_certain - rest) / (len(probabilities) - num_certain)
        if p + shift <= 1:
            break
        rest -= p
    return {index: min(1.0, p + shift) for index, p in probabilities.items()}

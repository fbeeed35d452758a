"""Survival probabilities -> survivors, by chance.

The number kept varies as little as it can. Pairs are *not* kept with p_i p_j: of two siblings at 1/2 one is kept, never
both. A sum over survivors weighted by 1 / p_i is unbiased; whatever multiplies two siblings (a leave-one-out baseline,
an unbiased variance) is not.

Invariant: every probability given out is the one the candidate was in fact kept with, and the floor `at_least` holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import fsum


@dataclass(frozen=True, slots=True)
class Survivors:
    """What became of one batch of siblings."""

    kept: frozenset[int]
    probabilities: dict[int, float]
    """Inclusion probabilities in force: those asked for, raised where the floor demanded it."""


def chance(seed: int, group: str, index: int) -> float:
    """A uniform number in [0, 1) that depends on nothing but its arguments.

    A multiple of 2**-32: adding a small integer to it is exact.
    """
    digest = blake2b(f"{seed}:{index}:{group}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") * 2.0**-32


def choose_survivors(probabilities: Mapping[int, float], *, seed: int, group: str, at_least: int = 0) -> Survivors:
    """Decide on siblings that are due in the same step; `at_least` of them are kept.

    The probabilities are first raised until they sum to `at_least`; those are reported, and the ones in force.

    Siblings in an order of chance lie side by side on a line, each as long as its probability, and a comb with teeth
    one apart falls on it; whoever is hit is kept. Each is hit with exactly its probability, and the number kept is the
    sum rounded down or up, so the floor cannot break. A sibling alone is kept with one draw below p.
    """
    raised = _raise(probabilities, at_least)
    kept = _comb(raised, seed, group) if raised else ()
    return Survivors(frozenset(kept), raised)


def _comb(lengths: Mapping[int, float], seed: int, group: str) -> list[int]:
    """A systematic sample: each index with exactly its length as probability."""
    order = sorted(lengths, key=lambda index: (chance(seed, group, index), index))
    tooth = chance(seed, group, -1 - min(lengths))  # a draw of its own: the order must not tell where the comb falls
    hit = []
    end = 0.0
    for index in order:
        end += lengths[index]
        if tooth < end:
            hit.append(index)
            tooth += 1.0
    return hit


def _raise(probabilities: Mapping[int, float], at_least: int) -> dict[int, float]:
    """The same shift for all, clipped at 1, so that the sum is `at_least` or more."""
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

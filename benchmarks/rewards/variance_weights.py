"""What a group that ends when it teaches weighs in GRPO's gradient: exactly, and with a policy of several tokens.

Exactly: rewards are 0 or 1 and candidates independent. For a zero-sum advantage A, E[sum A_i s_i] = w(p) grad p with
w(p) = E[sum A_i r_i] / (p (1 - p)), s_i a candidate's score function: any rule that looks at rewards in the order of
launch changes w and nothing else. `weights` enumerates w over the ends of a group.

With a policy: three tokens, of which one ends an answer of at most `MOST_TOKENS`; logits depend on place and previous
token. All 127 answers are enumerated, so that success rates and gradients are exact, and groups are drawn of them.

Invariant: the same numbers for the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from vllm_rollout.group.rewards.estimates import SMALLEST_STD, Estimator
from vllm_rollout.group.rewards.until import group_weight

MOST_TOKENS = 6
END, NUM_TOKENS = 2, 3
GROUPS, BATCHES = 20_000, 20
"""Groups of a batch, and batches, of which the noise is known."""
LEAST_CHANCE = 1e-12
"""Ends of an unlimited group that are rarer than this are left out."""


class End(NamedTuple):
    """A way in which a group ends."""

    chance: float
    num_graded: int
    num_right: int


def ends(rate: float, group_size: int, most: int | None) -> Iterator[End]:
    """All ends of a group of 0 and 1 at this success rate; most: `max_candidates`, None for no limit."""
    wrong = 1 - rate
    for right in range(1, group_size):
        yield End(math.comb(group_size, right) * rate**right * wrong ** (group_size - right), group_size, right)
    num = group_size
    while most is None or num < most:
        num += 1
        rare = rate * wrong ** (num - 1), wrong * rate ** (num - 1)
        if most is None and max(rare) < LEAST_CHANCE:
            return
        yield End(rare[0], num, 1)
        yield End(rare[1], num, num - 1)
    yield End(wrong**most, most, 0)
    yield End(rate**most, most, most)


def signal(estimator: Estimator, num: int, right: int) -> float:
    """sum A_i r_i of a group with so many rewards of 1: the closed form of `group/rewards/estimates.py`."""
    squares = right * (num - right) / num
    if not squares:
        return 0.0
    return squares * {"mean": 1.0, "rloo": num / (num - 1), "grpo": math.sqrt((num - 1) / squares)}[estimator]


def right_returned(end: End, group_size: int) -> int:
    """Rewards of 1 among the first `group_size - 1` and the one that differs; among the first `group_size` if none."""
    if end.num_graded == group_size:
        return end.num_right
    return {0: 0, 1: 1, end.num_graded: group_size}.get(end.num_right, group_size - 1)


def weights(rate: float, group_size: int, most: int | None, estimator: Estimator) -> dict[str, float]:
    """w(p) of a prompt over plain GRPO's, by what is returned, and what the returned rewards say of p."""

    def expected(value: Callable[[End], float], most: int | None = most) -> float:
        return sum(end.chance * value(end) for end in ends(rate, group_size, most))

    def returned(end: End) -> float:
        return signal(estimator, group_size, right_returned(end, group_size))

    def teaches(end: End) -> float:
        return float(0 < end.num_right < end.num_graded)

    def weighed(end: End) -> float:
        return group_weight(group_size, end.num_graded) * returned(end)

    def of_all(end: End) -> float:
        return group_size / end.num_graded * signal(estimator, end.num_graded, end.num_right)

    plain, plain_teaches = expected(returned, group_size), expected(teaches, group_size)
    ours, ours_teaches = expected(returned), expected(teaches)
    return {
        "plain": plain / (rate * (1 - rate)),
        "ours": ours / plain,
        "ours_weighed": expected(weighed) / plain,
        "all_graded": expected(of_all) / plain,
        "filtered": 1 / plain_teaches,
        "ours_over_filtered_if_it_teaches": (ours / ours_teaches) / (plain / plain_teaches),
        "teaches": ours_teaches,
        "num_graded": expected(lambda end: end.num_graded),
        "bias_of_returned": expected(lambda end: right_returned(end, group_size) / group_size) - rate,
        "bias_of_all": expected(lambda end: end.num_right / end.num_graded) - rate,
    }


class Policy(NamedTuple):
    """Every answer of a policy with three tokens."""

    chances: np.ndarray  # [num_answers]
    scores: np.ndarray  # [num_answers, num_parameters], gradients of log probabilities
    lengths: np.ndarray  # [num_answers], tokens
    answers: list[tuple[int, ...]]


def policy_of(logits: np.ndarray) -> Policy:
    """Logits: [MOST_TOKENS, previous token, token]; an answer's first token has END before it."""
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found: list[tuple[tuple[int, ...], float, np.ndarray]] = []

    def extend(answer: tuple[int, ...], log: float, score: np.ndarray) -> None:
        if len(answer) == MOST_TOKENS or END in answer:
            found.append((answer, log, score.ravel()))
            return
        here = len(answer), answer[-1] if answer else END
        for token in range(NUM_TOKENS):
            more = score.copy()
            more[here] -= np.exp(logs[here])
            more[(*here, token)] += 1
            extend((*answer, token), log + logs[(*here, token)], more)

    extend((), 0.0, np.zeros_like(logits))
    answers, log_chances, scores = zip(*found, strict=True)
    lengths = np.array([len(answer) for answer in answers], float)
    return Policy(np.exp(log_chances), np.array(scores), lengths, list(answers))


def bandit(seed: int = 1) -> Policy:
    """The policy that is measured: one answer in four ends after each token."""
    logits = 0.7 * np.random.default_rng(seed).standard_normal((MOST_TOKENS, NUM_TOKENS, NUM_TOKENS))
    logits[..., END] = logits[..., :END].mean(-1) - 0.4
    return policy_of(logits)


REWARDS: dict[str, Callable[[tuple[int, ...]], float]] = {
    "0 or 1, of any length": lambda answer: float(answer[:2] == (0, 1)),
    "0 or 1, right ones are short": lambda answer: float(answer in ((0, END), (1, 1, END))),
    "0, 0.5 or 1": lambda answer: 1.0 if answer[:2] == (0, 1) else 0.5 * (answer[:2] == (1, END)),
}
Pick = Literal["plain", "index", "grading"]
"""The first `group_size`; those of the rule in order of launch; or with all under way at once, the shortest first."""


def coefficients(
    policy: Policy, rewards: np.ndarray, pick: Pick, group_size: int, most: int, estimator: Estimator, seed: int
) -> np.ndarray:
    """What each answer's score function counts in the mean gradient of a group, by batch: [BATCHES, num_answers]."""
    rng = np.random.default_rng(seed)
    found = np.empty((BATCHES, len(rewards)))
    for batch in range(BATCHES):
        drawn = rng.choice(len(rewards), (GROUPS, most), p=policy.chances)
        if pick == "grading":
            order = np.argsort(policy.lengths[drawn] + rng.random(drawn.shape), axis=1)
            drawn = np.take_along_axis(drawn, order, 1)
        returned = drawn[:, :group_size].copy()
        if pick != "plain":
            graded = rewards[drawn]
            differs = graded != graded[:, :1]
            last = np.maximum(np.argmax(differs, 1), group_size - 1)  # where none differs argmax is 0
            returned[:, -1] = drawn[np.arange(GROUPS), last]
        of_group = rewards[returned]
        advantages = of_group - of_group.mean(1, keepdims=True)
        if estimator == "grpo":
            advantages /= of_group.std(1, ddof=1, keepdims=True) + SMALLEST_STD
        found[batch] = np.bincount(returned.ravel(), advantages.ravel(), len(rewards)) / GROUPS
    return found


def direction(reward: str, pick: Pick, group_size: int, most: int, estimator: Estimator, seed: int) -> dict[str, Any]:
    """How far the mean gradient is off that of plain groups: its part across, over its part along.

    With 0 and 1 that of plain groups is the gradient of the success rate, exactly. Else it is measured, with GROUPS *
    BATCHES other groups. `noise` is what chance alone would make of it.
    """
    policy = bandit()
    rewards = np.array([REWARDS[reward](answer) for answer in policy.answers])
    if set(rewards) == {0.0, 1.0}:
        wanted = (policy.chances * rewards) @ policy.scores
    else:
        wanted = (
            coefficients(policy, rewards, "plain", group_size, group_size, estimator, seed + 1).mean(0) @ policy.scores
        )
    wanted /= np.linalg.norm(wanted)
    gradients = coefficients(policy, rewards, pick, group_size, most, estimator, seed) @ policy.scores
    along = gradients @ wanted
    across = gradients - np.outer(along, wanted)
    noise = math.sqrt(across.var(0, ddof=1).sum() / BATCHES)
    return {
        "reward": reward,
        "mean_reward": float(policy.chances @ rewards),
        "pick": pick,
        "group_size": group_size,
        "max_candidates": most,
        "estimator": estimator,
        "along": float(along.mean()),
        "off": float(np.linalg.norm(across.mean(0)) / along.mean()),
        "noise": float(noise / along.mean()),
    }

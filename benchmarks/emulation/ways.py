"""What is asked of the real server and of the emulated one, in the same words.

Invariant: a way's requests, seeds and rewards depend on its sizes and repeat only.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.prompts import cycle
from vllm_rollout.client.client import AsyncRolloutClient
from vllm_rollout.demo.rounds.prompts import make_prompts
from vllm_rollout.demo.rounds.rounds import messages, tail_rounds
from vllm_rollout.group.rounds import RunTerms

DETECTION_LENGTH = 64
MIN_LABELS = 16
PRUNING: dict[str, Any] = {
    "detection_length": DETECTION_LENGTH,
    "rule": "paper",
    "strength": 0.0,
    "keep_ratio": 0.5,
    "min_labels": MIN_LABELS,
}
"""Half of the candidates, whatever their score: chance follows from the seed, so both servers keep the same."""
SEED_STRIDE = 1000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything. Fields are options of the command line; see there."""

    model: str
    prompts: int
    group_size: int
    redundancy: int
    prompts_per_round: int
    max_tokens: int
    repeats: int
    passes: int
    seed: int

    @property
    def terms(self) -> RunTerms:
        return RunTerms(self.group_size, self.prompts_per_round)

    @property
    def max_num_seqs(self) -> int:
        return max(
            self.prompts * (self.group_size + self.redundancy), self.terms.num_prompts * self.terms.num_candidates
        )

    def sampling(self, repeat: int) -> dict[str, Any]:
        return {"temperature": 1.0, "max_tokens": self.max_tokens, "seed": self.seed + SEED_STRIDE * repeat}

    def questions(self, way: str, repeat: int) -> list[str]:
        if way == "rounds":
            return make_prompts(self.terms.num_period_prompts, self.seed + repeat)
        return cycle(self.prompts)


class Asked(NamedTuple):
    seconds: float
    generated_tokens: int


async def _dual_end(client: AsyncRolloutClient, sizes: Sizes, repeat: int) -> Asked:
    return await _rollout(client, sizes, repeat, selection={"dual_end": {"num_longest": 1}}, early_stop=False)


async def _pruning(client: AsyncRolloutClient, sizes: Sizes, repeat: int) -> Asked:
    """Pruning waits for rewards first: those of a short rollout in shadow mode, by turns 1 and 0."""
    short = sizes.sampling(repeat) | {"max_tokens": DETECTION_LENGTH + 1}
    shadow = {**PRUNING, "mode": "shadow"}
    prompts = _prompts(sizes.questions("pruning", repeat))
    first = await client.rollout(prompts, sizes.group_size, sizes.redundancy, pruning=shadow, sampling=short)
    rewards = [
        (group.prompt_id, trajectory.index, float(number % 2))
        for group in first.groups
        for number, trajectory in enumerate(group.trajectories)
    ]
    await client.post_rewards(first.id, rewards)
    return await _rollout(client, sizes, repeat, early_stop=False, pruning=PRUNING)


async def _rounds(client: AsyncRolloutClient, sizes: Sizes, repeat: int) -> Asked:
    questions = sizes.questions("rounds", repeat)
    rounds = [each async for each in tail_rounds(client, questions, sizes.terms, sizes.sampling(repeat))]
    return Asked(sum(each.seconds for each in rounds), sum(each.generated_tokens for each in rounds))


async def _rollout(client: AsyncRolloutClient, sizes: Sizes, repeat: int, **options: Any) -> Asked:
    started = time.perf_counter()
    answer = await client.rollout(
        _prompts(sizes.questions("rollout", repeat)),
        sizes.group_size,
        sizes.redundancy,
        sampling=sizes.sampling(repeat),
        return_logprobs=False,
        return_text=False,
        **options,
    )
    return Asked(time.perf_counter() - started, answer.usage.generated_tokens)


def _prompts(questions: Sequence[str]) -> list[Any]:
    return [{"id": str(number), "messages": messages(question)} for number, question in enumerate(questions)]


WAYS: dict[str, Callable[[AsyncRolloutClient, Sizes, int], Awaitable[Asked]]] = {
    "dual_end": _dual_end,
    "early_stop": _rollout,
    "pruning": _pruning,
    "rounds": _rounds,
}
TITLES = {
    "dual_end": "dual-end, wait for all",
    "early_stop": "early stop",
    "pruning": "half pruned, wait for the rest",
    "rounds": "a period of rounds",
}

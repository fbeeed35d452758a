"""Plans the prompts of a rollout as a server would.

Invariant: a plan uses only groups that are over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.shaping.rules.allocation import BatchPrompt, allocate_batch
from vllm_rollout.parts.shaping.rules.history import LengthHistory
from vllm_rollout.parts.shaping.rules.launch_order import launch_order, waiting_groups
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.parts import simulated
from vllm_rollout.simulator.race import PoolCandidate, Race
from vllm_rollout.simulator.settings import Setting


class PlannedPrompt(Protocol):
    """Attributes of a prompt that planning needs."""

    @property
    def id(self) -> str: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def max_tokens(self) -> int | None: ...

    @property
    def history_key(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    plan: GroupPlan
    at_upper_bound: bool = False

    def audited(self) -> PlannedRollout:
        """This plan for an audit group, in which no candidate is stopped."""
        return replace(self, plan=self.plan.audited())


class Planner:
    """Plans under one setting. `history` observes every group that is over."""

    def __init__(self, setting: Setting, machine: Machine) -> None:
        """Raises: PlanError for a setting that no engine would take."""
        self._setting = setting
        self._machine = machine
        self._plan = setting.plan(machine.max_candidates)
        self.history = LengthHistory()
        self.num_without_history = 0
        """Number of prompts with redundancy "auto" that had no history."""
        self._num_answers: Counter[str] = Counter()
        """Number of answers to each prompt so far, by history key."""

    def race(
        self, prompt: PlannedPrompt, plan: GroupPlan, pool: Sequence[PoolCandidate], rollout_id: str, seed: int
    ) -> Race:
        """A group that has not begun. Raises: ValueError for a candidate that no rank's KV cache can hold."""
        self._machine.check_fits(prompt.id, prompt.prompt_tokens + max(c.num_tokens for c in pool))
        lengths = self.history.of(prompt.history_key) or self.history.dataset()
        race = Race(prompt.id, plan, pool, prompt.prompt_tokens, lengths=lengths, max_tokens=prompt.max_tokens)
        mean, most = self.history.mean, prompt.max_tokens
        race.mean_tokens = mean if mean is None or most is None else min(mean, most)  # as the scheduler admits
        race.num_earlier = self._num_answers[prompt.history_key]
        if plan.pruning is not None:
            simulated("pruning", "detection_length").score(race, rollout_id, seed)
        return race

    def has_run(self, history_key: str, endings: Sequence[Ending]) -> None:
        """Count the answers of a group that is over. Later groups of the prompt use them as drafts."""
        self._num_answers[history_key] += sum(ending.num_tokens > 0 for ending in endings)

    def launch_order(self, prompts: Sequence[PlannedPrompt], planned: Sequence[PlannedRollout]) -> Sequence[int]:
        """Positions of prompts in the order in which a server with these plans launches them."""
        slots = self._machine.num_slots
        if self._setting.order == "prompts" or slots is None:
            return range(len(prompts))
        history = self.history.statistics(prompt.history_key for prompt in prompts)
        groups = waiting_groups((its.plan for its in planned), history, (prompt.max_tokens for prompt in prompts))
        return launch_order(groups, slots * self._machine.num_ranks).positions

    def plans(self, prompts: Sequence[PlannedPrompt]) -> list[PlannedRollout]:
        """Plans for the prompts of one rollout."""
        if self._setting.redundancy != "auto":
            return [PlannedRollout(self._plan)] * len(prompts)
        known = [self.history.of(prompt.history_key) for prompt in prompts]
        self.num_without_history += known.count(None)
        batch = allocate_batch(
            [
                BatchPrompt(lengths, prompt.prompt_tokens, prompt.max_tokens)
                for lengths, prompt in zip(known, prompts, strict=True)
            ],
            self.history.dataset(),
            self._machine.known_cost,
            group_size=self._setting.group_size,
            max_candidates=self._machine.max_candidates,
            num_ranks=self._machine.num_ranks,
            tradeoff=self._setting.tradeoff,
            race=self._plan,
            num_places=None if self._machine.num_slots is None else self._machine.num_slots * self._machine.num_ranks,
        )
        plans = batch.plans(self._plan, self._setting.early_stop)
        return [PlannedRollout(plan, its.at_upper_bound) for plan, its in zip(plans, batch.prompts, strict=True)]

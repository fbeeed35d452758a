"""Arms of the comparison: a name, the flags of `examples.grpo.train`, and in some arms another way to use groups."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from examples.grpo.train import Step, Training
from vllm_rollout import RolloutError
from vllm_rollout.kernel.http.answers import GroupAnswer, Trajectory
from vllm_rollout.parts.rewards.rules.estimates import advantages


def regraded(group: GroupAnswer, trajectories: Sequence[Trajectory]) -> GroupAnswer:
    """The group with these trajectories in place of its own."""
    assert group.rewards is not None
    rewards = [trajectory.reward for trajectory in trajectories]
    known = {reward for reward in rewards if reward is not None}
    said = {"advantages": advantages(rewards, group.rewards.estimator), "teaches": len(known) > 1}
    its = group.rewards.model_copy(update=said)
    return group.model_copy(update={"trajectories": list(trajectories), "rewards": its})


class RandomHalf(Training):
    """Trains on a random half of each group. It separates a race's selection from the number of candidates it runs."""

    def groups(self, step: Step) -> Iterator[GroupAnswer]:
        for group in super().groups(step):
            chance = random.Random(f"{self.args.seed} {group.prompt_id}")
            drawn = chance.sample(group.trajectories, len(group.trajectories) // 2)
            others = [trajectory for trajectory in group.trajectories if trajectory not in drawn]
            yield regraded(group, drawn).model_copy(update={"candidates": others})


def with_baseline(group: GroupAnswer, weight: float) -> GroupAnswer:
    """The group with advantages over a corrected success rate, in which a right answer counts as `weight` answers."""
    assert group.rewards is not None
    if not group.rewards.teaches:
        return group
    rewards = [trajectory.reward for trajectory in group.trajectories]
    known = [reward for reward in rewards if reward is not None]
    right = weight * sum(known)
    baseline = right / (right + len(known) - sum(known))
    its = [None if reward is None else reward - baseline for reward in rewards]
    return group.model_copy(update={"rewards": group.rewards.model_copy(update={"advantages": its})})


class CorrectedBaseline(Training):
    """Corrects the baseline of a race by audit groups, because winners are right more often than the policy."""

    def groups(self, step: Step) -> Iterator[GroupAnswer]:
        weight = 1.0
        with suppress(RolloutError):  # nothing has been scored yet
            weight = self.server.client.report().audit.raced_success_weight
        for group in super().groups(step):
            yield group if group.audit else with_baseline(group, weight)


class Arm(NamedTuple):
    title: str
    flags: str
    training: type[Training] = Training


ARMS = {
    "plain": Arm("8 of 8", ""),
    "plain16": Arm("16 of 16", "--group-size 16"),
    "half16": Arm("random 8 of 16", "--group-size 16", RandomHalf),
    "race": Arm("race, 8 of 16", "--race"),
    "dual": Arm("7 first + the longest of 16", "--race --dual-end 1.5"),
    "auto": Arm("7 first + the longest, as many as pay", "--redundancy auto --dual-end 1.5"),
    "audited": Arm("race, a group in 16 waited for", "--race --audit-ratio 0.0625"),
    "corrected": Arm(
        "the same, baselines as audits say", "--race --prune shadow --audit-ratio 0.0625", CorrectedBaseline
    ),
    "prune": Arm("16, half stopped by score", "--prune"),
    "balance": Arm("the same, rule balance", "--prune balance"),
    "paper": Arm("the same, ARRoL's Eq. 2 as printed", "--prune paper"),
    "rounds": Arm("rounds, 1.25 x prompts and answers", "--rounds"),
    "resume": Arm("the same, long rounds go on from what there is", "--rounds --resume"),
    "rounds1": Arm("rounds, no more prompts and answers than wanted", "--rounds --speculation 1.0"),
    "stopped": Arm("race, stopped ones teach", "--race --stopped-teach"),
    "expected": Arm("the same, as right as their scores say", "--race --prune shadow --stopped-teach"),
    "together": Arm("7 first + the longest, stopped ones teach", "--race --dual-end 1.5 --stopped-teach"),
}
RETIRED = {"until": "8, until rewards differ"}
"""Titles of arms that earlier records have, and that no version trains any more."""
RIVALS = {"trl": "TRL's trainer on stock vLLM, 8 of 8", "trl_race": "TRL's trainer, race, 8 of 16"}
"""Titles of the arms that `trl` trains in an environment of its own. `run` leaves these arms out."""

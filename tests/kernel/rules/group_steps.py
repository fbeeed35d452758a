"""Drives a Group by hand, and groups of candidates of known lengths step by step."""

from collections.abc import Mapping
from typing import Any

from tests.support.steps import group_steps
from vllm_rollout.kernel.rules.lifecycle import Group, Settlement
from vllm_rollout.kernel.rules.step import GroupSteps, Verdicts
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.types import CandidateId, EndReason


def launched(group_size: int, num_candidates: int, early_stop: bool = True, *, patience: float | None = None) -> Group:
    group = Group(GroupTerms(group_size, num_candidates, early_stop, patience))
    for _ in range(num_candidates):
        group.launch()
    return group


def end_step(group: Group, *ends: tuple[int, EndReason, int]) -> Settlement:
    for index, reason, num_tokens in ends:
        group.end(index, reason, num_tokens)
    return group.settle()


def states(group: Group) -> list[str]:
    return [group.state(index) for index in sorted(group._candidates)]


ENDS: dict[str, EndReason] = {"stop": "stop", "cut": "length", "fail": "failed"}


def play_steps(group: Group, steps: list[str]) -> list[Settlement]:
    """Each step's events, as "3 stop 10" (index, end, tokens), "prune 1 3", or "launch"."""
    settlements = []
    for step in steps:
        for event in filter(None, step.split(", ")):
            match event.split():
                case ["launch"]:
                    group.launch()
                case ["prune", *indices]:
                    group.rule_out([int(index) for index in indices], "pruned")
                case [index, end, num_tokens]:
                    group.end(int(index), ENDS[end], int(num_tokens))
        settlements.append(group.settle())
    return settlements


class Run:
    """Candidates of known lengths, each one token longer per step."""

    def __init__(self, steps: GroupSteps | None = None, **settings: Any) -> None:
        self.steps = group_steps(**settings) if steps is None else steps
        self.groups: dict[str, Group] = {}
        self.lengths: dict[CandidateId, int] = {}
        self.running: dict[CandidateId, int] = {}
        """Tokens so far."""
        self.ends: dict[CandidateId, tuple[str, int]] = {}

    def launch(
        self, group_id: str, lengths: list[int], terms: GroupTerms, said: Mapping[str, Any] | None = None
    ) -> None:
        """`said`: values of each candidate for parts, by part."""
        for index, length in enumerate(lengths):
            request_id = f"{group_id}-{index}"
            id, self.groups[group_id] = self.steps.launch(group_id, terms, index, request_id=request_id, said=said)
            self.lengths[id], self.running[id] = length, 0

    def step(self, seen: Mapping[str, Mapping[CandidateId, Any]] | None = None) -> Verdicts:
        """`seen`: observations by part."""
        for id in self.running:
            self.running[id] += 1
        for id in [id for id, tokens in self.running.items() if tokens == self.lengths[id]]:
            self.steps.ended(id, self.groups[id.group_id], "stop", self.running[id])
            self.ends[id] = "stop", self.running.pop(id)
        verdicts = self.steps.close_step(seen or {}, lambda id: self.running[id])
        for id, state in verdicts.stop.items():
            self.ends[id] = state, self.running.pop(id)
        return verdicts

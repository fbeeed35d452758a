"""Drives a Group by hand."""

from vllm_rollout.group.plans.terms import GroupTerms
from vllm_rollout.group.racing.lifecycle import Group, Settlement
from vllm_rollout.group.types import EndReason


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

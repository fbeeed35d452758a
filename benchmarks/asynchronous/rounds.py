"""Tail batching: the product's rule of rounds says which groups start, and which are stopped and run again.

A short round starts more prompts than a batch has. When the batch is complete, the other groups are stopped. Their
prompts run again in a long round, which waits for all its groups. Source: RollPacker, section 3.
"""

from __future__ import annotations

from benchmarks.asynchronous.arms import BATCH, GROUP_SIZE, race
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.rounds.rules.round_progress import GroupEnd, RoundProgress
from vllm_rollout.parts.rounds.rules.rounds import FreshPrompt, Run, RunTerms

COMPLETE, STOPPED = GroupEnd(True, False, 0), GroupEnd(False, True, 0)


class Rounds:
    """The rounds of one training. Each makes a batch, and groups have the numbers of their prompts."""

    def __init__(self) -> None:
        self.run = Run(RunTerms(GROUP_SIZE, BATCH))

    def begin(self) -> tuple[GroupPlan, list[int]]:
        """Open the next round. Returns the plan and the numbers of its groups."""
        run = self.run
        opened = run.plan(str(run.num_rounds), [FreshPrompt(str(run.num_handed_in + i)) for i in range(run.num_fresh)])
        run.begin(opened)
        self.progress = RoundProgress(opened)
        self.running = {entry.number: self.progress.start() for entry in opened.entries}
        num_candidates = GROUP_SIZE if opened.kind == "long" else run.terms.num_candidates
        return race(num_candidates), list(self.running)

    def returns(self, number: int) -> bool:
        """True if this complete group is in the batch, and not too late for it."""
        return self.progress.group_over(self.running.pop(number), COMPLETE) == "returned"

    def cut(self) -> list[int]:
        """Close the round if its batch is complete. Returns the groups that are to be stopped."""
        if not self.progress.is_cut or self.run.open is None:
            return []
        for place in self.running.values():
            self.progress.group_over(place, STOPPED)
        self.run.close(self.progress.outcomes(), 0.0, 0, 0)
        return list(self.running)

"""`--parallelism auto`, simulated: the machine of the next round is of the size that the planner wants.

Invariant: sizes depend on the rounds and their order only; a rebuild takes no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_rollout.group.forecast import EngineSize, ExpectedRound, forecast
from vllm_rollout.group.planner import ParallelismPlanner, RoundPressure
from vllm_rollout.group.rounds import RoundKind
from vllm_rollout.group.types import GroupResult
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import Race

RUN = "simulated"


@dataclass(frozen=True, slots=True)
class SizedMachines:
    """What the planner chooses among."""

    machines: Mapping[int, Machine]
    """By tensor-parallel size."""
    start_size: int
    knows_costs: bool = False
    """A profile says what they take, as with `--rollout-profile`."""


@dataclass(slots=True)
class Sizes:
    """The sizes of a run's rounds."""

    its: SizedMachines
    size: int = field(init=False)
    """Of the next round."""
    _history: list[RoundPressure] = field(default_factory=list)
    _planner: ParallelismPlanner = field(init=False)

    def __post_init__(self) -> None:
        self._planner = ParallelismPlanner(tuple(sorted(self.its.machines)), self.its.start_size)
        self.size = self._planner.next_size(()).size

    @property
    def machine(self) -> Machine:
        return self.its.machines[self.size]

    def round_over(
        self, kind: RoundKind, races: Sequence[Race], results: Mapping[int, GroupResult], num_preemptions: int
    ) -> None:
        lengths = [ending.num_tokens for result in results.values() for ending in result.endings]
        contexts = sorted(
            races[position].prompt_tokens + ending.num_tokens
            for position, result in results.items()
            for ending in result.endings
        )
        kv_tokens = sum(contexts[-(self.machine.num_slots or len(contexts)) :])
        self._history.append(RoundPressure(RUN, kind, self.size, len(contexts), num_preemptions, kv_tokens))

        def seconds_at(size: int) -> float:
            machine = self.its.machines[size]
            room = machine.kv_capacity_tokens or sum(contexts) + len(contexts) * machine.block_size
            prompt_tokens = (sum(contexts) - sum(lengths)) // len(lengths)
            expected = ExpectedRound(lengths, len(lengths), prompt_tokens, max(1, len(lengths) // len(results)))
            return forecast(EngineSize(machine.step_cost, room), expected).seconds

        self.size = self._planner.next_size(self._history, seconds_at if self.its.knows_costs else None).size

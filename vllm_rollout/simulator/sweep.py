"""Many settings on one trace, and which of them to take. Invariant: all see the same candidates on the same machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.outcome import Outcome
from vllm_rollout.simulator.pool import Pools
from vllm_rollout.simulator.replay import replay
from vllm_rollout.simulator.settings import Setting

MORE_INCOMPLETE = 0.01
"""Share of groups by which a setting may fall short more often than the baseline and still be recommended."""


@dataclass(frozen=True, slots=True)
class Sweep:
    outcomes: tuple[Outcome, ...]
    """The baseline first."""
    machine: Machine
    without_moves: Outcome | None = None
    """The baseline once more, with groups that stay on their ranks; None when they stay anyway."""

    @property
    def baseline(self) -> Outcome:
        return self.outcomes[0]

    @property
    def fastest(self) -> Outcome:
        """Of those whose groups are complete."""
        return min(self._usable, key=lambda outcome: outcome.seconds)

    @property
    def fastest_with_longest(self) -> Outcome | None:
        """The fastest that returns long answers on purpose; None when no such setting was tried."""
        keeping = [outcome for outcome in self._usable if outcome.setting.keeps_longest]
        return min(keeping, key=lambda outcome: outcome.seconds) if keeping else None

    @property
    def _usable(self) -> list[Outcome]:
        most = self.baseline.incomplete_share + MORE_INCOMPLETE
        return [outcome for outcome in self.outcomes if outcome.incomplete_share <= most]

    def speed_up(self, outcome: Outcome) -> float:
        return self.baseline.seconds / outcome.seconds


def sweep(
    pools: Pools,
    settings: Sequence[Setting],
    machine: Machine,
    *,
    epochs: int = 1,
    seed: int = 0,
    on_rollout: Callable[[Setting], None] = lambda setting: None,
) -> Sweep:
    """Replay every setting; the first is the baseline of the comparison.

    Raises: ValueError, or PlanError, which names the setting's field; before anything is replayed where that is enough.
    """
    for setting in settings:
        setting.plan(machine.max_candidates)
    outcomes = []
    for setting in settings:

        def done(setting: Setting = setting) -> None:
            on_rollout(setting)

        outcomes.append(replay(pools, setting, machine, epochs=epochs, seed=seed, on_rollout=done))
    if not machine.moves_groups:
        return Sweep(tuple(outcomes), machine)
    staying = replay(pools, settings[0], machine.without_moves, epochs=epochs, seed=seed)
    return Sweep(tuple(outcomes), machine, staying)

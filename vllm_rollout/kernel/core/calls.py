"""Calls of API processes to an engine core, beside requests, and the functions that answer them.

vLLM's utility calls reach methods of EngineCore by name, and none of them leads to the scheduler. So one method is
added, `EngineCore.rollout_call`. No code of vLLM calls it. It runs between two engine steps.

Invariant: every operation of the call table has one line in `ANSWERS`. It takes at most `CALL_BUDGET_S` seconds plus
one small piece of work, except for a state that is put.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vllm.v1.engine.core import EngineCore

from vllm_rollout.kernel.call_table import OPERATIONS, CostToCompare, LengthsToLookUp, ObservedGroup
from vllm_rollout.kernel.rules.types import HeldGroups
from vllm_rollout.parts.pruning.core.learning_calls import LearningCalls
from vllm_rollout.parts.pruning.rules.judge import Judge
from vllm_rollout.parts.pruning.rules.step import PruningStep
from vllm_rollout.parts.rounds.rules.race import RaceTable
from vllm_rollout.parts.rounds.rules.step import RoundsStep
from vllm_rollout.parts.shaping.rules.drift import Drift
from vllm_rollout.parts.shaping.rules.moments import LengthStatistics


def add_rollout_calls() -> None:
    """Make `rollout_call` callable on every engine core of this process."""
    EngineCore.rollout_call = rollout_call  # type: ignore[attr-defined]


def rollout_call(core: EngineCore, operation: str, payload: bytes) -> bytes:
    """Carry out one operation of the call table."""
    row = OPERATIONS[operation]
    return row.encode_result(ANSWERS[operation](core, row.decode_argument(payload)))


def call_worker(core: EngineCore, method: str, *args: Any) -> Any:
    """Call a method of every worker. Returns the answer that is not None: that of the worker whose outputs are read."""
    return next((result for result in core.collective_rpc(method, args=args) if result is not None), None)


def _learning(core: EngineCore) -> LearningCalls:
    scheduler = core.scheduler
    return LearningCalls(
        _judge(core),
        scheduler.readings,
        partial(call_worker, core),
        model=core.vllm_config.model_config.served_model_name,
    )


def _judge(core: EngineCore) -> Judge:
    return core.scheduler.group_steps.part(PruningStep).judge


def _races(core: EngineCore) -> RaceTable:
    return core.scheduler.group_steps.part(RoundsStep).races


def _cut_race(core: EngineCore, race_id: str) -> None:
    steps = core.scheduler.group_steps
    steps.part(RoundsStep).cut(race_id, steps)


def _observe_lengths(core: EngineCore, group: ObservedGroup) -> None:
    memory = _judge(core).memory_of(group.adapter)
    if memory is not None:
        memory.lengths.observe(group.key, group.lengths)


def _length_history(core: EngineCore, wanted: LengthsToLookUp) -> LengthStatistics:
    memory = _judge(core).memories.known(wanted.adapter)
    if memory is None:
        return LengthStatistics(None, [None] * len(wanted.keys))
    return memory.lengths.statistics(wanted.keys)


def _set_cost_model(core: EngineCore, wanted: CostToCompare | None) -> None:
    drift = wanted and Drift(
        wanted.cost, model=wanted.model, profile=wanted.profile, batch_sizes=wanted.batch_sizes
    )  # fmt: skip
    core.scheduler.step_times.compare_with(drift)


def _held_groups(core: EngineCore) -> HeldGroups:
    core.scheduler.forget_waiting()
    held = core.scheduler.group_steps.held
    return held._replace(num_races=len(_races(core)), num_unmet=core.scheduler.num_unmet)


ANSWERS: Mapping[str, Callable[[EngineCore, Any], Any]] = {
    "post_rewards": lambda core, posted: _learning(core).post_rewards(posted),
    "name_choices": lambda core, named: _learning(core).name_choices(named),
    "learn_labels": lambda core, labels: _learning(core).learn_labels(labels),
    "learn_features": lambda core, labelled: _learning(core).learn_features(labelled),
    "train": lambda core, budget_s: _learning(core).train(budget_s),
    "heads": lambda core, _: _learning(core).heads(),
    "put_head": lambda core, put: _learning(core).put_head(put),
    "open_head": lambda core, head: _learning(core).open_head(head),
    "learned": lambda core, _: _learning(core).learned(),
    "learning_window": lambda core, head: _learning(core).learning_window(head),
    "open_state": lambda core, reader: _learning(core).open_state(reader),
    "tried_lengths": lambda core, adapter: _learning(core).tried_lengths(adapter),
    "open_prompts": lambda core, wanted: _learning(core).open_prompts(wanted),
    "read": lambda core, reader: core.scheduler.readings.read(reader),
    "put_state": lambda core, put: _learning(core).put_state(put),
    "abort_requests": lambda core, names: core.scheduler.abort_named(frozenset(names)),
    "recompute": lambda core, names: core.scheduler.recompute(names and frozenset(names)),
    "cancel_groups": lambda core, group_ids: core.scheduler.cancel_groups(group_ids),
    "give_up": lambda core, candidates: core.scheduler.give_up(candidates),
    "cut_race": _cut_race,
    "widen_race": lambda core, race: _races(core).widen(race.race_id, race.num_wanted),
    "forget_race": lambda core, race_id: _races(core).forget(race_id),
    "observe_lengths": _observe_lengths,
    "length_history": _length_history,
    "record_steps": lambda core, on: core.scheduler.step_times.record(on),
    "take_steps": lambda core, _: core.scheduler.step_times.take(),
    "set_cost_model": _set_cost_model,
    "step_drift": lambda core, _: core.scheduler.step_times.drift(),
    "held_groups": lambda core, _: _held_groups(core),
    "engine_load": lambda core, _: core.scheduler.load,
    "last_tokens": lambda core, group_id: core.scheduler.last_tokens(group_id),
    "hold": lambda core, wanted: core.scheduler.moves.hold(wanted),
    "release_group": lambda core, wanted: core.scheduler.moves.release(core, wanted),
    "keep_group": lambda core, wanted: core.scheduler.moves.keep(core, wanted),
    "adopt_group": lambda core, wanted: core.scheduler.moves.adopt(core, wanted),
    "confirm_move": lambda core, wanted: core.scheduler.moves.confirm(core, wanted),
}
"""Function that answers an operation, by its name."""

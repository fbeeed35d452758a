"""What API processes ask of an engine core.

vLLM's utility calls reach methods of EngineCore by name, and none of them leads to the scheduler; so one method is
added, `EngineCore.rollout_call`, which nothing of vLLM's calls. Invariant: every operation is in one of the tables, and
its results are plain lists, numbers, text and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.config import ParallelConfig
from vllm.v1.engine.core import EngineCore

from vllm_rollout.adapter.core.learning_calls import LEARNING_OPERATIONS, LearningCalls
from vllm_rollout.adapter.core.length_calls import LENGTH_OPERATIONS, LengthCalls
from vllm_rollout.adapter.core.step_times import STEP_TIME_OPERATIONS, StepTimeCalls

METHOD = "rollout_call"


def add_rollout_calls() -> None:
    """Make `METHOD` callable on every engine core of this process."""
    EngineCore.rollout_call = rollout_call  # type: ignore[attr-defined]


def rollout_call(core: EngineCore, operation: str, arguments: Sequence[Any]) -> Any:
    """Carry out one operation.

    vLLM checks the number of arguments against the signature and does not know of `*arguments`.
    """
    table, make_calls = next((table, make) for table, make in TABLES if operation in table)
    return table[operation](make_calls(core), *arguments)


def _learning_calls(core: EngineCore) -> LearningCalls:
    return LearningCalls(
        core.scheduler.judge,
        lambda method, *args: next(
            (result for result in core.collective_rpc(method, args=args) if result is not None), None
        ),
        model=core.vllm_config.model_config.served_model_name,
        rank=_rank(core.vllm_config.parallel_config),
    )


def _rank(parallel: ParallelConfig) -> int:
    """Which of its API process's ranks an engine core is. `data_parallel_rank` is 0 on all ranks of a dense model."""
    return (parallel.data_parallel_rank_local or 0) if parallel.local_engines_only else parallel.data_parallel_index


def _by_name(operations: Sequence[Callable[..., Any]]) -> Mapping[str, Callable[..., Any]]:
    return {operation.__name__: operation for operation in operations}


TABLES: tuple[tuple[Mapping[str, Callable[..., Any]], Callable[[EngineCore], Any]], ...] = (
    (_by_name(LEARNING_OPERATIONS), _learning_calls),
    (_by_name(LENGTH_OPERATIONS), lambda core: LengthCalls(core.scheduler.judge.memory.lengths)),
    (_by_name(STEP_TIME_OPERATIONS), lambda core: StepTimeCalls(core.scheduler.step_times)),
)
"""Operations by name, with what carries them out."""

"""Makes our code in an engine core and its worker raise by chance: a plugin of vLLM, on PYTHONPATH.

`PLANTED_ERRORS`: one call in so many raises. Rare calls raise more often, or a test would wait for them.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
from collections.abc import Callable
from typing import Any

ONE_IN = "PLANTED_ERRORS"


class Planted(RuntimeError):
    """An exception that a test raises in our code."""


def plant() -> None:
    if ONE_IN not in os.environ:
        return
    from vllm_rollout.kernel.core import scheduler
    from vllm_rollout.kernel.core.held_outputs import HeldOutputs
    from vllm_rollout.kernel.core.stop_strings import StopStrings
    from vllm_rollout.kernel.rules.lifecycle import Group
    from vllm_rollout.kernel.rules.step import GroupSteps
    from vllm_rollout.parts.drafts.worker.memory import DraftMemory
    from vllm_rollout.parts.observing.tracker.tracker import CandidateTracker
    from vllm_rollout.parts.observing.worker import runner
    from vllm_rollout.parts.pruning.rules.judge import Judge
    from vllm_rollout.parts.rounds.rules.race import RaceTable

    one_in = int(os.environ[ONE_IN])
    in_each_step = [
        (HeldOutputs, "add"),
        (CandidateTracker, "observe"),
        (CandidateTracker, "see_hidden_states"),
        (CandidateTracker, "start_step"),
        (runner, "_report"),
        (GroupSteps, "close_step"),
        (DraftMemory, "step"),
        (StopStrings, "found_at"),
    ]
    now_and_then = [
        (HeldOutputs, "finish"),
        (CandidateTracker, "add"),
        (CandidateTracker, "discard"),
        (Group, "settle"),
        (Group, "end"),
        (Group, "launch"),
        (Judge, "judge"),
        (RaceTable, "settle"),
        (GroupSteps, "launch"),
        (DraftMemory, "begin"),
        (scheduler, "last_observations"),
        (scheduler, "confidence_of"),
    ]
    for places, each in ((in_each_step, 30 * one_in), (now_and_then, one_in)):
        for owner, name in places:
            setattr(owner, name, _raising(getattr(owner, name), each))


def _raising(method: Callable[..., Any], one_in: int) -> Callable[..., Any]:
    chance = random.Random(f"{method.__qualname__} {os.environ.get('NIGHTLY_SEED', 1)}")

    @functools.wraps(method)
    def planted(*args: Any, **kwargs: Any) -> Any:
        # An engine core may be a copy of a process that has loaded its plugins.
        if multiprocessing.current_process().name.startswith("EngineCore") and not chance.randrange(one_in):
            raise Planted(method.__qualname__)
        return method(*args, **kwargs)

    return planted

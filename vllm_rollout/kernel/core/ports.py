"""The port of parts in the engine core: the face `core`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from vllm_rollout.adapter.hooks import HookPart, Hooks
from vllm_rollout.kernel.call_table import Operation
from vllm_rollout.kernel.parts import faces

Answers = Mapping[Operation[Any, Any], Callable[[EngineCore, Any], Any]]
"""Functions that answer operations. A function gets the engine core and the argument, and returns the result."""
Kind = TypeVar("Kind")


class CorePart(HookPart):
    """A part in the engine core. Each scheduler makes one object of it."""

    answers: ClassVar[Answers] = {}
    """The part's answers to calls of API processes."""

    def __init__(self, scheduler: Any) -> None:
        """`scheduler`: ours (`GroupSchedulerMixin`), before its first request."""

    def most_running(self, first: Request) -> int | None:
        """Most requests to run at once, while `first` waits for admission. None: no limit.

        Running requests stay. The hook changes nothing in the part.
        """
        return None

    def stepped(self, step: SchedulerOutput) -> None:
        """The outputs of a step were processed, and its verdicts come next."""

    def interrupted(self) -> None:
        """Generation was paused or resumed."""

    def cache_reset(self) -> None:
        """The prefix cache is emptied next."""

    def forget(self, group_id: str) -> None:
        """Forget a group that is over."""


class CoreParts(Hooks[CorePart]):
    """The parts of one scheduler, by the hooks that they have."""

    port = CorePart

    @classmethod
    def of(cls, scheduler: Any) -> CoreParts:
        return cls([(name, part(scheduler)) for name, part in faces("core")], scheduler.faults)

    def part(self, kind: type[Kind]) -> Kind:
        """The part of this class. Raises: LookupError if there is none."""
        if (found := next((part for part in self.parts if isinstance(part, kind)), None)) is None:
            raise LookupError(f"no part has {kind.__name__} in this engine core")
        return found

    def most_running(self, first: Request) -> int | None:
        """The lowest limit of a part. A part that raises sets none."""
        limits = []
        for name, part in self._with["most_running"]:
            try:
                limits.append(part.most_running(first))
            except Exception as error:
                self._faults.caught(name, error)
        return min((limit for limit in limits if limit is not None), default=None)

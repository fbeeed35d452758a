"""Hooks of parts in a process of vLLM's.

Invariant: a hook that no part has is never called. An exception in a hook is counted, and never reaches vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import isfunction
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar

from vllm_rollout.adapter.faults import Faults


class HookPart:
    """A part with hooks. Only those that it overrides are called."""

    def begin_again(self) -> None:
        """Drop what an exception in a hook has left half done. It must not raise."""


P = ParamSpec("P")
Kind = TypeVar("Kind", bound=HookPart)


class Hooks(Generic[Kind]):
    """The parts of one process, by the hooks that they have."""

    port: ClassVar[type[HookPart]]
    """The class of the parts. Its methods but `__init__` are the hooks."""

    def __init__(self, parts: Sequence[tuple[str, Kind]] = (), faults: Faults | None = None) -> None:
        """`parts`: with their names. `faults`: counts their exceptions."""
        self.parts = [part for _, part in parts]
        self._faults = faults or Faults()
        self._with: dict[str, list[tuple[str, Kind]]] = {
            hook: [(name, part) for name, part in parts if getattr(type(part), hook) is not does_nothing]
            for hook, does_nothing in vars(self.port).items()
            if isfunction(does_nothing) and hook != "__init__"
        }

    def call(self, hook: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a hook of the port in every part that has it."""
        for name, part in self._with[hook.__name__]:
            try:
                getattr(part, hook.__name__)(*args, **kwargs)
            except Exception as error:
                self._faults.caught(name, error)
                part.begin_again()

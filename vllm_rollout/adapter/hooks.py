"""Hooks of parts in a process of vLLM's.

Invariant: a hook that no part has is never called. An exception in a hook is counted, and never reaches vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from vllm_rollout.adapter.faults import Faults


class HookPart:
    """A part with hooks. Only those that it overrides are called."""

    def begin_again(self) -> None:
        """Drop what an exception in a hook has left half done. It must not raise."""


Kind = TypeVar("Kind", bound=HookPart)


class Hooks(Generic[Kind]):
    """The parts of one process, by the hooks that they have."""

    def __init__(
        self, port: type[Kind], hooks: Iterable[str], parts: Sequence[tuple[str, Kind]], faults: Faults
    ) -> None:
        """`port`: has all hooks, which do nothing. `parts`: with their names. `faults`: of the process."""
        self._faults = faults
        self._with: dict[str, list[tuple[str, Kind]]] = {
            hook: [(name, part) for name, part in parts if getattr(type(part), hook) is not getattr(port, hook)]
            for hook in hooks
        }

    def _call(self, hook: str, *args: Any) -> None:
        for name, part in self._with[hook]:
            try:
                getattr(part, hook)(*args)
            except Exception as error:
                self._faults.caught(name, error)
                part.begin_again()

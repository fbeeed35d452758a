"""The port of parts in the engine core: the face `core`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from vllm.v1.engine.core import EngineCore

from vllm_rollout.kernel.call_table import Operation

Answers = Mapping[Operation[Any, Any], Callable[[EngineCore, Any], Any]]
"""Functions that answer operations. A function gets the engine core and the argument, and returns the result."""


class CorePart:
    """A part in the engine core."""

    answers: ClassVar[Answers] = {}
    """The part's answers to calls of API processes."""

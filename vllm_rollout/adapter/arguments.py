"""Arguments that a part reads from a request's `extra_args` (`vllm_xargs`), checked where the request enters.

The face `arguments` of a part is a function of the engine's configuration. It returns a check, or None if the part
reads nothing in this engine. A check raises ArgumentError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig

from vllm_rollout.kernel.parts import faces

Check = Callable[[Mapping[str, Any]], object]


class ArgumentError(ValueError):
    """An argument has a value that is not allowed. `name` is its name."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name} {message}")
        self.name = name


def argument_checks(vllm_config: VllmConfig) -> Sequence[Check]:
    """Checks of the parts that read arguments in this engine."""
    return [check for _, part in faces("arguments") if (check := part(vllm_config)) is not None]

"""Parts that a simulation finds through the list.

It needs `shaping`, which knows what a step costs, and lengths. Each other part can be left out.
"""

from __future__ import annotations

from typing import Any

from vllm_rollout.kernel.parts import face


class FlagError(ValueError):
    """Flags that make no sense, alone or together."""


def simulated(part: str, what: str) -> Any:
    """The face `simulated` of a part. Raises: FlagError if the part is left out. `what`: the flag or field of it."""
    if (its := face(part, "simulated")) is None:
        raise FlagError(f"{what} is of the part {part!r}, which is left out")
    return its

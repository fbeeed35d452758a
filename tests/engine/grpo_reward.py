"""A reward that a random model earns now and then."""

from typing import Any


def odd(text: str, data: dict[str, Any]) -> float:
    return float(len(text) % 2)

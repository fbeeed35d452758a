"""Values of parts on objects of the kernel, which carries them without a look into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class Key(Generic[T]):
    """The key of a part's values. It carries their type, so that the kernel needs no field of a part."""

    def __init__(self, part: str) -> None:
        self.part = part

    def of(self, values: Mapping[str, Any]) -> T | None:
        """The part's value among these. None if it has none there."""
        return cast("T | None", values.get(self.part))

    def value(self, value: T) -> dict[str, Any]:
        """Values with this one only."""
        return {self.part: value}

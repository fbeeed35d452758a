"""Rows of a table of fields, and kinds of values with their ranges.

Each kind describes in words the values that are `allowed`, and checks whether it `holds` a value. `true` is not a
number.

Invariant: the check and the description of a range use the same values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

Door = Literal["body", "own", "join", "claim"]
"""Way by which a field may arrive.

body   an object in one of our bodies, which the table names
own    `vllm_xargs` of a request that has a group of its own
join   `vllm_xargs` of one of several requests that make up a group
claim  `vllm_xargs` of a request that a part claims (`kernel/api/claims.py`)
"""


@dataclass(frozen=True, slots=True)
class Integer:
    least: int
    most: int

    @property
    def allowed(self) -> str:
        return f"an integer from {self.least} to {self.most}"

    def holds(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= self.most


@dataclass(frozen=True, slots=True)
class Number:
    least: float
    most: float
    above: bool = False
    """True if `least` itself is not allowed."""
    below: bool = False
    """True if `most` itself is not allowed."""

    @property
    def allowed(self) -> str:
        return f"a number in {'(' if self.above else '['}{self.least:g}, {self.most:g}{')' if self.below else ']'}"

    def holds(self, value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        is_end = (self.above and value == self.least) or (self.below and value == self.most)
        return self.least <= value <= self.most and not is_end  # False for NaN


@dataclass(frozen=True, slots=True)
class Flag:
    allowed = "true or false"

    def holds(self, value: object) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Names:
    """One word of a closed set."""

    names: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return f'"{self.names[0]}"' if len(self.names) == 1 else f"one of {', '.join(self.names)}"

    def holds(self, value: object) -> bool:
        return isinstance(value, str) and value in self.names


@dataclass(frozen=True, slots=True)
class Text:
    max_chars: int

    @property
    def allowed(self) -> str:
        return f"a string of 1 to {self.max_chars} characters"

    def holds(self, value: object) -> bool:
        return isinstance(value, str) and 1 <= len(value) <= self.max_chars


@dataclass(frozen=True, slots=True)
class Several:
    """A list of distinct values of one kind."""

    kind: Integer
    most: int

    @property
    def allowed(self) -> str:
        return f"a list of 1 to {self.most} different ones"

    def holds(self, value: object) -> bool:
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= self.most:
            return False
        return all(map(self.kind.holds, value)) and len(set(value)) == len(value)


@dataclass(frozen=True, slots=True)
class Object:
    """An object with the fields of a table."""

    table: type
    example: str

    @property
    def allowed(self) -> str:
        return f"an object such as {self.example}"

    def holds(self, value: object) -> bool:
        return isinstance(value, Mapping | self.table)


@dataclass(frozen=True, slots=True)
class Either:
    kinds: tuple[Kind, ...]

    @property
    def allowed(self) -> str:
        *others, last = (kind.allowed for kind in self.kinds)
        return f"{', '.join(others)} or {last}"

    def holds(self, value: object) -> bool:
        return any(kind.holds(value) for kind in self.kinds)


Kind = Integer | Number | Flag | Names | Text | Several | Object | Either


def restored(kind: Kind, value: object) -> object:
    """The value as the user wrote it in JSON. `vllm_xargs` turns booleans into 0 and 1, and integers into floats."""
    if isinstance(kind, Either):
        return next((found for each in kind.kinds if each.holds(found := restored(each, value))), value)
    if isinstance(kind, Integer) and isinstance(value, float) and value.is_integer():
        return int(value)
    return bool(value) if isinstance(kind, Flag) and value in (0, 1) else value


class PlanError(ValueError):
    """A field of a group request has a value that is not allowed. `field` is its name as the user wrote it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Row:
    """The properties of a field beside its name, type and default."""

    takes: Kind
    help: str
    doors: tuple[Door, ...]
    flat: Kind
    """Kind of a flat value: in `vllm_xargs`, or in a setting of the simulator."""
    xarg: str
    """Its name among the `vllm_xargs`, without the prefix `rollout_`, if that is not the field's name. Else empty."""

    @property
    def description(self) -> str:
        return f"{self.help} Takes {self.takes.allowed}."

    def check(self, value: object, name: str) -> None:
        """Check a value. `name`: the field's name, as the user wrote it. Raises: PlanError with value and allowed
        range."""
        if not self.takes.holds(value):
            raise PlanError(name, f"must be {self.takes.allowed}, got {value!r:.80}. {self.help}")

    def read(self, value: object, name: str) -> Any:
        """Restore and check a flat value. Raises: PlanError as `check`."""
        value = restored(self.flat, value)
        if self.flat == self.takes:
            self.check(value, name)
        elif not self.flat.holds(value):
            raise PlanError(name, f"must be {self.flat.allowed}, got {value!r:.80}.")
        return value


def row(
    takes: Kind, help: str, *doors: Door, default: Any = dataclasses.MISSING, flat: Kind | None = None, xarg: str = ""
) -> Any:
    """Declare a field of a table. Without `default` it is required. Without `doors` it may arrive by "body", "own",
    "join"."""
    its = Row(takes, help, doors or ("body", "own", "join"), flat or takes, xarg)
    return dataclasses.field(default=default, metadata={"row": its})


@cache
def rows(table: type) -> Mapping[str, Row]:
    """The rows of a table, and of the tables it inherits from, by field name."""
    found = {}
    for base in reversed(table.__mro__):
        fields: Mapping[str, dataclasses.Field[Any]] = vars(base).get("__dataclass_fields__", {})
        found.update({name: field.metadata["row"] for name, field in fields.items() if "row" in field.metadata})
    return found

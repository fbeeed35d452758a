"""Checks of the fields of a saved state, one by one.

Invariant: a value that cannot have been saved raises a ValueError with the field, the value and the allowed range. No
other exception is raised, whatever a client has made up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from reprlib import Repr
from typing import Any

MAX_COUNT = 2**53
"""Largest count: JSON's integers are exact up to here, and every counter of ours stays far below."""
MAX_SCORE = 3.5e38
"""Largest size of a score: float32 ends here, and sums of squares of such numbers are finite."""

_REPR = Repr()
_REPR.maxlevel = 3
_REPR.maxstring = _REPR.maxother = 60
MAX_SHOWN = 160


def shown(value: Any) -> str:
    """A value for an error message, at most `MAX_SHOWN` characters long."""
    try:
        return f"{_REPR.repr(value):.{MAX_SHOWN}}"
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__} too long to show"


def fields_of(state: Any, names: Collection[str], where: str) -> Mapping[str, Any]:
    """Raises: ValueError unless it is an object with exactly these fields."""
    if not isinstance(state, Mapping) or set(state) != set(names):
        got = sorted(map(str, state)) if isinstance(state, Mapping) else shown(state)
        raise ValueError(f"{where} has the fields {sorted(names)}, got {shown(got)}")
    return state


def listed(value: Any, where: str, most: int | None = None, length: int | None = None) -> Sequence[Any]:
    """Raises: ValueError unless it is a list of at most `most`, or of exactly `length`."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} must be a list, got {shown(value)}")
    if (length is not None and len(value) != length) or (most is not None and len(value) > most):
        wanted = f"{length}" if length is not None else f"at most {most}"
        raise ValueError(f"{where} must be a list of {wanted}, got {len(value)}: {shown(value)}")
    return value


def integer(value: Any, where: str, least: int = 0, most: int = MAX_COUNT) -> int:
    """Raises: ValueError unless it is an integer in [least, most]. True and 1.0 are not integers."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{where} must be an integer in [{least}, {most}], got {shown(value)}")
    return value


def number(value: Any, where: str, least: float, most: float, *, above: bool = False) -> float:
    """Raises: ValueError unless it is a finite number in [least, most], or with `above` in (least, most]."""
    if type(value) not in (int, float) or not least <= value <= most or (above and value == least):
        wanted = f"a finite number in {'(' if above else '['}{least:g}, {most:g}]"
        raise ValueError(f"{where} must be {wanted}, got {shown(value)}")
    return float(value)


def flag(value: Any, where: str) -> bool:
    """Raises: ValueError unless it is true or false, or 1 or 0."""
    if type(value) not in (bool, int) or value not in (0, 1):
        raise ValueError(f"{where} must be true or false, got {shown(value)}")
    return bool(value)


def text(value: Any, where: str, most: int) -> str:
    """Raises: ValueError unless it is a string of 1 to `most` characters that can be written as UTF-8."""
    if not isinstance(value, str) or not 1 <= len(value) <= most or not is_writable(value):
        raise ValueError(f"{where} must be a string of 1 to {most} characters of Unicode, got {shown(value)}")
    return value


def is_writable(value: str) -> bool:
    """True if the text can be written as UTF-8. Half of a surrogate pair, which JSON may contain, cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True

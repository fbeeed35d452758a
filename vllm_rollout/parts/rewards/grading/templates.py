"""A judge's template: a user's text with fields of a trajectory in it.

Invariant: one pass over the template. Text of a trajectory is inserted unchanged and never read as a template. A field
leads to items of JSON, never to an attribute.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from vllm_rollout.checks import shown
from vllm_rollout.parts.rewards.grading.values import Trajectory

FIELDS = "{prompt}, {text}, {data}, {data.NAME} and {data[NAME]}"
PIECE = re.compile(r"(?P<doubled>\{\{|\}\})|\{(?P<field>[^{}]*)\}|(?P<lone>[{}])")
FIELD = re.compile(r"(?P<root>prompt|text|data)(?P<path>(?:\.\w+|\[[^\[\]]+\])*)")
STEP = re.compile(r"\.(\w+)|\[([^\[\]]+)\]")


class Template:
    """A text with fields. `{{` and `}}` are braces. Raises: ValueError for an unknown field."""

    def __init__(self, text: str) -> None:
        self._pieces = list(_pieces(text))
        """Pieces of the template: text, or the path to a field."""

    def filled(self, trajectory: Trajectory) -> str:
        """The text with all fields filled in. Raises: ValueError if the prompt's data lack a field."""
        return "".join(
            piece if isinstance(piece, str) else _written(_found(piece, trajectory)) for piece in self._pieces
        )


def _pieces(text: str) -> Iterator[str | tuple[str, ...]]:
    end = 0
    for piece in PIECE.finditer(text):
        yield text[end : piece.start()]
        end = piece.end()
        if piece["lone"]:
            raise ValueError(
                f"template: a lone {piece['lone']} near {shown(text[piece.start() :][:30])}; write it twice"
            )
        yield piece["doubled"][0] if piece["doubled"] else _way(piece["field"])
    yield text[end:]


def _way(field: str) -> tuple[str, ...]:
    found = FIELD.fullmatch(field)
    if found is None or (found["path"] and found["root"] != "data"):
        raise ValueError(
            f"template: there is no field {shown(field)}, there are {FIELDS}; a brace itself is written twice, {{{{"
        )
    return (found["root"], *(name or item for name, item in STEP.findall(found["path"])))


def _found(way: tuple[str, ...], trajectory: Trajectory) -> Any:
    root, *steps = way
    if root != "data":
        return trajectory.prompt if root == "prompt" else trajectory.text
    value = trajectory.data
    for depth, step in enumerate(steps):
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            has = shown(sorted(map(str, value))) if isinstance(value, dict) else shown(value)
            where = ".".join(["data", *steps[:depth]])
            raise ValueError(f"the judge's template asks for {'.'.join(way)}; the prompt's {where} has {has}")
    return value


def _written(value: Any) -> str:
    """A value as text: a chat as its messages, other values as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(each, dict) and "role" in each for each in value):
        return "\n\n".join(f"{each['role']}: {_written(each.get('content', ''))}" for each in value)
    return json.dumps(value, ensure_ascii=False)

"""Tables and sections in Markdown that GitHub and mkdocs both read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

PAGE = re.compile(r"\s*\(docs/[a-z_/]+\.md\)")
"""A docstring's reference to a page. The site drops it, because the page is in the navigation."""
CODE = re.compile(
    r"(?<![\w`/])("
    r"(?:(?:GET|POST|PUT|DELETE) )?/v1/[\w/{}.-]*[\w}]"  # an endpoint
    r"|--[a-z][a-z-]+"  # a flag
    r"|[a-z]+(?:_[a-z0-9]+)+(?:\.[a-z_]+)*(?:=[\w.]+)?"  # a field
    r"|[A-Z]+(?:_[A-Z0-9]+)+(?:=\w+)?"  # an environment variable
    r'|\{"[^{}]*(?:\{[^{}]*\})?[^{}]*\}'  # an object
    r")"
)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. Empty if there are no rows."""
    lines = [f"| {' | '.join(map(cell, row))} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(header)} |", "|---" * len(header) + "|", *lines]) + "\n"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def prose(text: str) -> str:
    """Words of a docstring or a description. Names of the code are marked, all other markup is escaped."""
    return _outside_code(PAGE.sub("", text), lambda part: _outside_code(CODE.sub(r"`\1`", part), _escaped))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = map(change, parts[::2])
    return "".join(parts)


def _escaped(text: str) -> str:
    return re.sub(r"([*_<\[\]])", r"\\\1", text)


def sections(parts: Iterable[str]) -> str:
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"

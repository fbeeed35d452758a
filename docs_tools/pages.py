"""Converts a page of docs/ from GitHub's Markdown to the site's.

- A link to a file outside docs/ becomes a link into the repository if there is one, and otherwise the file's name.
- A list may follow a paragraph without a blank line, and its levels may be indented by two spaces.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BRANCH = os.environ.get("DOCS_BRANCH", "main")
LINK = re.compile(r"(?<!!)\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"^( *)(`{3,}|~{3,})")
ITEM = re.compile(r"^( *)([-*+]|\d+\.) ")


def for_site(markdown: str, page: Path, repository: str) -> str:
    """The page's Markdown for the site. `page`: path below docs/. `repository`: its URL, or empty."""
    folder = DOCS / page.parent
    markdown = outside_fences(markdown, lambda text: LINK.sub(lambda found: _link(found, folder, repository), text))
    return "\n".join(_with_lists(markdown.split("\n")))


def _link(found: re.Match[str], folder: Path, repository: str) -> str:
    """The link as it is, unless it leads to a file of the repository outside docs/."""
    text, link = found[1].replace("\n", " "), found[2]
    path, _, _ = link.partition("#")
    if not path or "://" in path or path.startswith(("/", "mailto:")):
        return found[0]
    target = (folder / path).resolve()
    if target.is_relative_to(DOCS) or not target.is_relative_to(ROOT) or not target.exists():
        return found[0]
    name = target.relative_to(ROOT).as_posix()
    if repository:
        kind = "tree" if target.is_dir() else "blob"
        return f"[{text}]({repository.rstrip('/')}/{kind}/{BRANCH}/{name})"
    said = text.strip("`").rstrip("/")
    is_its_name = name.endswith(said) or (text.startswith("`") and name.startswith(said))
    return f"`{name}`" if is_its_name else f"{text} `{name}`"


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """The text, with `change` applied to the parts outside code fences."""
    fence: str | None = None
    parts: list[list[str]] = [[]]
    """Alternating: lines outside a fence, lines inside a fence."""
    for line in markdown.split("\n"):
        mark = FENCE.match(line)
        if fence is None and mark:
            fence = mark[2]
            parts.append([line])
        elif fence is not None and mark and mark[2].startswith(fence):
            fence = None
            parts[-1].append(line)
            parts.append([])
        else:
            parts[-1].append(line)
    texts = ["\n".join(part) for part in parts]
    texts[::2] = [change(text) for text in texts[::2]]
    return "\n".join(text for text, part in zip(texts, parts, strict=True) if part)


def _with_lists(lines: list[str]) -> Iterator[str]:
    """Lists as Python-Markdown wants them: a blank line before each, and four spaces for each level."""
    fence: str | None = None
    indents: list[int] = []
    """Columns at which the text of each open list's items begins."""
    before = ""
    for line in lines:
        mark, item = FENCE.match(line), ITEM.match(line)
        column = len(line) - len(line.lstrip(" "))
        if fence is None and line.strip():
            while indents and column < indents[-1]:
                indents.pop()
        level = len(indents)
        if level == 0 and column >= 4:  # code
            item = None
        if fence is None and item and not before.startswith("|"):
            if before.strip() and level == 0 and not ITEM.match(before) and not before.startswith((" ", ">")):
                yield ""
            yield _moved(line, column, level)
            indents.append(item.end())
        else:
            yield _moved(line, min(column, indents[-1]), level) if line.strip() and indents else line
        if mark:
            fence = mark[2] if fence is None else None if mark[2].startswith(fence) else fence
        before = line


def _moved(line: str, column: int, level: int) -> str:
    """The line with `column` characters of indentation replaced by four spaces per level."""
    return " " * 4 * level + line[column:]

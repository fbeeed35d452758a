"""Hooks of mkdocs: what the pages of docs/ need to be read on the site as they are read on GitHub.

- A place `<!-- generated: NAME -->` gets what `python -m docs_tools.reference` has written.
- A link to a file outside docs/ becomes a link into the repository if `repo_url` is set, and otherwise the file's name.
- Lists may follow a paragraph without a blank line, and be indented by two spaces.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
GENERATED = Path(os.environ.get("DOCS_GENERATED", ROOT / ".scratch/reference"))
BRANCH = os.environ.get("DOCS_BRANCH", "main")
PLACE = re.compile(r"<!-- generated: (\w+) -->")
LINK = re.compile(r"(?<!!)\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"^( *)(`{3,}|~{3,})")
ITEM = re.compile(r"^( *)([-*+]|\d+\.) ")
LOG_BOOST = 0.3
"""How much a hit in the log counts in the search, against a hit on any other page."""


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    source = page.file.src_uri
    if source == "development/log.md":
        page.meta.setdefault("search", {"boost": LOG_BOOST})
    markdown = PLACE.sub(lambda place: _generated(place[1]), markdown)
    folder = Path(config.docs_dir) / Path(source).parent
    markdown = outside_fences(markdown, lambda text: LINK.sub(lambda found: _link(found, folder, config), text))
    return "\n".join(with_lists(markdown.split("\n")))


def _generated(name: str) -> str:
    file = GENERATED / f"{name}.md"
    if not file.exists():
        raise PluginError(f"{file} is missing: `make docs` writes it, by `python -m docs_tools.reference {GENERATED}`.")
    return file.read_text()


def _link(found: re.Match[str], folder: Path, config: MkDocsConfig) -> str:
    """The link as it is, unless it leads to a file of the repository outside docs/."""
    text, link = found[1].replace("\n", " "), found[2]
    path, _, _ = link.partition("#")
    if not path or "://" in path or path.startswith(("/", "mailto:")):
        return found[0]
    target = (folder / path).resolve()
    if target.is_relative_to(Path(config.docs_dir).resolve()) or not target.is_relative_to(ROOT) or not target.exists():
        return found[0]
    name = target.relative_to(ROOT).as_posix()
    if config.repo_url:
        kind = "tree" if target.is_dir() else "blob"
        return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/{BRANCH}/{name})"
    is_its_name = name.endswith(text.strip("`").rstrip("/"))
    return f"`{name}`" if is_its_name else f"{text} (`{name}`)"


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """The text, with the parts changed that are no code."""
    fence: str | None = None
    parts: list[list[str]] = [[]]
    """By turns what is outside of a fence and what is inside."""
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


def with_lists(lines: list[str]) -> Iterator[str]:
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
        if fence is None and item and not before.startswith("|"):
            if before.strip() and level == 0 and not ITEM.match(before) and not before.startswith((" ", ">")):
                yield ""
            yield _moved(line, column, level)
            indents.append(item.end())
        else:
            yield _moved(line, min(column, indents[-1]) if indents else 0, level) if line.strip() else line
        if mark:
            fence = mark[2] if fence is None else None if mark[2].startswith(fence) else fence
        before = line


def _moved(line: str, column: int, level: int) -> str:
    """The line, of which so many spaces are the indentation of its level."""
    return " " * 4 * level + line[column:]

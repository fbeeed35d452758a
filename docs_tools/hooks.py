"""Hooks of mkdocs: they put generated parts into their pages, and rewrite pages for Python-Markdown."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from docs_tools.pages import ROOT, for_site

GENERATED = Path(os.environ.get("DOCS_GENERATED", ROOT / ".scratch/reference"))
PLACE = re.compile(r"<!-- generated: (\w+) -->")
LOG_BOOST = 0.3
"""Weight of a search hit in the log. A hit on another page weighs 1."""


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    if page.file.src_uri == "development/log.md":
        page.meta.setdefault("search", {"boost": LOG_BOOST})
    markdown = PLACE.sub(lambda place: _generated(place[1]), markdown)
    return for_site(markdown, Path(page.file.src_uri), config.repo_url or "")


def _generated(name: str) -> str:
    file = GENERATED / f"{name}.md"
    if not file.exists():
        raise PluginError(f"{file} is missing: `make docs` writes it, by `python -m docs_tools.reference {GENERATED}`.")
    return file.read_text()

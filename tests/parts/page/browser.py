"""A real browser that looks at the page, and what must never happen there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.parts.page.pictures import CHROMIUM

HOSTILE = ["<img src=x onerror=window.hurt=1>", "\x1b[2J\x1b]0;x\x07", "\u202eevil", '"/../\\%2f', "z" * 1_000_000]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@contextmanager
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        flags = ["--no-sandbox", "--disable-dev-shm-usage", "--js-flags=--expose-gc", "--enable-precise-memory-info"]
        browser = started.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@contextmanager
def page_at(browser: Any, url: str, timeout_s: float = 30.0, **context: Any) -> Iterator[Any]:
    """A page on which nothing may go wrong."""
    wrong: list[str] = []
    page = browser.new_page(**context)
    page.set_default_timeout(1000 * timeout_s)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda told: wrong.append(told.text) if told.type in ("error", "warning") else None)
    page.goto(url)
    try:
        yield page
        assert page.evaluate("window.hurt") is None
    finally:
        page.close()
    # Chromium says so of every answer that is no success: a key that is asked for, a server that is gone.
    assert [each for each in wrong if "Failed to load resource" not in each] == []


def text(page: Any, part: str, selector: str = "main") -> str:
    """Text of the selected part of the page, as soon as `part` is in it."""
    is_there = "([s, part]) => document.querySelector(s)?.innerText.includes(part)"
    page.wait_for_function(is_there, arg=[selector, part], polling=200)
    return str(page.inner_text(selector))


def drawn(page: Any) -> int:
    """A measure of the canvas' content: the length of its image."""
    count = """() => document.querySelector("main canvas").toDataURL().length"""
    return int(page.evaluate(count))

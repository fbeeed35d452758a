"""Feeds on the page."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.parts.feeds.test_feeds import make, put, take, update
from tests.parts.feeds.test_stopped import have_tokens
from tests.parts.page.browser import HOSTILE, chromium, needs_browser, text
from tests.parts.page.test_page import SERVER, looking
from tests.parts.page.test_page import Feed as Page
from tests.support.waiting import eventually
from vllm_rollout.parts.feeds.with_page.http import ShownFeeds
from vllm_rollout.parts.page.http.events import event_of
from vllm_rollout.parts.page.http.plan import PagePlan


def rows(events: list[bytes]) -> list[dict]:
    (event,) = events
    name, data = event.decode().strip().split("\n")
    assert name == "event: feeds"
    return json.loads(data.removeprefix("data: "))["feeds"]


async def test_viewers_are_told_of_feeds_when_they_change(app, http) -> None:
    shown = ShownFeeds(app.state.feed_service)
    app.state.rollout_service.part(PagePlan).viewers.feeds.append(shown)
    assert rows(shown.everything()) == []
    await make(http)
    await put(http, 0, 3)
    await take(http)
    (feed,) = rows(shown.changes())
    assert (feed["id"], feed["num_batches"], feed["warning"]) == ("a", 1, None)
    assert feed["meter"]["trained"]["num_groups"] == 3
    assert shown.changes() == []
    await put(http, 3, 3)
    shown.everything()  # of a viewer who comes now
    assert len(rows(shown.changes())) == 1, "those who came before hear of it, too"


async def test_a_batch_and_viewers_are_warned_if_long_groups_are_dropped(app, http, engine) -> None:
    engine.step_s, engine.lengths = 0.005, {0: 400, 1: 400}
    await make(http, on_stale="drop", batch=8)
    await put(http, 0, 8)
    await have_tokens(engine, 16)
    await update(app, engine, "1")
    engine.lengths = {0: 1, 1: 1}
    await put(http, 8, 8)
    await update(app, engine, "2")
    await eventually(lambda: engine.num_aborted == 16)
    (warning,) = (await take(http))["warnings"]
    assert "long answers are underrepresented. Dropped groups are longer" in warning
    (feed,) = rows(ShownFeeds(app.state.feed_service).everything())
    assert feed["warning"] == warning


@needs_browser
@pytest.mark.thorough
async def test_the_page_shows_lengths_and_rewards_by_fate_and_a_warning(app, http) -> None:
    shown = ShownFeeds(app.state.feed_service)
    await make(http)
    await put(http, 0, 3)
    await take(http)
    (feed,) = rows(shown.everything())
    feed |= {"id": HOSTILE[0], "warning": "trained groups are short", "waits_for": "weights"}

    def look() -> str:
        with chromium() as browser, looking(browser, Page([SERVER, event_of("feeds", {"feeds": [feed]})])) as page:
            return text(page, "feed <img")

    said = await asyncio.to_thread(look)
    capacity = f"{feed['capacity']} more groups may start before the next update."
    waits = f"The next batch waits for weights with a new name. {capacity}"
    for part in ("1\nbatches", "trained\t3\t", "warning: trained groups are short", waits, "A batch takes 3"):
        assert part in said
    assert "dropped\t" not in said

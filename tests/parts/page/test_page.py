"""The page in a real browser, over a feed made by hand: what it shows, and that nothing in a feed can hurt it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse, StreamingResponse

from tests.kernel.http.conftest import serving
from tests.parts.page.browser import HOSTILE, chromium, drawn, needs_browser, page_at, text
from tests.support.waiting import eventually
from vllm_rollout.parts.page.http.events import event_of
from vllm_rollout.parts.page.http.page import page_router
from vllm_rollout.parts.pruning.rules.race_bias import AuditReport
from vllm_rollout.parts.pruning.rules.report import Prediction, signal_report

pytestmark = pytest.mark.thorough


def prompt(position: int, **more: Any) -> dict[str, Any]:
    """A group of 16 candidates of which half has ended."""
    lengths = [10 * (index + 1) for index in range(16)]
    ends = ["stop"] * 6 + ["length", "failed"] + ["running"] * 8
    told = {"id": f"q{position}", "position": position, "rank": position % 2, "status": "running", "started_s": 0.1}
    told |= {"ended_s": [1.0 + i for i in range(8)] + [None] * 8, "lengths": lengths, "ends": ends, "selected": []}
    return {**told, "over_s": None, "audit": False, **more}


def over(position: int, **more: Any) -> dict[str, Any]:
    ends = ["stop"] * 8 + ["surplus"] * 4 + ["pruned"] * 4
    rewards = [1.0] * 3 + [0.0] * 5 + [None] * 8
    told = {"status": "complete", "over_s": 9.5, "ends": ends, "ended_s": [1.0 + 0.5 * i for i in range(16)]}
    return prompt(position, **{**told, "selected": [*range(8)], "rewards": rewards, **more})


def rollout(id: str, *prompts: dict[str, Any], **more: Any) -> dict[str, Any]:
    told = {"rollout_id": id, "state": "running", "began": 1000.0, "seconds": None, "num_prompts": 64, "run": None}
    return {**told, "num_candidates": 1024, "detection_length": 40, "prompts": list(prompts), **more}


SERVER = event_of("server", {"version": "0", "num_ranks": 2, "now": 1000.0, "live": True})
RANKS = event_of("ranks", {"at": 1012.5, "ranks": [
    {"rank": 0, "state": "active", "running": 300, "waiting": 12, "kv": 0.5},
    {"rank": 1, "state": "dead", "running": 0, "waiting": 0, "kv": 0.0},
]})  # fmt: skip
ROUND = {"run": "r", "round": 2, "kind": "long", "deferred": ["a", "b"], "next_round": "short", "num_waiting": 2}
ROUND |= {"queue": ["a", "b"], "num_queued": 7}
RACE = [
    SERVER,
    event_of("rollout", rollout("first", *(over(i) for i in range(4)), state="over", seconds=10.0, num_prompts=4)),
    event_of("rollout", rollout("race", *(prompt(i) for i in range(63)), run="r", round=3, kind="short")),
    event_of("group", {"rollout_id": "race", "position": 63, "prompt": over(63)}),
    event_of("group", {"rollout_id": "race", "position": 5, "prompt": prompt(5, moves=[[0.1, 1], [4.5, 0]], rank=0)}),
    event_of("round", ROUND),
    event_of("rewards", {"rollout_id": "race", "rewards": [{"prompt_id": "q0", "index": 0, "reward": 1.0}]}),
    RANKS,
]  # fmt: skip


class Feed:
    """Tells every viewer the same, and what is added while it looks."""

    def __init__(self, events: list[bytes], key: str | None = None) -> None:
        self.events, self.key, self.texts = list(events), key, ""
        self.num_connected = 0
        self.without_texts: set[str] = set()
        self.slow: set[str] = set()
        """Rollouts whose texts are not told before they are taken out of it."""
        self.ends_after: int | None = None
        app = FastAPI()
        app.include_router(page_router())

        @app.get("/v1/rollouts/watch")
        async def watch(request: Request) -> Response:
            if key is not None and request.headers.get("authorization") != f"Bearer {key}":
                return Response('{"error": "Unauthorized"}', 401)
            self.num_connected += 1
            return StreamingResponse(self._tell(), media_type="text/event-stream")

        @app.get("/v1/rollouts/watch/{rollout_id}/{position}")
        async def texts(rollout_id: str, position: int) -> Any:
            if rollout_id in self.without_texts:
                return JSONResponse({"error": {"message": "the tokens are not here"}}, 404)
            await eventually(lambda: rollout_id not in self.slow)
            candidates = [{"index": i, "text": self.texts} for i in range(3)]
            return {"prompt_id": rollout_id, "prompt": self.texts, "candidates": candidates}

        @app.get("/v1/quality_head/report")
        async def report(detection_length: int) -> dict[str, Any]:
            predictions = [Prediction(i / 10, i / 10, i > 6, 1.0, "q") for i in range(10)]
            audit = AuditReport(num_labels=40.0, positive_ratio=0.25, raced_positive_ratio=0.5)
            told = {"signals": {"head": asdict(signal_report(predictions))}, "audit": asdict(audit)}
            return told | {"advice": {"reason": f"of {detection_length}"}}

        @app.get("/v1/quality_head/detection_lengths")
        async def lengths() -> dict[str, Any]:
            row = {"detection_length": 16, "auc": 0.71, "auc_error": 0.012, "saving_ratio": 0.46, "value": 0.19}
            return {"lengths": [row], "recommended": 16, "reason": "it is worth most"}

        @app.get("/v1/rollouts/prompts")
        async def prompts() -> dict[str, Any]:
            known = {"id": "hard", "key": "id:hard", "lengths": None, "success": {"rate": 0.04, "num_rewarded": 41.2}}
            return {"data": [known, {"id": "new", "key": "id:new", "lengths": None, "success": None}]}

        self.app = app

    async def _tell(self) -> AsyncIterator[bytes]:
        told = 0
        while told != self.ends_after:
            if told < len(self.events):
                told += 1
                yield self.events[told - 1]
            else:
                await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@contextmanager
def looking(browser: Any, feed: Feed, where: str = "", **context: Any) -> Iterator[Any]:
    """A page that has been told everything so far."""
    with serving(feed.app) as url, page_at(browser, f"{url}/rollouts{where}", **context) as page:
        yield page


@needs_browser
def test_now_shows_how_many_groups_wait_until_all_have_begun_or_nobody_reads(browser: Any) -> None:
    feed = Feed([SERVER, event_of("rollout", rollout("race", *(prompt(i) for i in range(3))))])
    with looking(browser, feed) as page:
        assert "61\ngroups wait for places" in text(page, "of 1,024 candidates run")
        feed.events.append(event_of("rollout", rollout("race", prompt(0), state="left", seconds=3.0)))
        assert "groups wait" not in text(page, "3.0\nseconds\n")


@needs_browser
def test_now_shows_groups_ranks_rounds_and_moves(browser: Any) -> None:
    feed = Feed(RACE)
    with looking(browser, feed) as page:
        told = text(page, "rank 1: dead")
        for part in (
            "12.5\nseconds so far",
            "1\nof 64 groups complete",
            "504\nof 1,024 candidates run",
        ):
            assert part in told
        assert "rank 0: active, 300 run, 12 wait" in told
        assert "round: short, 3 of r" in told
        assert "r\t2\tlong\t2\t2\tshort" in told
        assert "for a long round of r wait a, b and 5 more" in told
        assert "q5\t4.5 s\t0" in told
        assert "6 ended by themselves, 1 cut at max_tokens, 1 failed" in told
        assert "0.444\nmean reward" in told  # 3 of 8, and the one that was posted
        before = drawn(page)
        assert before > 20_000
        page.click("summary")
        feed.events.append(event_of("group", {"rollout_id": "race", "position": 0, "prompt": over(0, id="done")}))
        assert "done" in text(page, "2\nof 64 groups complete")
        feed.events.append(event_of("gone", {"rollout_ids": ["race"]}))
        text(page, "4\nof 4 groups complete")
        assert 0 < drawn(page) < before


@needs_browser
def test_of_thousands_of_groups_those_that_run_are_drawn_and_the_others_are_in_the_table(browser: Any) -> None:
    groups = [over(position) for position in range(2999)] + [prompt(2999, id="the last one")]
    event = event_of("rollout", rollout("big", *groups, num_prompts=3000, num_candidates=48_000))
    with looking(browser, Feed([SERVER, event, RANKS]), viewport={"width": 1200, "height": 800}) as page:
        text(page, "more groups are in the table")
        height = page.evaluate("document.querySelector('main canvas').height")
        assert 1000 < height < 8000
        assert drawn(page) > 20_000
        page.focus("main canvas")
        for _ in range(60):
            page.keyboard.press("ArrowDown")
        for _ in range(20):
            page.keyboard.press("ArrowRight")
        text(page, "the last one")
        page.evaluate("location.hash = '#step'")
        before = text(page, "drawn again at its end")
        assert "where tokens went" in before


@needs_browser
def test_a_group_is_opened_by_keyboard_and_has_a_place_of_its_own(browser: Any) -> None:
    feed = Feed(RACE)
    feed.texts = "so 2 + 2 = 5"
    with looking(browser, feed) as page:
        text(page, "rank 1: dead")
        page.focus("main canvas")
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        told = text(page, "so 2 + 2 = 5")
        assert page.evaluate("location.hash") == "#group/race/2"
        assert told.startswith("q2 · running")
        assert "6 70 tokens · cut at max_tokens" in told
        page.goto(page.url.replace("/2", "/63"))
        told = text(page, "q63 · complete")
        assert "0 10 tokens · ended by itself · comes back · reward 1.000" in told
        assert "15 160 tokens · stopped by its score" in told
        page.reload()
        text(page, "q63 · complete")
        page.keyboard.press("2")
        text(page, "where tokens went")
        assert page.evaluate("location.hash") == "#step/race"


@needs_browser
def test_a_group_never_shows_texts_of_another_one(browser: Any) -> None:
    feed = Feed([SERVER, event_of("rollout", rollout("mine", prompt(0, id="MY PROMPT"))), RANKS])
    feed.texts, feed.without_texts = "MY TEXT", {"theirs"}
    with looking(browser, feed, "#group") as page:
        text(page, "MY TEXT")
        feed.slow = {"mine"}
        page.wait_for_timeout(1100)
        with page.expect_request("**/watch/mine/0"):
            feed.events.append(RANKS)
        feed.events.append(event_of("rollout", rollout("mine", over(0, id="MY PROMPT"), state="over", seconds=9.0)))
        feed.events.append(event_of("rollout", rollout("theirs", prompt(0, id="THEIR PROMPT"))))
        assert "MY TEXT" not in text(page, "THEIR PROMPT")
        assert "MY TEXT" not in text(page, "the tokens are not here")
        with page.expect_response("**/watch/mine/0"):
            feed.slow = set()
        page.wait_for_timeout(1100)
        assert "MY TEXT" not in page.inner_text("main")
        feed.without_texts.clear()
        feed.events.append(RANKS)
        text(page, "MY TEXT")
        feed.without_texts = {"theirs"}
        page.wait_for_timeout(1100)
        feed.events.append(RANKS)
        assert "MY TEXT" not in text(page, "the tokens are not here")
        page.evaluate("location.hash = '#group/theirs/7'")
        assert "tokens" not in text(page, "There is no such group here")


@needs_browser
def test_a_step_says_who_ran_when_and_what_was_wasted(browser: Any) -> None:
    receipt = {"seconds": 10.0, "saved_tokens": 1234, "note": "text"}
    events = [
        *RACE[:1],
        event_of("rollout", rollout("it", *map(over, range(4)), state="over", seconds=10.0, receipt=receipt)),
    ]
    with looking(browser, Feed(events), "#step/it") as page:
        told = text(page, "receipt")
        assert "returned\t1,440\t26.5 %" in told
        assert "surplus\t1,680\t30.9 %" in told
        assert "pruned\t2,320\t42.6 %" in told
        assert "saved tokens\t1,234" in told
        # On each rank 32 candidates begin at 0.1 s and end from 1 to 8.5 s on, 4.65 of 10 s later on average.
        assert "53.5 %\nof rank 0's places stood empty\n53.5 %\nof rank 1's places stood empty" in told
        assert drawn(page) > 20_000


@needs_browser
def test_a_group_that_moved_was_on_both_ranks(browser: Any) -> None:
    moved = over(0, rank=1, moves=[[0.1, 0], [4.1, 1]])
    events = [SERVER, event_of("rollout", rollout("it", moved, state="over", seconds=8.5))]
    with looking(browser, Feed(events), "#step/it") as page:
        told = text(page, "rank 1's places")
    # Of 16 on the one 7 end before 4.1 s, 9 go on on the other: 52.8 s of 16 x 8.5 and 21.6 s of 9 x 8.5.
    assert "61.2 %\nof rank 0's places stood empty" in told
    assert "71.8 %\nof rank 1's places stood empty" in told


@needs_browser
def test_a_recording_without_times_says_why_there_is_no_timeline(browser: Any) -> None:
    old = {"rollout_id": "old", "state": "over", "began": None, "seconds": None, "num_prompts": 1, "num_candidates": 2}
    row = {"id": "q", "position": 0, "lengths": [5, 7], "ends": ["stop", "stop"], "scores": None}
    events = [
        event_of("server", {"now": 1.0, "live": False, "file": "old.jsonl"}),
        event_of("rollout", {**old, "prompts": [row]}),
    ]
    with looking(browser, Feed(events), "#step") as page:
        text(page, "This recording has no times")
        assert page.inner_text("#status") == "of the file old.jsonl"
        page.keyboard.press("4")
        text(page, "A file does not have what was learned")


def session(name: str, state: str, *turns: Any, ended_s: float | None = None, **more: Any) -> dict[str, Any]:
    told = {"id": name, "state": state, "ended_by": None, "num_turns": len(turns), "reward": None, "ended_s": ended_s}
    return {**told, "num_tokens": sum(turn[2] or 0 for turn in turns), "turns": turns, **more}


def agents(name: str, *sessions: dict[str, Any], **more: Any) -> dict[str, Any]:
    told = {"name": name, "id": f"id of {name}", "status": "running", "reason": None, "group_size": 2, "began": 1000.0}
    return {**told, "seconds": None, "num_to_begin": 1, "selected": [], "sessions": sessions, **more}


CONVERSATIONS = [
    session("a", "finished", (0.1, 2.0, 40), (4.0, 6.5, 61), ended_s=7.0, reward=1.0),
    session("b", "between_turns", (0.2, 3.0, 50)),
    session("c", "turn", (0.2, 1.0, 9), (5.0, None, None)),
    session("d", "void", ended_s=3.0),
]


@needs_browser
def test_sessions_are_rows_of_turns_without_a_rollout_too(browser: Any) -> None:
    over = {"status": "complete", "seconds": 9.0, "num_to_begin": 0, "selected": [0]}
    lost = session("e", "surplus", (0.1, 8.0, 99), ended_s=8.0)
    feed = Feed([SERVER, RANKS, event_of("sessions", agents("over", CONVERSATIONS[0], lost, **over))])
    with looking(browser, feed) as page:
        told = text(page, "id of over")
        assert "No rollout has begun" not in told
        assert "id of over · complete, 2 wanted, 3 turns; 1 finished, 1 stopped: the race was over; 9.0 s" in told
        feed.events.append(event_of("sessions", agents("open", *CONVERSATIONS)))
        told = text(page, "id of open")
        assert told.index("id of open") < told.index("id of over"), "groups that run stand first"
        assert (
            "id of open · running, 2 wanted, 5 turns; 1 generates, 1 waits for its tool, 1 finished, 1 void, "
            "1 not begun; 12.5 s"
        ) in told
        page.click("section summary >> nth=0")
        assert "a\t2\t101\t1.000\tfinished" in text(page, "waits for its tool\nc")
        page.focus("section summary >> nth=0")
        feed.events.append(event_of("sessions", agents("open", *CONVERSATIONS[:3], status="incomplete", reason="why")))
        text(page, "incomplete (why)")
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        feed.events.append(event_of("gone", {"rollout_ids": [], "sessions": ["over"]}))
        page.wait_for_function("() => !document.body.innerText.includes('id of over')")
        colors = """() => {
          const canvas = document.querySelector("section canvas"), pen = canvas.getContext("2d");
          const { data } = pen.getImageData(0, 0, canvas.width, canvas.height), found = new Set();
          for (let i = 0; i < data.length; i += 4) if (data[i + 3]) found.add(data.slice(i, i + 3).join());
          return found.size;
        }"""
        assert page.evaluate(colors) >= 3


@needs_browser
def test_a_group_of_sessions_is_opened_with_each_of_its_turns(browser: Any) -> None:
    turns = [(0.1, 2.0, 40, 100, 0, "first"), (4.5, 6.5, 61, 145, 98, "mended")]
    its = session("a", "finished", *turns, ended_s=7.0, reward=1.0, ended_by="finish")
    # Of ten turns that have ended the feed has the last two, and one runs.
    runs = session("b", "turn", (7.0, 8.0, 9, 50, 0, "extended"), (8.5, 9.0, 5, 70, 64, "extended"), (9.5, None, None))
    open_one = agents("open", its, {**runs, "num_turns": 10}, rank=1)
    lost = session("c", "surplus", (0.1, 8.0, 99, 10, None, "first"), ended_s=8.0)
    over = agents("over", CONVERSATIONS[0], lost, status="complete", seconds=8.0, selected=[0], num_to_begin=0)
    feed = Feed([SERVER, RANKS, *(event_of("sessions", group) for group in (over, open_one))])
    with looking(browser, feed) as page:
        text(page, "id of open")
        page.click("a:has-text('id of open')")
        told = text(page, "its prompt")
        assert page.evaluate("location.hash") == "#group/open"
        assert "running, 2 wanted, 12 turns; 1 generates, 1 finished, 1 not begun; 12.5 s, rank 1" in told
        assert "0 a · finished · by finish · at 7.0 s · 2 turns · 101 tokens · reward 1.000" in told
        assert "1\t0.1\t1.9\t–\t100\t0\t40\tfirst\n2\t4.5\t2.0\t2.5\t145\t98\t61\tmended" in told
        assert "10\t8.5\t0.5\t0.5\t70\t64\t5\textended\n11\t9.5\t–\t0.5\t–\t–\t–\t–" in told
        assert f"{100 * 162 / 365:.1f} %\nof prompts were cached" in told
        assert drawn(page) > 1000
        page.focus("a:has-text('before')")
        feed.events.append(event_of("ranks", {"at": 1013.5, "ranks": []}))
        text(page, "13.5 s, rank 1")
        assert page.evaluate("document.activeElement.textContent") == "before", "nothing but time has changed"
        feed.events.append(event_of("sessions", {**open_one, "sessions": [{**its, "reward": 0.25}, runs]}))
        text(page, "reward 0.250")
        page.focus("a:has-text('before')")
        page.keyboard.press("Enter")
        told = text(page, "99\ntokens of those stopped")
        assert "complete, 2 wanted, 3 turns; 1 finished, 1 stopped: the race was over; 8.0 s" in told
        assert "comes back" in told.split("1 c")[0]
        assert "comes back" not in told.split("1 c")[1]
        assert "50.5 %\ncame back" in told
        page.reload()
        text(page, "99\ntokens of those stopped")
        page.keyboard.press("2")
        text(page, "Groups of sessions are in the views now and a group.")
        feed.events.append(event_of("rollout", rollout("race", prompt(0))))
        text(page, "where tokens went")  # the name of a group is that of no rollout
    with looking(browser, Feed([SERVER, event_of("sessions", over)]), "#group") as page:
        text(page, "id of over")


@needs_browser
def test_a_file_with_many_groups_of_sessions_leaves_the_last_ones(browser: Any) -> None:
    over = [event_of("sessions", agents(f"g{i}", status="complete", seconds=1.0)) for i in range(80)]
    with looking(browser, Feed([SERVER, event_of("sessions", agents("slow")), *over])) as page:
        told = text(page, "id of g79")
        assert "48 more groups are not drawn" in told
        assert "id of slow" in told, "one that runs stays known"


@needs_browser
def test_what_sessions_are_called_cannot_hurt_and_many_are_bounded(browser: Any) -> None:
    names = [word[:256] for word in HOSTILE]
    groups = [
        agents(f"{i}", *(session(name, "turn", (0.1, None, None)) for name in names), id=names[i % 5])
        for i in range(20)
    ]
    hundred = (session(f"s{i}", "turn", (0.1, None, None)) for i in range(100))
    many = {**agents("many", *hundred), "reason": "\u202e<img src=x onerror=window.hurt=1>"}
    feed = Feed([*RACE, *(event_of("sessions", group) for group in [*groups, many])])
    with looking(browser, feed) as page:
        told = text(page, "5 more groups are not drawn.")
        assert "100 generates" in told
        assert "the first 32 are drawn" in told
        assert page.query_selector("main img") is None
        assert not {"\x1b", "\x07", "\u202e"} & set(told)
        page.click("section summary >> nth=1")
        assert "<img src=x" in text(page, "evil")
        assert page.query_selector("main img") is None
        turns = [(0.1, 1.0, 2, 3, 4, "<img src=x onerror=window.hurt=1>\u202e")] * 1000
        shown = agents("open", *(session(name, "turn", *turns) for name in names), id=names[0], reason=names[2])
        feed.events.append(event_of("sessions", shown))
        page.evaluate("location.hash = '#group/open'")
        told = text(page, "1,000\t0.1")
        assert page.query_selector("main img") is None
        assert not {"\x1b", "\x07", "\u202e"} & set(told)
        assert page.evaluate("document.querySelectorAll('*').length") < 5 * 65 * 10 + 200


@needs_browser
def test_two_rollouts_are_compared(browser: Any) -> None:
    longer = [over(i, lengths=[100] * 16) for i in range(2)]
    events = [*RACE[:2], event_of("rollout", rollout("second", *longer, state="over", seconds=25.0))]
    with looking(browser, Feed(events), "#compare") as page:
        told = text(page, "P50, P99, longest")
        assert "seconds\t10.0\t25.0" in told
        assert "P50, P99, longest\t50, 80, 80\t100, 100, 100" in told
        assert "mean reward\t0.375\t0.375" in told
        page.select_option("main select >> nth=0", "second")
        text(page, "seconds\t25.0\t25.0")
        assert page.evaluate("location.hash") == "#compare/second/second"


@needs_browser
def test_what_is_learned_is_made_of_rewards_that_are_there(browser: Any) -> None:
    with looking(browser, Feed(RACE), "#learned") as page:
        told = text(page, "10 to")
        assert "mean reward" in told
        assert "1.000" in told.split("10 to")[1].splitlines()[0]
        assert "head\t1.000\t1.000\t0.105\t3\t7" in text(page, "of 40")
        assert "25.0 % of 40 labels are right, 50.0 % elsewhere" in text(page, "hard")
        assert "16\t0.710\t0.012\t46.0 %\t0.19" in text(page, "Best: 16")
        assert "hard\t4.0 %\t41.2\t–" in page.inner_text("main")
        page.wait_for_selector("main .uplot")


@needs_browser
def test_candidates_of_equal_length_are_in_one_row_of_what_is_learned(browser: Any) -> None:
    group = over(0, lengths=[10] * 6 + [20, 30] + [5] * 8)
    with looking(browser, Feed([SERVER, event_of("rollout", rollout("equal", group)), RANKS]), "#learned") as page:
        told = text(page, "10 tokens\t6\t0.500")
        assert "20 to 30 tokens\t2\t0.000" in told
        assert told.count(" tokens\t") == 2


@needs_browser
def test_a_rollout_without_a_group_says_so(browser: Any) -> None:
    with looking(browser, Feed([SERVER, event_of("rollout", rollout("new")), RANKS]), "#group/new") as page:
        text(page, "No group of this rollout has begun.")


@needs_browser
@pytest.mark.parametrize("where", ["#constructor/x", "#%", "#now/unknown", "#group/race/x"])
def test_an_address_that_nobody_wrote_leaves_the_page_alive(browser: Any, where: str) -> None:
    with looking(browser, Feed(RACE), where) as page:
        text(page, "live", "#status")
        page.keyboard.press("1")
        page.wait_for_selector("nav a[aria-current=page]")


@needs_browser
def test_one_that_runs_stays_known_however_many_end_meanwhile(browser: Any) -> None:
    ended = [event_of("rollout", rollout(f"short-{i}", over(0), state="over", seconds=1.0)) for i in range(80)]
    with looking(browser, Feed([SERVER, event_of("rollout", rollout("slow", prompt(0))), *ended])) as page:
        page.wait_for_selector("#rollout option[value=short-79]", state="attached")
        known = page.evaluate("[...document.querySelector('#rollout').options].map((one) => one.value)")
        assert "slow" in known
        assert len(known) == 65  # with "the newest"


@needs_browser
def test_charts_that_are_drawn_anew_leave_nothing_behind(browser: Any) -> None:
    feed = Feed(RACE)
    with looking(browser, feed, "#step") as page:
        session = page.context.new_cdp_session(page)

        def listeners_after(num_redraws: int) -> int:
            for _ in range(num_redraws):
                page.evaluate("document.querySelector('main .uplot').dataset.old = 1")
                lengths = [len(feed.events)] * 16
                told = {"rollout_id": "race", "position": 7, "prompt": prompt(7, lengths=lengths)}
                feed.events.append(event_of("group", told))
                page.locator("main .uplot:not([data-old])").wait_for()  # without a handle, which would keep it
            page.evaluate("gc()")
            return int(session.send("Memory.getDOMCounters")["jsEventListeners"])

        page.wait_for_selector("main .uplot")
        before = listeners_after(2)
        assert listeners_after(12) < before + 40  # a chart has 9


@needs_browser
@pytest.mark.parametrize("name", HOSTILE, ids=["html", "ansi", "rtl", "path", "megabyte"])
def test_hostile_words_are_shown_and_do_nothing(browser: Any, name: str) -> None:
    row = rollout(name[:200], over(0, id=name[:256]), state="over", seconds=1.0, run=name[:200], round=1, kind="short")
    feed = Feed([SERVER, event_of("rollout", row), RANKS])
    feed.texts = name
    with looking(browser, feed) as page:
        assert "\u202e" not in text(page, "round: short")
        page.focus("main canvas")
        page.keyboard.press("Enter")
        told = text(page, "0 10 tokens")
        page.wait_for_selector("article pre" if "/" not in name else "article")
        assert page.query_selector("main img") is None
        assert not {"\x1b", "\x07", "\u202e"} & set(page.inner_text("main"))
        assert len(page.inner_text("main")) < 500_000
        assert "15 160 tokens" in told
        page.keyboard.press("5")
        text(page, "P50, P99, longest")


@needs_browser
@pytest.mark.parametrize("view", ["now", "step", "group", "learned", "compare"])
def test_every_view_fits_a_phone_in_the_dark(browser: Any, view: str) -> None:
    with looking(browser, Feed(RACE), f"#{view}", viewport={"width": 360, "height": 740}, color_scheme="dark") as page:
        page.wait_for_function("() => document.querySelector('main').innerText.length > 20")
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(int(part) for part in ground[4:-1].split(",")) < 40


@needs_browser
def test_a_page_of_2048_candidates_answers_keys_while_all_of_them_change(browser: Any) -> None:
    race = rollout("race", *(prompt(i) for i in range(128)), num_prompts=128, num_candidates=2048)
    feed = Feed([SERVER, event_of("rollout", race), RANKS])
    shows = {"2": "where tokens went", "3": "q0 · running", "4": "mean reward", "5": "Two rollouts", "1": "as a table"}
    with looking(browser, feed) as page:
        text(page, "1,024\nof 2,048 candidates run")
        for number, (key, part) in enumerate(shows.items()):
            for i in range(128):
                changed = prompt(i, lengths=[20 + number] * 16, rewards=[1.0] * 16)
                feed.events.append(event_of("group", {"rollout_id": "race", "position": i, "prompt": changed}))
            page.keyboard.press(key)
            text(page, part)
            assert page.evaluate("document.querySelectorAll('*').length") < 400
        text(page, f"{24 * 2048:,}\ntokens")
        page.click("summary")
        text(page, "q127\t")
        assert page.evaluate("document.querySelectorAll('*').length") < 400 + 128 * 8


def hour(num_ticks: int) -> Iterator[list[bytes]]:
    """Ticks of half a second each: a rollout of 8 groups of 16 each ten seconds, moves, rewards, rounds."""
    over_ones: list[str] = []
    for tick in range(num_ticks):
        id, age = f"rollout-{tick // 20}", tick % 20
        if age == 0:
            yield [event_of("rollout", rollout(id, *(prompt(i) for i in range(8)), began=tick / 2))]
        elif age < 19:
            moved = prompt(age % 8, lengths=[tick + i for i in range(16)], moves=[[0.1, 1], [age / 2, 0]])
            yield [event_of("group", {"rollout_id": id, "position": age % 8, "prompt": moved})]
        else:
            over_ones.append(id)
            gone = [over_ones.pop(0)] if len(over_ones) > 64 else []
            ended = rollout(id, *(over(i) for i in range(8)), state="over", seconds=9.5)
            rewards = [{"prompt_id": "q0", "index": 0, "reward": 1.0}]
            yield [
                event_of("rollout", ended),
                event_of("rewards", {"rollout_id": id, "rewards": rewards}),
                event_of("round", {**ROUND, "round": tick}),
                event_of("gone", {"rollout_ids": gone}),
            ]


@needs_browser
def test_an_hour_of_events_leaves_no_more_behind_than_half_an_hour(browser: Any) -> None:
    feed, ticks = Feed([SERVER]), hour(7200)
    with looking(browser, feed) as page:
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")

        def left_after_half() -> dict[str, float]:
            for view in range(18):  # each twice, and `now` between them; 100 s in each
                for events in islice(ticks, 200):
                    feed.events += [*events, RANKS]
                page.keyboard.press(str(1 + view // 2 % 5 if view % 2 else 1))
                page.wait_for_function("(id) => !!document.querySelector(`#rollout [value=${id}]`)", arg=last(feed))
            page.keyboard.press("1")
            text(page, "rank 1: dead")
            session.send("HeapProfiler.collectGarbage")
            return {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}

        half, whole = left_after_half(), left_after_half()
    assert next(ticks, None) is None
    for name, most in {
        "Nodes": 1.25,
        "JSEventListeners": 1.25,
        "JSHeapUsedSize": 1.5,
    }.items():  # one left per tick: 5 times
        assert whole[name] <= most * half[name], name


def last(feed: Feed) -> str:
    """Id of the newest rollout."""
    began = (event for event in reversed(feed.events) if event.startswith(b"event: rollout\n"))
    return str(json.loads(next(began).split(b"data: ")[1])["rollout_id"])


ENDS_OF = """async (how) => {
  const { fit, ...draw } = await import(new URL("rollouts/assets/draw.js", location));
  const { ENDS } = await import(new URL("rollouts/assets/state.js", location));
  return [...ENDS, ...(how === "strip" ? ["empty"] : [])].map((end) => {
    const pen = fit(document.createElement("canvas"), 40, 40);
    how === "strip" ? draw.strip(pen, 5, 5, 30, 20, end) : draw.bar(pen, 5, 35, 7, 30, end);
    const { data } = pen.getImageData(0, 0, 40, 40), inside = 4 * (40 * 20 + 8);
    const is = (at) => [0, 1, 2, 3].every((c) => data[at + c] === data[inside + c]);
    return Array.from({ length: 1600 }, (_, i) => (is(4 * i) ? "#" : ".")).join("");
  });
}"""
"""Pixels that are as one within: shapes without what colour they have."""


@needs_browser
@pytest.mark.parametrize("how", ["bar", "strip"])
def test_ends_differ_in_shape_not_only_in_colour(browser: Any, how: str) -> None:
    with looking(browser, Feed(RACE)) as page:
        shapes = page.evaluate(ENDS_OF, how)
    assert len(shapes) == 7 + (how == "strip")
    assert len(set(shapes)) == len(shapes)


COLOR_AT = """([x, y]) => {
  const canvas = document.querySelector("main canvas");
  const pen = new OffscreenCanvas(6, 6).getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, x < 0 ? -canvas.width - x : -x, -y);
  const near = pen.getImageData(0, 0, 6, 6).data;
  const colors = Array.from({ length: 36 }, (_, i) => near.slice(4 * i, 4 * i + 3).join());
  return colors.sort((a, b) => colors.filter((c) => c === b).length - colors.filter((c) => c === a).length)[0];
}"""
"""Script for the commonest colour at a point of the canvas."""


@needs_browser
def test_empty_places_are_shaded_and_all_is_drawn_anew_when_the_system_turns_dark(browser: Any) -> None:
    ended = {"ends": ["stop"] * 16, "ended_s": [5.0] * 15 + [9.0]}
    feed = Feed([SERVER, event_of("rollout", rollout("it", over(0, **ended), state="over", seconds=10.0))])
    ran, empty = [300, 90], [-200, 90]  # 16 places of 6 pixels: the last one runs until 5 s of 10
    with looking(browser, feed, "#step/it", color_scheme="light") as page:
        text(page, "48.5 %\nof rank 0's places stood empty")
        assert page.evaluate(COLOR_AT, ran) == "0,131,95"
        assert page.evaluate(COLOR_AT, empty) == "223,226,229"
        assert page.evaluate(COLOR_AT, [-30, 90]) == page.evaluate(COLOR_AT, empty)
        assert page.evaluate(COLOR_AT, [-200, 2]) == "0,131,95"
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(f"(at) => ({COLOR_AT})(at) === '47,191,147'", arg=ran)
        assert page.evaluate(COLOR_AT, empty) == "46,52,58"


@needs_browser
def test_a_feed_that_ends_is_read_again_from_the_start(browser: Any) -> None:
    feed = Feed(RACE)
    feed.ends_after = len(RACE)
    with looking(browser, feed) as page:
        text(page, "not connected: the server has ended the feed", "#status")
        feed.events = [SERVER, event_of("rollout", rollout("new", over(0), num_prompts=1))]
        feed.ends_after = None
        text(page, "1\nof 1 group complete")
        text(page, "live", "#status")
        assert feed.num_connected >= 2


@needs_browser
def test_a_key_is_asked_for_and_kept_for_the_session(browser: Any) -> None:
    with looking(browser, Feed(RACE, key="secret")) as page:
        for word in ("wrong", "secret"):
            page.wait_for_selector("dialog[open]")
            page.fill("dialog input", word)
            page.click("dialog button")
        text(page, "rank 1: dead")
        page.reload()
        text(page, "rank 1: dead")
        assert page.query_selector("dialog[open]") is None

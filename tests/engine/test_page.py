"""The page in a real browser over a real server of two emulated ranks: what races, moves, waits, is rewarded and dies
is what stands there. The last test kills a rank."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from fastapi import FastAPI

from benchmarks.kills.ranks import rank_processes
from tests.engine.conftest import Server, emulating, serve_command
from tests.engine.run_rounds import make_run, play
from tests.kernel.http.conftest import serving
from tests.parts.page.browser import HOSTILE, chromium, drawn, needs_browser, page_at, text
from vllm_rollout.parts.emulation.tokens import succeeded
from vllm_rollout.parts.page.http.page import page_router
from vllm_rollout.parts.page.watching.recorded_feed import RecordedFeed

pytestmark = needs_browser
DEVICE = {"step": {"ms": 40.0}, "lengths": {"log_normal": {"mean": 100, "sigma": 0.7, "cap": 250}}}
LINE = "-" * 1_000_000
"""A long text of few tokens."""


@pytest.fixture(scope="module")
def server(default_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    flags = ["--data-parallel-size", "2", "--api-server-count", "1", "--max-num-seqs", "512"]
    record = folder / "trace.jsonl"
    flags += ["--max-model-len", "32768", "--rollout-record", str(record)]
    with Server(serve_command(default_model, *flags, *emulating(folder, DEVICE)), folder / "server.log") as server:
        server.record = record
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    with page_at(browser, f"{server.url}/rollouts", timeout_s=60) as page:
        text(page, "live", "#status")
        yield page


def race(server: Server, name: str, num_groups: int = 64, **body: Any) -> dict[str, Any]:
    """Race 16 candidates of each group for the first 8."""
    prompts = [{"id": f"{name}-{i}", "prompt": f"What is {i} + 17?"} for i in range(num_groups)]
    body |= {"pruning": {"detection_length": 16, "mode": "shadow"}, "include": ["text"]}
    return server.rollout(prompts=prompts, group_size=8, redundancy=8, sampling_params={"seed": 1}, **body)


def both_ranks_run(page: Any) -> str:
    """Text of the page as soon as each rank has candidates, and the server knows the rank of each group."""
    told = "document.querySelector('main').innerText"
    page.wait_for_function(f"() => [0, 1].every((rank) => RegExp(`rank ${{rank}}: active, [1-9]`).test({told}))")
    return str(page.inner_text("main"))


def test_a_race_of_64_groups_is_seen_in_every_view(server: Server, page: Any) -> None:
    small = race(server, "small", 1)
    with ThreadPoolExecutor(1) as pool:
        racing = pool.submit(race, server, "race")
        assert "of 1,024 candidates run" in both_ranks_run(page)
        before = drawn(page)
        assert server.http.post("/v1/engines/1/drain").json()["num_moved"] > 0
        assert re.search(r"race-\d+\t[\d.]+ s\t0", text(page, "to rank"))
        assert "rank 1: drained, 0 run" in text(page, "rank 1: drained")
        server.http.post("/v1/engines/1/restore").raise_for_status()
        answer = racing.result()
    assert "0\nof 1,024 candidates run" in text(page, "64\nof 64 groups complete")
    assert drawn(page) != before
    each = [(group["prompt_id"], t) for group in answer["groups"] for t in group["trajectories"]]
    rewards = {(prompt_id, t["index"]): succeeded(t["token_ids"]) for prompt_id, t in each}
    posted = server.reward(answer, lambda prompt_id, t: rewards[prompt_id, t["index"]])["results"]
    known = [rewards[r["prompt_id"], r["index"]] for r in posted if r["status"] == "accepted"]  # those with a score
    text(page, f"{sum(known) / len(known):.3f}\nmean reward")

    page.keyboard.press("2")
    told = text(page, "receipt")
    assert f"returned\t{answer['usage']['returned_tokens']:,}\t" in told
    assert f"saved tokens\t{answer['receipt']['saved_tokens']:,}" in told
    assert "of rank 0's places stood empty" in told
    assert "of rank 1's places stood empty" in told
    page.select_option("#rollout", small["id"])  # of one group, so of one rank, as a receipt counts
    text(page, f"{100 * small['receipt']['bubble']:.1f} %\nof rank")
    page.select_option("#rollout", answer["id"])
    text(page, f"returned\t{answer['usage']['returned_tokens']:,}\t")

    page.keyboard.press("3")
    told = text(page, "race-0 · complete")
    page.wait_for_selector("article pre")
    said = page.eval_on_selector_all("article pre", "all => all.map((one) => one.textContent)")
    assert len(said) == 16
    for trajectory in answer["groups"][0]["trajectories"]:
        index, reward = trajectory["index"], float(succeeded(trajectory["token_ids"]))
        assert f"{index} {trajectory['num_tokens']} tokens · ended by itself · comes back · score" in told
        assert f" · reward {reward:.3f}" in told.split(f"\n{index} ")[-1].split("\n")[0]
        if trajectory["text"].isprintable():
            assert said[index] == trajectory["text"]

    page.keyboard.press("4")
    report = server.http.get("/v1/quality_head/report", params={"detection_length": 16}).json()
    confidence = report["signals"]["confidence"]
    right, wrong = confidence["num_positive"], confidence["num_negative"]
    assert (right, wrong) == (sum(known), len(known) - sum(known))
    told = text(page, "confidence\t")
    assert f"confidence\t{confidence['auc']:.3f}\t" in told
    assert f"\t{right}\t{wrong}\n" in told
    assert "tokens\t" in told.split("mean reward")[1]

    page.keyboard.press("5")
    told = text(page, "P50, P99, longest")
    assert f"tokens\t{small['usage']['generated_tokens']:,}\t{answer['usage']['generated_tokens']:,}" in told
    assert "groups complete\t1\t64" in told


def test_what_runs_is_read_as_it_grows(server: Server, page: Any) -> None:
    body = {"prompts": [{"id": "long", "prompt": "Count."}], "group_size": 1, "redundancy": 1}
    with closing(
        server.events(**body, stream_tokens=100, sampling_params={"max_tokens": 4000, "ignore_eos": True})
    ) as events:
        next(event for event in events if event["type"] == "tokens")
        page.keyboard.press("3")
        text(page, "long · running")
        grown = "document.querySelectorAll('article pre').length === 2"
        for start in ("", "… "):  # from its first token on, and as soon as there are many, the newest
            page.wait_for_function(
                f"() => {grown} && document.querySelector('article pre').innerText.startsWith('{start}')"
            )
            said = page.inner_text("article pre")
            page.wait_for_function("(said) => document.querySelector('article pre').innerText !== said", arg=said)


def test_a_round_is_shown_with_the_prompts_that_wait(server: Server, page: Any) -> None:
    run = make_run(server, "tail", group_size=2, prompts_per_round=8, prompt_speculation=1.5)
    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(play, server, run)
        assert "of 12 groups complete" in text(page, "round: short, 0 of tail")
        answer = playing.result()
    assert len(answer["deferred"]) == 4
    told = text(page, "rounds")
    assert f"tail\t0\tshort\t4\t{answer['num_waiting']}\t{answer['next_round']}" in told
    assert f"for a long round of tail wait {', '.join(answer['deferred'])}" in told
    page.keyboard.press("2")
    text(page, "deferred\t")


def test_sessions_are_seen_with_their_turns(server: Server, browser: Any, page: Any) -> None:
    made = server.http.post("/v1/groups", json={"group_size": 2, "redundancy": 1, "cut_turn": "goes_on"}).json()
    model = server.http.get("/v1/models").json()["data"][0]["id"]
    text(page, f"{made['id']} · running, 2 wanted, 0 turns; 3 not begun")
    said = {}

    def turn(session: str, words: str, max_tokens: int) -> dict[str, Any]:
        messages = [*said.get(session, []), {"role": "user", "content": words}]
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "seed": 1}
        answer = server.http.post("/v1/chat/completions", json=body, headers={"x-session-id": session}).json()
        choice: dict[str, Any] = answer["choices"][0]
        said[session] = [*messages, choice["message"]]
        return choice

    one, two, loser = made["to_begin"]
    for session in (one, two):
        turn(session, "What is 17 + 25?", 20)
    text(page, "2 turns; 2 waits for its tool, 1 not begun")
    turn(one, "And twice that?", 20)
    with ThreadPoolExecutor(1) as pool:
        losing = pool.submit(turn, loser, "Count to a million.", 4000)
        text(page, "3 turns; 1 generates, 2 waits for its tool")
        page.reload()
        text(page, "3 turns; 1 generates, 2 waits for its tool")
        for session, reward in ((one, 1.0), (two, 0.0)):
            server.http.post(f"/v1/sessions/{session}/finish", json={"reward": reward}).raise_for_status()
        assert losing.result()["stop_reason"] == "surplus"
    over = f"{made['id']} · complete, 2 wanted, 4 turns; 2 finished, 1 stopped: the race was over; "
    of_file = FastAPI()
    of_file.include_router(RecordedFeed(server.record).router())
    of_file.include_router(page_router())
    with serving(of_file) as url, page_at(browser, f"{url}/rollouts", timeout_s=60) as recorded:
        drawings = []
        for each in (page, recorded):
            told = text(each, over)
            each.click("section summary")
            assert f"{one}\t2\t40\t1.000\tfinished" in text(each, f"{two}\t1\t20\t0.000\tfinished")
            each.click(f"a:has-text('{made['id']}')")
            cards = text(each, "its prompt").split("rank ")[1]
            drawings.append((told.split(over)[1].split("\n")[0], cards, drawn(each)))
    assert drawings[0] == drawings[1]
    assert re.search(r"\n2\t[\d.]+\t[\d.]+\t[\d.]+\t\d+\t[1-9]\d*\t20\t(extended|mended)", drawings[0][1])


def test_hostile_prompts_of_a_real_server_do_nothing(server: Server, page: Any) -> None:
    words = [*HOSTILE[:-1], LINE]
    prompts = [{"id": f"{i}{word[:200]}", "prompt": f"{word}?"} for i, word in enumerate(words)]
    answer = server.rollout(prompts=prompts, group_size=2, sampling_params={"seed": 1, "max_tokens": 8})
    text(page, "5\nof 5 groups complete")
    page.click("summary")
    assert "<img src=x" in text(page, "complete\t0")
    for position, word in enumerate(words):
        page.evaluate("(to) => { location.hash = to; }", f"#group/{answer['id']}/{position}")
        text(page, f"{position}{word[0] if word.isprintable() else ''}")
        page.wait_for_selector("article pre")
        assert page.query_selector("main img") is None
        assert not {"\x1b", "\x07", "\u202e"} & set(page.inner_text("main"))
    assert "(1,000,0" in page.inner_text("main")
    assert len(page.inner_text("main")) < 10_000


def test_a_rank_that_dies_is_shown_and_its_groups_go_on_elsewhere(server: Server, page: Any) -> None:
    _, victim = rank_processes(server._process.pid)
    with ThreadPoolExecutor(1) as pool:
        racing = pool.submit(race, server, "dies", on_engine_failure="retry")
        both_ranks_run(page)
        os.kill(victim.pid, signal.SIGKILL)
        text(page, "rank 1: dead")
        answer = racing.result()
    assert {group["status"] for group in answer["groups"]} == {"complete"}
    told = text(page, "64\nof 64 groups complete")
    assert re.search(r"dies-\d+\t[\d.]+ s\t0", told)
    assert page.inner_text(".rank.dead").startswith("rank 1: dead, 0 run")
    assert page.inner_text("#status") == "live"

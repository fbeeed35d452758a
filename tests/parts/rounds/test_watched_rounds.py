"""Rounds as viewers of the page are told of them, and their receipts."""

from __future__ import annotations

import httpx

from tests.kernel.http.conftest import make_app, serving
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.page.test_watch import is_over, watching
from tests.parts.rounds.test_runs import look, make, prompts, rewarded
from vllm_rollout.parts.page.http import viewers


async def test_rounds_are_told_with_their_fates_and_the_first_of_the_queue(engine: FakeEngine, monkeypatch):
    monkeypatch.setattr(viewers, "MAX_QUEUE", 1)
    engine.step_s = 0.002
    with serving(make_app(engine)) as url:
        async with watching(url) as viewer, httpx.AsyncClient(base_url=url, timeout=30) as http:
            run = {
                "id": "r",
                "group_size": 2,
                "prompts_per_round": 2,
                "prompt_speculation": 2,
                "response_speculation": 1,
            }
            assert (await http.post("/v1/runs", json=run)).status_code == 201
            prompts = [{"id": f"q{i}", "prompt": f"prompt {i}"} for i in range(4)]
            await http.post("/v1/runs/r/rounds", json={"prompts": prompts})
            told = await viewer.until(lambda name, _: name == "round")
            row = await viewer.until(is_over)
    assert (row["run"], row["round"], row["kind"]) == ("r", told["round"], "short")
    fates = [prompt["status"] for prompt in row["prompts"]]
    assert (fates.count("complete"), fates.count("deferred")) == (2, 2)
    assert (told["run"], told["num_waiting"], len(told["deferred"])) == ("r", 2, 2)
    assert (told["queue"], told["num_queued"]) == (told["deferred"][:1], 2)


async def test_groups_without_variance_are_replaced_from_the_reserve(http: httpx.AsyncClient) -> None:
    await make(http, filter="zero_variance")
    flat = {"q0", "q2", "q4"}
    done, told = await rewarded(http, flat, prompts=prompts(0, 6), reserve=prompts(6, 5))
    assert set(done["filtered"]) == set(told) <= flat
    assert told
    for name in ("generated_tokens", "returned_tokens", "wasted_tokens", "resumed_tokens"):
        assert done["receipt"][name] == done["usage"][name], "a filtered group is wasted"
    run = await look(http)
    assert run["history"][0]["num_returned"] == 4
    assert not set(run["queue"]) & set(done["filtered"])
    assert set(done["deferred"]) == set(run["queue"])
    assert run["totals"]["num_filtered"] == len(told)
    seen = [*done["filtered"], *done["deferred"], *done["unstarted"]]
    assert len(seen) == len(set(seen)) == 11 - 4

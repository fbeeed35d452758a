"""Rollouts with pruning: their receipts, and rewards as viewers are told of them."""

from __future__ import annotations

import httpx

from tests.kernel.http.conftest import make_app, serving
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.page.test_receipts import assert_checked
from tests.parts.page.test_watch import body, watching


async def test_lengths_of_a_group_that_pruning_may_have_cut_are_not_checked(engine, app):
    fields = {"early_stop": False, "redundancy": 2, "pruning": {"detection_length": 500}}
    await assert_checked(engine, app, fields, is_checked=False)


async def test_rewards_that_a_trainer_posts_are_told_also_to_who_comes_later(engine: FakeEngine):
    fields = {"pruning": {"detection_length": 4, "mode": "shadow"}, "early_stop": False}
    rewards = {
        "rewards": [{"prompt_id": "a", "index": 0, "reward": 1.0}, {"prompt_id": "no", "index": 0, "reward": 1.0}]
    }
    engine.lengths = dict.fromkeys(range(4), 20)
    with serving(make_app(engine)) as url:
        async with watching(url) as viewer, httpx.AsyncClient(base_url=url) as http:
            await viewer.until(lambda name, _: name == "server")
            id = (await http.post("/v1/rollouts", json=body("a", **fields))).json()["id"]
            assert (await http.post(f"/v1/rollouts/{id}/rewards", json=rewards)).status_code == 200
            told = await viewer.until(lambda name, _: name == "rewards")
            async with watching(url) as later:
                assert await later.until(lambda name, _: name == "rewards") == told
    assert told == {"rollout_id": id, "rewards": [{"prompt_id": "a", "index": 0, "reward": 1.0}]}

"""Random lives of feeds on disk: prompts, batches, updates, clients that leave, full disks, kills, deletions."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.http.conftest import http_of
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.feeds.test_feeds import ids, make, prompts, take, update
from tests.parts.feeds.test_restarts import Start, fill_disk, start  # noqa: F401
from tests.support.waiting import eventually
from vllm_rollout.kernel.rules.types import NOT_FINITE
from vllm_rollout.parts.feeds.http import live
from vllm_rollout.parts.feeds.http.body import BatchRequest
from vllm_rollout.parts.feeds.rules.finite import MAX_BAD_VERSIONS


class Life:
    """One feed, and the prompts that have not come back."""

    def __init__(self, begin: Start, seed: str) -> None:
        self.chance, self._begin = random.Random(seed), begin
        self.terms = {
            "on_stale": self.chance.choice(["finish", "defer", "wait", "drop"]),
            "on_update": self.chance.choice(["keep", "stop"]),
            "batch": self.chance.randint(1, 3), "max_staleness": self.chance.randint(0, 2), "redundancy": 1,
        }  # fmt: skip
        self.out: set[str] = set()
        self.step = self.num_prompts = self.num_batches = self.num_bad = 0
        self.last_put: dict[str, Any] = {}
        self.boot("step-0")

    def boot(self, version: str | None = None) -> None:
        self.engine = FakeEngine(step_s=0.001, weight_version=version)
        self.app = self._begin(self.engine)
        write, chance = self.service._store.left, self.chance

        def slow(*args: Any) -> None:
            time.sleep(chance.random() * 0.01)
            write(*args)

        self.service._store.left = slow  # type: ignore[method-assign, union-attr]
        self.http = http_of(self.app)

    @property
    def service(self) -> Any:
        return self.app.state.feed_service

    async def put(self) -> None:
        if self.chance.random() < 0.7 or not self.last_put:
            first, count = self.num_prompts, self.chance.randint(1, 4)
            self.num_prompts += count
            self.last_put = {"prompts": prompts(first, count), "idempotency_key": f"p{first}"}
            self.out.update(each["id"] for each in self.last_put["prompts"])
        response = await self.http.post("/v1/feeds/a/prompts", json=self.last_put)
        assert response.status_code == 200, response.text

    async def update(self) -> None:
        self.step += 1
        await update(self.app, self.engine, f"step-{self.step}")

    def came(self, batch: dict[str, Any]) -> None:
        assert batch["failed"] == []
        bound = self.terms["max_staleness"]
        assert self.terms["on_stale"] == "finish" or 0 <= batch["max_staleness"] <= bound
        back = [*ids(batch), *batch["dropped"]]
        assert self.out.issuperset(back), "no prompt comes back twice"
        self.out.difference_update(back)

    async def take(self) -> None:
        self.num_batches += 1
        body = {"idempotency_key": f"b{self.num_batches}", "drain": self.chance.random() < 0.5, "timeout_s": 0.05}
        if self.chance.random() < 0.2:
            fill_disk(self.app)
            assert (await self.http.post("/v1/feeds/a/batches", json=body)).status_code in (504, 507)
            fill_disk(self.app, False)
            await self.chance.choice([self.update, self.kill])()
        if self.chance.random() < 0.5:
            leaving = asyncio.create_task(self.service.take("a", BatchRequest(**body)))
            await asyncio.sleep(self.chance.random() * 0.02)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        response = await self.http.post("/v1/feeds/a/batches", json=body)
        assert response.status_code in (200, 504), response.text
        if response.status_code == 200:
            self.came(batch := response.json())
            assert (await take(self.http, idempotency_key=body["idempotency_key"])) == batch
            if self.chance.random() < 0.7:
                await self.update()

    async def abort(self) -> None:
        self.engine.aborted |= set(self.engine.groups)

    async def give_bad_weights(self) -> None:
        if self.num_bad + 1 < MAX_BAD_VERSIONS:
            self.num_bad += 1
            self.engine.failures, self.engine.error = {0: 2, 1: 2, 2: 2}, NOT_FINITE
            await self.update()
            await asyncio.sleep(self.chance.random() * 0.02)
            self.engine.failures = {}
            await self.update()

    async def kill(self) -> None:
        feed = self.service.live[0]
        feed.kept.store = None  # nothing is written any more
        await feed.close()
        self.boot(f"step-{self.step}" if self.chance.random() < 0.5 else None)

    async def begin_anew(self) -> None:
        deleting = asyncio.create_task(self.http.delete("/v1/feeds/a"))
        await eventually(lambda: not self.service.live)
        await make(self.http, **self.terms)
        assert (await deleting).status_code == 204
        self.out.clear()
        self.last_put = {}

    async def end(self) -> None:
        """Every prompt comes back to a trainer that takes and updates in turn."""
        while self.out:
            await self.update()
            self.num_batches += 1
            self.came(await take(self.http, drain=True, idempotency_key=f"b{self.num_batches}"))
        await self.service.live[0].close()


@pytest.mark.parametrize("seed", range(8))
async def test_no_life_of_a_feed_loses_a_prompt_or_stands_still(
    start: Start,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    monkeypatch.setattr(live, "AGAIN_S", 0.01)
    life = Life(start, str(seed))
    await make(life.http, **life.terms)
    acts = [life.put, life.take, life.update, life.kill, life.begin_anew, life.abort, life.give_bad_weights]
    for _ in range(40):
        (act,) = life.chance.choices(acts, [4, 6, 1, 1, 0.3, 0.7, 0.5])
        await act()
        await asyncio.sleep(life.chance.random() * 0.01)
    await life.end()


async def test_a_loop_over_several_epochs_gets_every_prompt(http, app, engine) -> None:
    """The empty batch that ends an epoch is no batch that an update follows."""
    engine.weight_version = "step-0"
    await make(http, batch=2, max_staleness=1)
    step = 0
    for _ in range(5):
        response = await http.post("/v1/feeds/a/prompts", json={"prompts": prompts(0, 5)})
        assert response.status_code == 200
        seen: list[str] = []
        while found := ids(await take(http, drain=True)):
            seen += found
            await update(app, engine, f"step-{(step := step + 1)}")
        assert sorted(seen) == [f"q{i}" for i in range(5)]

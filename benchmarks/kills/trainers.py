"""Trainers that outlive their server, and the book of what they handed in and got back.

Invariant: a key whose fate is not known is repeated until it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

RETRY_S = 0.05


@dataclass(slots=True)
class Book:
    """Of one run."""

    name: str
    filters: bool = False
    num_made: int = 0
    """Prompts, for new ids."""
    handed_in: set[str] = field(default_factory=set)
    returned: Counter[str] = field(default_factory=Counter)
    digests: dict[str, str] = field(default_factory=dict)
    """Of the answer, by key."""
    num_repeats: int = 0
    """Requests that repeated a key because the one before had no answer."""
    num_replayed: int = 0
    """Answers that were asked for a second time, and looked at."""
    problems: list[str] = field(default_factory=list)

    def new_prompts(self, count: int) -> list[dict[str, Any]]:
        self.num_made += count
        return [
            {"id": f"{self.name}-{number}", "prompt_token_ids": [1 + number % 200, 7]}
            for number in range(self.num_made - count, self.num_made)
        ]

    def answered(self, key: str, answer: dict[str, Any]) -> None:
        """Count what came back; an answer that was seen before must be the same."""
        digest = hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).hexdigest()
        if (known := self.digests.get(key)) is not None:
            self.num_replayed += 1
            if known != digest:
                self.problems.append(f"{key}: another answer than before")
            return
        self.digests[key] = digest
        back = [*answer["groups"], *answer["filtered"]]
        self.returned.update(back)

    def check(self, run: dict[str, Any]) -> None:
        """`run`: as it is when all rounds are over."""
        here = self.returned + Counter([*run["queue"], *run["unstarted"]])
        missing, strange = self.handed_in - here.keys(), here.keys() - self.handed_in
        twice = [prompt_id for prompt_id, count in here.items() if count > 1]
        for what, ids in (("lost", missing), ("never handed in", strange), ("twice", twice)):
            if ids:
                self.problems.append(f"{what}: {sorted(ids)[:8]}, {len(ids)} in all")
        if run["open_round"] is not None:
            self.problems.append("a round is still open")


class Trainer:
    """Runs rounds of a run, one after the other; several may share a run."""

    def __init__(self, url: str, book: Book, name: str, seed: int, *, streams: bool) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=30, trust_env=False)
        self._book = book
        self._name = name
        self._streams = streams or book.filters
        self._random = random.Random(seed)
        self._num_rounds = 0
        self._last: tuple[str, dict[str, Any]] | None = None

    async def train(self, over: asyncio.Event) -> None:
        """Until `over` is set and the round on its way has its answer."""
        async with self._http:
            while not over.is_set():
                await self._round()

    async def _round(self) -> None:
        book = self._book
        run = await self._run()
        kind, num_fresh = run["next_round"], run["num_fresh_prompts"]
        if kind == "short" and self._random.random() < 0.1 and run["open_round"] is None and run["queue"]:
            kind, num_fresh = "long", 0
        key = f"{self._name}-{self._num_rounds}"
        self._num_rounds += 1
        prompts = book.new_prompts(num_fresh)
        reserve = book.new_prompts(2) if book.filters and len(run["unstarted"]) < 4 else []
        body = {"prompts": prompts, "reserve": reserve, "kind": kind, "idempotency_key": key}
        ids = {prompt["id"] for prompt in (*prompts, *reserve)}
        answer = await self._post(key, {**body, "stream": self._streams})
        if answer is None:
            return
        book.handed_in |= ids
        book.answered(key, answer)
        if self._random.random() < 0.2:
            again = await self._post(key, {**body, "stream": self._streams})
            if again is None:
                book.problems.append(f"{key}: refused, and was answered before")
            else:
                book.answered(key, again)

    async def _run(self) -> dict[str, Any]:
        """As it is now; made if it is not there."""
        while True:
            try:
                response = await self._http.get(f"/v1/runs/{self._book.name}")
                if response.status_code == 200:
                    return response.json()
                if response.status_code == 404:
                    if self._book.handed_in:
                        self._book.problems.append(f"run {self._book.name} is gone")
                    await self._http.post("/v1/runs", json=self._terms())
            except httpx.TransportError:
                await asyncio.sleep(RETRY_S)

    def _terms(self) -> dict[str, Any]:
        terms = {"id": self._book.name, "group_size": 2, "prompts_per_round": 4, "sampling": {"max_tokens": 300}}
        return {**terms, "filter": "zero_variance"} if self._book.filters else terms

    async def _post(self, key: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """What the round was answered; None: it was refused, and nothing was taken."""
        while True:
            try:
                answer = await (self._streamed(body) if self._streams else self._whole(body))
            except httpx.TransportError:
                answer = None
            except Refused as refused:
                ours = (f"under the key {key!r}", "Repeat the request")
                if refused.status == 409 and any(words in refused.message for words in ours):
                    answer = None
                elif refused.status in (409, 422):
                    return None
                elif refused.status < 500:
                    self._book.problems.append(f"{key}: {refused.status} {refused.message}")
                    return None
                else:
                    answer = None
            if answer is not None:
                return answer
            self._book.num_repeats += 1
            await asyncio.sleep(RETRY_S)

    async def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._http.post(f"/v1/runs/{self._book.name}/rounds", json=body)
        if response.status_code != 200:
            raise Refused(response.status_code, response.text)
        answer = response.json()
        return _told(answer["id"], [group["prompt_id"] for group in answer["groups"]], answer)

    async def _streamed(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """None: it ended before its time."""
        groups: list[str] = []
        request = self._http.stream("POST", f"/v1/runs/{self._book.name}/rounds", json=body)
        rollout = ""
        async with request as response:
            if response.status_code != 200:
                raise Refused(response.status_code, (await response.aread()).decode())
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                match event.get("type"):
                    case "round":
                        rollout = event["id"]
                    case "group" if event["status"] == "complete":
                        groups.append(event["prompt_id"])
                        if self._book.filters:
                            await self._reward(rollout, event)
                    case "filtered" | "deferred":
                        if event["prompt_id"] in groups:
                            groups.remove(event["prompt_id"])
                    case "done":
                        return _told(event["id"], groups, event)
        return None

    async def _reward(self, rollout: str, group: dict[str, Any]) -> None:
        """A third of the prompts teach nothing."""
        number = int(group["prompt_id"].rpartition("-")[2])
        rewards = [
            {"prompt_id": group["prompt_id"], "index": index, "reward": 1.0 if number % 3 == 0 else float(place % 2)}
            for place, index in enumerate(group["selected"])
        ]
        response = await self._http.post(f"/v1/rollouts/{rollout}/rewards", json={"rewards": rewards})
        if response.status_code not in (200, 404):  # 404: the round was over, and this is its replay
            raise Refused(response.status_code, response.text)


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def _told(id: str, groups: list[str], answer: dict[str, Any]) -> dict[str, Any]:
    """What a round said of its prompts."""
    names = ("filtered", "deferred", "unstarted", "round", "num_waiting", "usage", "timing")
    return {"id": id, "groups": sorted(groups), **{name: answer[name] for name in names}}

"""The kinds of clients of a soak. Invariant: a client checks every answer that it gets.

Each client takes one act after the other, of a kind drawn by weight. Acts that generate are broken off at a random
moment with probability DISCONNECT_SHARE.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import httpx

from benchmarks.soak import bodies
from benchmarks.soak.checks import rollout_problems, stream_problems
from benchmarks.soak.tally import Tally
from vllm_rollout.kernel.client.connection import EventData, EventReader, RolloutError
from vllm_rollout.kernel.http.answers import Event, RolloutAnswer

DISCONNECT_SHARE = 0.15
"""Share of generating acts that the client breaks off."""
LONGEST_PATIENCE_S = 1.0
"""A client that breaks off does so within this time."""
READ_TIMEOUT_S = 120.0
"""Seconds. A longer answer counts as a violation, because no candidate here runs for more than seconds."""
REFUSED = (400, 404, 409, 413)
SHARED_GROUPS = 5
"""Number of group ids that several clients use as their own."""


@dataclass(slots=True)
class Shared:
    """Rollouts, heads and states that clients use from each other."""

    rollouts: deque[tuple[str, str]]
    """(rollout id, one of its prompt ids) of any client's rollouts with pruning."""
    head: bytes = b""
    state: bytes = b""


class SoakClient:
    """A client that takes one act after the other."""

    def __init__(self, name: str, url: str, seed: int, tally: Tally, shared: Shared, kinds: Sequence[str]) -> None:
        self._kinds = kinds
        self.name = name
        self._rng = Random(f"{seed}/{name}")
        self._tally = tally
        self._shared = shared
        self._num_acts = 0
        self._kind = ""
        # Uvicorn closes connections that are idle, and a client that reuses one at that moment fails.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, limits=limits, timeout=READ_TIMEOUT_S, trust_env=False)

    async def run(self, until: Callable[[], bool]) -> None:
        """Act until `until` returns True."""
        weights = [KINDS[kind].weight for kind in self._kinds]
        async with self._http:
            while not until():
                (self._kind,) = self._rng.choices(self._kinds, weights)
                self._num_acts += 1
                await self._act(KINDS[self._kind])

    async def _act(self, kind: Kind) -> None:
        counts = self._tally.requests[self._kind]
        counts["acts"] += 1
        breaks_off = kind.generates and self._rng.random() < DISCONNECT_SHARE
        act = asyncio.ensure_future(kind.act(self))
        try:
            await asyncio.wait([act], timeout=self._rng.uniform(0, LONGEST_PATIENCE_S) if breaks_off else None)
            if not act.done():
                counts["disconnected"] += 1
                act.cancel()
                await asyncio.wait([act])
            with suppress(asyncio.CancelledError):
                act.result()
        except RolloutError as error:
            self._tally.broken(self._kind, f"stream: {error}")
        except httpx.HTTPError as error:
            self._tally.broken(self._kind, f"connection: {error!r}")
        except Exception:  # a check that cannot even be made
            self._tally.broken(self._kind, traceback.format_exc(limit=-3))

    async def _send(self, method: str, path: str, *allowed: int, **arguments: Any) -> httpx.Response:
        response = await self._http.request(method, path, **arguments)
        self._tally.answered(self._kind, response.status_code, allowed or (200,), response.text)
        return response

    def _body(self, **fields: Any) -> dict[str, Any]:
        return bodies.rollout(self._rng, f"{self.name}-{self._num_acts}", **fields)

    def _seconds(self, longest: float) -> float:
        return self._rng.uniform(0, longest)

    # Rollouts

    async def _rollout(self, body: dict[str, Any], *allowed: int) -> RolloutAnswer | None:
        response = await self._send("POST", "/v1/rollouts", *allowed, json=body)
        if response.status_code != 200:
            return None
        answer = RolloutAnswer.model_validate_json(response.content)
        for problem in rollout_problems(body, answer):
            self._tally.broken(self._kind, problem)
        return answer

    async def _stream(self, body: dict[str, Any], pause_s: float = 0.0, leave_after_s: float | None = None) -> None:
        """Read a stream: slowly with `pause_s`, and not at all with `leave_after_s`."""
        body["stream"] = True
        data, reader = EventData(), EventReader(streams_tokens="stream_tokens" in body)
        events: list[Event] = []
        async with self._http.stream("POST", "/v1/rollouts", json=body) as response:
            self._tally.answered(self._kind, response.status_code, (200,), "")
            if leave_after_s is not None:
                await asyncio.sleep(leave_after_s)
                return
            async for chunk in response.aiter_raw(4096 if pause_s else None):
                events += map(reader.read, data.feed(chunk))
                if pause_s:
                    await asyncio.sleep(self._seconds(pause_s))
        reader.close()
        for problem in stream_problems(body, events):
            self._tally.broken(self._kind, problem)

    async def plain(self) -> None:
        await self._rollout(self._body())

    async def messages(self) -> None:
        body = self._body()
        for prompt in body["prompts"]:
            del prompt["prompt_token_ids"]
            if self._rng.random() < 0.5:
                prompt["messages"] = [{"role": "user", "content": "hello world"}]
            else:
                prompt["prompt"] = "hello world"
        await self._rollout(body)

    async def streamed(self) -> None:
        await self._stream(self._body())

    async def stream_tokens(self) -> None:
        await self._stream(self._body(stream_tokens=self._rng.choice((1, 4, 16, 100))))

    async def slow_reader(self) -> None:
        await self._stream(self._body(stream_tokens=1), pause_s=0.02)

    async def never_reads(self) -> None:
        await self._stream(self._body(stream_tokens=1), leave_after_s=self._seconds(3.0))

    async def pruned(self) -> None:
        body = self._body(group_size=4, redundancy=4, pruning=bodies.pruning(self._rng))
        answer = await self._rollout(body)
        if answer is None:
            return
        self._shared.rollouts.append((answer.id, answer.groups[0].prompt_id))
        rewards = [
            {"prompt_id": group.prompt_id, "index": t.index, "reward": float(self._rng.random() < 0.5)}
            for group in answer.groups
            for t in group.trajectories
        ]
        if self._rng.random() < 0.8:
            await self._post(answer.id, rewards, {"accepted", "unscored"})
        if rewards and self._rng.random() < 0.3:
            await self._post(answer.id, rewards, {"accepted", "duplicate", "unscored"})
            wrong = [{**reward, "reward": 1 - reward["reward"]} for reward in rewards]
            await self._post(answer.id, wrong, {"conflict", "unscored"})

    async def many_lengths(self) -> None:
        """Use more detection lengths than a server learns at, so that it forgets the least used ones."""
        pruning = {"detection_length": self._rng.randint(1, 40), "min_labels": 8}
        await self._rollout(self._body(group_size=2, redundancy=2, pruning=pruning), 200, 400)

    async def large(self) -> None:
        """Ask for several times what the engine runs at once: groups start in turn, and others in between."""
        prompts = bodies.prompts(self._rng, f"{self.name}-{self._num_acts}", 60)
        body = self._body(prompts=prompts, group_size=4, redundancy=2, sampling_params={"max_tokens": 16})
        await (self._rollout(body) if self._rng.random() < 0.5 else self._stream(body))

    async def open_path(self) -> None:
        body = {"prompt": "hello world", "max_tokens": 4, "vllm_xargs": {"rollout_redundancy": 1}}
        await self._send("POST", "/invocations", 400, json=body)

    async def _post(self, rollout: str, rewards: list[dict[str, Any]], expected: set[str], *allowed: int) -> None:
        if not rewards:
            return
        path = f"/v1/rollouts/{rollout}/rewards"
        response = await self._send("POST", path, *(allowed or (200,)), json={"rewards": rewards})
        if response.status_code == 200:
            statuses = {result["status"] for result in response.json()["results"]}
            if not statuses <= expected:
                self._tally.broken(self._kind, f"rewards are {statuses}, expected {expected}")

    async def foreign_rewards(self) -> None:
        """Post rewards for candidates that do not exist, to rollouts of other clients."""
        if not self._shared.rollouts:
            return
        rollout, prompt_id = self._rng.choice(self._shared.rollouts)
        rewards = [{"prompt_id": name, "index": i, "reward": 1.0} for name in (prompt_id, "no") for i in (99, 2**62)]
        await self._post(rollout, rewards, {"unknown"}, 200, 404)
        await self._post(f"rollout-{self.name}", rewards, set(), 404)
        bad = self._rng.choice(([], [{**rewards[0], "reward": 10**400}], [{**rewards[0], "index": -1}], "rewards"))
        await self._send("POST", f"/v1/rollouts/{rollout}/rewards", *REFUSED, json={"rewards": bad})

    async def auto(self) -> None:
        body = self._body(redundancy=self._rng.choice(("auto", {"auto": {"tradeoff": self._rng.choice((0.1, 10))}})))
        for prompt in body["prompts"]:
            if self._rng.random() < 0.5:
                prompt["id"] = f"dataset-{self._rng.randrange(200)}-{len(prompt['id'])}"
        if len({prompt["id"] for prompt in body["prompts"]}) == len(body["prompts"]):
            await self._rollout(body)

    async def dual_end(self) -> None:
        selection = {"dual_end": {"num_longest": 1, "patience": self._rng.choice((None, 1, 1.5))}}
        await self._rollout(self._body(group_size=3, selection=selection))

    # OpenAI endpoints

    async def choices(self) -> None:
        n = self._rng.randint(1, 4)
        xargs: dict[str, Any] = {"rollout_redundancy": self._rng.randint(0, 4)}
        if self._rng.random() < 0.3:
            length = self._rng.choice(bodies.DETECTION_LENGTHS)
            xargs = {"rollout_redundancy": 4, "rollout_detection_length": length, "rollout_min_labels": 8}
        if self._rng.random() < 0.2:
            xargs = {}  # stock vLLM's path
        await self._complete(n, bool(xargs) and self._rng.random() < 0.3, vllm_xargs=xargs or None)

    async def _complete(self, n: int, stream: bool, *allowed: int, **fields: Any) -> dict[str, Any] | None:
        body = {"prompt": "hello world", "n": n, **bodies.sampling(self._rng), **fields, "stream": stream}
        if not stream:
            response = await self._send("POST", "/v1/completions", *(allowed or (200,)), json=body)
            if response.status_code != 200:
                return None
            answer: dict[str, Any] = response.json()
            if [choice["index"] for choice in answer["choices"]] != list(range(n)):
                self._tally.broken(self._kind, f"{len(answer['choices'])} choices for n={n}")
            return answer
        indices, last = set(), b""
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            self._tally.answered(self._kind, response.status_code, (200,), "")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        self._tally.broken(self._kind, f"stream: {line}")
                    indices |= {choice["index"] for choice in event.get("choices", ())}
                last = line.encode() or last
        if last != b"data: [DONE]" or indices != set(range(n)):
            self._tally.broken(self._kind, f"a stream of choices {indices} for n={n} that ends with {last!r:.80}")
        return None

    async def joined(self) -> None:
        """Make a group of single requests, some of which may never come."""
        num_coming = self._rng.choice((4, 4, 3, 1))
        await self._join(f"{self.name}-{self._num_acts}", num_coming, 200)

    async def colliding(self) -> None:
        """Use the group id of other clients, at times with other sizes."""
        await self._join(f"q{self._rng.randrange(SHARED_GROUPS)}", 4, 200, 400)

    async def _join(self, group_id: str, num_coming: int, *allowed: int) -> None:
        sizes = {"rollout_group_size": 2, "rollout_num_candidates": 4}
        if len(allowed) > 1 and self._rng.random() < 0.3:
            sizes = {"rollout_group_size": 3, "rollout_num_candidates": 5}
        xargs = {"rollout_group_id": group_id, **sizes}
        await asyncio.gather(*(self._complete(1, False, *allowed, vllm_xargs=xargs) for _ in range(num_coming)))

    async def named(self) -> None:
        """Post rewards for choices by the id of their answer. A state put by another client forgets them."""
        xargs = {"rollout_redundancy": 2, "rollout_detection_length": self._rng.choice(bodies.DETECTION_LENGTHS)}
        answer = await self._complete(2, False, vllm_xargs=xargs)
        if answer is not None:
            rewards = [{"request_id": answer["id"], "index": index, "reward": float(index)} for index in (0, 1, 7)]
            response = await self._send("POST", "/v1/rewards", json={"rewards": rewards})
            last = response.json()["results"][-1]["status"]
            if last != "unknown":
                self._tally.broken(self._kind, f"a reward for choice 7 of 2 is {last}")

    async def long_names(self) -> None:
        """Send ids of any length, which the server keeps."""
        name = self._rng.choice(("x", "é", "😀")) * self._rng.choice((200, 300, 5_000, 1_000_000))
        await self._complete(1, False, 200, *REFUSED, request_id=name, max_tokens=4)
        join = {"rollout_group_id": name, "rollout_group_size": 1, "rollout_num_candidates": 1}
        await self._complete(1, False, 200, *REFUSED, vllm_xargs=join, max_tokens=4)
        body = self._body()
        body["prompts"][0]["id"] = name
        await self._rollout(body, 200, *REFUSED)

    # Rounds

    async def rounds(self) -> None:
        """Run rounds, with keys sent again. A state put by another client removes the run or its newest rounds."""
        run = f"run-{self.name}-{self._num_acts}"
        terms = {"group_size": 2, "prompts_per_round": 2, "prompt_speculation": 2}
        body = {"id": run, **terms, "sampling_params": bodies.sampling(self._rng)}
        await self._send("POST", "/v1/runs", 201, json=body)
        for number in range(4):
            found = await self._send("GET", f"/v1/runs/{run}", 200, 404)
            if found.status_code != 200:
                return
            prompts = bodies.prompts(self._rng, f"{run}-{number}", found.json()["num_fresh_prompts"])
            first = await self._round(run, {"prompts": prompts, "idempotency_key": f"key-{number}"})
            again = await self._round(run, {"idempotency_key": f"key-{number}"}) if self._rng.random() < 0.5 else None
            if first and again and first["groups"] != again["groups"] and first["id"] == again["id"]:
                self._tally.broken(self._kind, f"round {number} of {run} has two answers")
        await self._send("DELETE", f"/v1/runs/{run}", 204, 404)

    async def _round(self, run: str, body: dict[str, Any]) -> dict[str, Any] | None:
        response = await self._send("POST", f"/v1/runs/{run}/rounds", 200, *REFUSED, json=body)
        if response.status_code != 200:
            return None
        answer: dict[str, Any] = response.json()
        for group in answer["groups"]:
            if group["status"] != "complete" or len(group["trajectories"]) != 2:
                self._tally.broken(self._kind, f"{group['prompt_id']}: {group['status']} with {group['reason']}")
        return answer

    # Everything else

    async def votes(self) -> None:
        answers = [self._rng.choice(("1", "2", None)) for _ in range(self._rng.randint(1, 64))]
        await self._send("POST", "/v1/votes", json={"answers": answers, "correct": "1", "k": 1})

    async def evil_votes(self) -> None:
        pattern = self._rng.choice(bodies.EVIL_PATTERNS)
        body = {"texts": ["a" * 3000 + "!"] * 4, "answer_pattern": pattern}
        await self._send("POST", "/v1/votes", 200, 400, 429, json=body)

    async def heads(self) -> None:
        length = self._rng.choice(bodies.DETECTION_LENGTHS)
        path = f"/v1/quality_head?detection_length={length}"
        if self._rng.random() < 0.5 or not self._shared.head:
            response = await self._send("GET", path, 200, 404)
            if response.status_code == 200:
                self._shared.head = response.content
            return
        good = self._rng.random() < 0.3
        allowed = (200,) if good else (200, *REFUSED)
        await self._send("PUT", path, *allowed, content=self._shared.head if good else self._spoiled(self._shared.head))

    async def states(self) -> None:
        if self._rng.random() < 0.5 or not self._shared.state:
            self._shared.state = (await self._send("GET", "/v1/rollouts/state")).content
            return
        good = self._rng.random() < 0.3
        content = self._shared.state if good else self._spoiled(self._shared.state)
        allowed = (204, 409) if good else (204, *REFUSED)  # 409: a round runs
        await self._send("PUT", "/v1/rollouts/state", *allowed, content=content)

    def _spoiled(self, data: bytes) -> bytes:
        spoil = self._rng.choice((bodies.mutated, bodies.mutated_text))
        return spoil(self._rng, data)

    async def reports(self) -> None:
        length = self._rng.choice((*bodies.DETECTION_LENGTHS, 4096))
        await self._send("GET", f"/v1/quality_head/report?detection_length={length}", 200, 404)
        await self._send("GET", "/metrics")
        await self._send("GET", "/health")

    async def bad_bodies(self) -> None:
        await self._send("POST", "/v1/rollouts", *REFUSED, json=self._rng.choice(bodies.BAD_ROLLOUTS))
        text = self._rng.choice(bodies.BAD_TEXTS)
        path = self._rng.choice(("/v1/rollouts", "/v1/votes", "/v1/rollouts/x/rewards"))
        await self._send("POST", path, *REFUSED, content=text, headers={"content-type": "application/json"})

    async def pauses(self) -> None:
        """Pause and resume as a trainer that updates weights. All requests wait, and none fails."""
        try:
            await self._send("POST", "/pause?mode=keep")
            await asyncio.sleep(self._seconds(0.2))
        finally:
            await self._send("POST", "/resume")

    async def resets(self) -> None:
        running = self._rng.random() < 0.5
        await self._send("POST", f"/reset_prefix_cache?reset_running_requests={str(running).lower()}")


class Kind(NamedTuple):
    """A kind of act, with its weight."""

    act: Callable[[SoakClient], Awaitable[None]]
    weight: float
    generates: bool = True
    """True if candidates run for it."""
    bad_share: float = 0.0
    """Share of its acts that send a bad body or mean harm."""


KINDS: Mapping[str, Kind] = {
    "rollout": Kind(SoakClient.plain, 10),
    "messages": Kind(SoakClient.messages, 2),
    "streamed": Kind(SoakClient.streamed, 8),
    "stream_tokens": Kind(SoakClient.stream_tokens, 10),
    "slow_reader": Kind(SoakClient.slow_reader, 3),
    "never_reads": Kind(SoakClient.never_reads, 3),
    "pruned": Kind(SoakClient.pruned, 12),
    "many_lengths": Kind(SoakClient.many_lengths, 2),
    "large": Kind(SoakClient.large, 0.5),
    "open_path": Kind(SoakClient.open_path, 0.5, False, 1.0),
    "foreign_rewards": Kind(SoakClient.foreign_rewards, 2, False, 1.0),
    "auto": Kind(SoakClient.auto, 6),
    "dual_end": Kind(SoakClient.dual_end, 4),
    "choices": Kind(SoakClient.choices, 10),
    "joined": Kind(SoakClient.joined, 5),
    "colliding": Kind(SoakClient.colliding, 3, True, 1.0),
    "named": Kind(SoakClient.named, 2),
    "long_names": Kind(SoakClient.long_names, 1, True, 1.0),
    "rounds": Kind(SoakClient.rounds, 3),
    "votes": Kind(SoakClient.votes, 4, False),
    "evil_votes": Kind(SoakClient.evil_votes, 0.1, False, 1.0),
    "heads": Kind(SoakClient.heads, 3, False, 0.35),
    "states": Kind(SoakClient.states, 2, False, 0.35),
    "reports": Kind(SoakClient.reports, 3, False),
    "bad_bodies": Kind(SoakClient.bad_bodies, 6, False, 1.0),
    "pauses": Kind(SoakClient.pauses, 0.5, False),
    "resets": Kind(SoakClient.resets, 1, False),
}
"""Kinds by name, with the weight that each is drawn with."""

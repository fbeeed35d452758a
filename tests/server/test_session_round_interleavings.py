"""Any order of what a harness, its turns, silence and lost connections may do to rounds of sessions: each prompt comes
back once, a short round returns complete groups, and nothing stays open.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_rollout.server.engine import RequestError
from vllm_rollout.server.runs import session_round
from vllm_rollout.server.runs.body import RoundRequest, RunRequest
from vllm_rollout.server.runs.live import Begun
from vllm_rollout.server.runs.replay import replayed
from vllm_rollout.server.sessions import service as sessions_module
from vllm_rollout.server.sessions.body import FinishRequest
from vllm_rollout.server.sessions.groups import OpenGroup

from .conftest import make_app
from .fake_engine import FakeEngine
from .test_session_rounds import Round, begin, prompts

IDLE_S = 50.0
ACTIONS = ("begin", "begin", "end", "end", "finish", "finish", "finish", "void", "cut", "wait", "leave")
MAX_ACTIONS = 40
"""Of a round; then its harness does what it should."""


class Harness:
    """Of one run."""

    def __init__(self, chance: random.Random, **fields: Any) -> None:
        self.chance = chance
        self.app = make_app(FakeEngine())
        self.service, self.runs = self.app.state.session_service, self.app.state.run_service
        self.now_s = 0.0
        self.service._clock = lambda: self.now_s
        self.request = RunRequest.model_validate({"id": "a", "sessions": {"idle_timeout_s": IDLE_S}, **fields})
        self.back: Counter[str] = Counter()

    def groups(self) -> list[OpenGroup]:
        return [group for group in self.service._groups.values() if not group.race.is_over]

    async def run(self, num_prompts: int, reserve: int) -> None:
        await self.runs.create(self.request)
        handed_in = num = 0
        while True:
            run = await self.runs.read("a")
            fresh = min(run.num_fresh_prompts, num_prompts - handed_in)
            is_last = fresh < run.num_fresh_prompts
            if is_last and not (fresh or run.queue or run.unstarted):
                break
            if is_last:
                fresh = min(fresh, run.prompts_per_round)
            body = {
                "prompts": prompts(handed_in, fresh),
                "idempotency_key": str(num),
                "kind": "long" if is_last else None,
            }
            handed_in, num = handed_in + fresh, num + 1
            if reserve and not is_last and handed_in < num_prompts:
                body["reserve"] = prompts(handed_in, 1)
                handed_in += 1
            await self.play(body)
        assert self.back == {f"q{i}": 1 for i in range(handed_in)}
        assert (self.groups(), self.service._num_open_sessions) == ([], 0)

    async def play(self, body: dict[str, Any], num_actions: int = MAX_ACTIONS) -> None:
        round = await Round.begin(self.app, **body)
        opened = (await self.runs.read("a")).open_round
        taken = [] if opened is None else [*opened.prompt_ids, *opened.reserve]
        for _ in range(num_actions):
            if round._reading.done():
                break
            round = await self.act(round, body["idempotency_key"], taken)
        while not round._reading.done():
            for group in self.groups():
                self.serve(group)
            self.now_s += IDLE_S + 1
            await round.rest()
        if isinstance(error := round._reading.exception(), RequestError):
            assert error.status == 504
            assert num_actions, "the harness does what it should"
            await self.play({"idempotency_key": body["idempotency_key"]}, num_actions // 2)
            return
        done, groups = round.told[-1], [each for each in round.told if each["type"] == "group"]
        returned = [group["prompt_id"] for group in groups]
        self.back.update([*returned, *done["filtered"]])
        if done["kind"] == "short":
            assert all(group["status"] == "complete" for group in groups)
            assert len(groups) <= self.request.prompts_per_round
        left = [*done["deferred"], *done["unstarted"]]
        assert len({*returned, *done["filtered"], *left}) == len(returned) + len(done["filtered"]) + len(left)
        assert {*taken} <= {*returned, *done["filtered"], *left}
        totals = (await self.runs.read("a")).totals
        assert totals.num_prompts == totals.num_returned + totals.num_filtered + totals.num_waiting
        assert totals.num_returned + totals.num_filtered == self.back.total()

    def serve(self, group: OpenGroup) -> None:
        """All its sessions have a turn, and finish."""
        for name in list(group.declared):
            session = group.race.sessions.get(name)
            if session is not None and session.in_turn:
                self.service.end(group.running[name], [100], [110], finish_reason="stop")
            if not group.race.is_over and (session is None or session.is_open):
                if session is None or not session.num_turns:
                    turn = begin(self.service, name, [100])
                    self.service.end(turn, [100], [110], finish_reason="stop")
                self.finish(name, float(name[-1] in "02468"))

    def finish(self, name: str, reward: float | None, *, void: bool = False) -> None:
        finished = asyncio.ensure_future(self.service.finish(name, FinishRequest(reward=reward, void=void)))
        finished.add_done_callback(lambda done: done.exception())

    async def act(self, round: Round, key: str, taken: list[str]) -> Round:
        action = self.chance.choice(ACTIONS)
        groups = [group for group in self.service._groups.values() if group.declared]
        if action == "leave":
            await round.leave()
            assert (await self.runs.read("a")).open_round is None or not self.groups()
            if round._reading.cancelled():
                again = await self.runs.begin("a", RoundRequest(stream=True, idempotency_key=key))
                if isinstance(again, Begun):
                    round = Round(self.app, again)
                    await round.rest()
                    assert round.types()[0] == "round"
                else:  # it was over, and was being written when its client left
                    await self.read_again(round, again)
        elif action == "wait":
            self.now_s += self.chance.choice([1.0, IDLE_S, 2 * IDLE_S])
        elif groups:
            group = self.chance.choice(groups[-6:])
            name = self.chance.choice(group.declared)
            running = group.running.get(name)
            if action in ("end", "cut") and running is not None:
                self.service.end(running, [100], [110], finish_reason="length" if action == "cut" else "stop")
            elif action == "begin" and running is None and not (group.race.sessions.get(name) or _New).num_turns:
                with suppress(RequestError):  # its group has given it up
                    begin(self.service, name, [100])
            elif action in ("finish", "void"):
                reward = None if action == "void" else self.chance.choice([0.0, 1.0, None])
                self.finish(name, reward, void=action == "void")
        await round.rest()
        return round

    async def read_again(self, round: Round, answer: bytes) -> None:
        """What a client hears that asks for a round that is over."""

        async def read() -> None:
            round.told = [event.model_dump() async for event in replayed(answer)]

        round._reading = asyncio.create_task(read())
        await asyncio.wait([round._reading])


class _New:
    num_turns = 0


@pytest.mark.thorough
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),  # of all choices
    num_prompts=st.integers(1, 8),
    filters=st.booleans(),
    speculation=st.sampled_from([1.0, 1.5, 2.0]),
    prompts_per_round=st.integers(1, 3),
)
def test_every_prompt_comes_back_once_whatever_its_sessions_do(
    seed, num_prompts, filters, speculation, prompts_per_round
):
    with pytest.MonkeyPatch.context() as patch:
        for module in (session_round, sessions_module):
            patch.setattr(module, "TICK_S", 0)
        patch.setattr(session_round, "SEE_OUT_S", 0.5)
        harness = Harness(
            random.Random(seed),
            group_size=2,
            prompts_per_round=prompts_per_round,
            prompt_speculation=speculation,
            response_speculation=1.5,
            filter="zero_variance" if filters else None,
        )

        async def bounded() -> None:
            await harness.run(num_prompts, int(filters))
            for task in harness.service._tasks:
                task.cancel()

        asyncio.run(bounded())

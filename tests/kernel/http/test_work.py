"""Work per candidate does not grow with the size of the group: groups of thousands block no other request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kernel.http.conftest import http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.support.work import faster_than_linear
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.xargs import turn_from_xargs
from vllm_rollout.parts.rewards.rules.time_limits import TimeLimits
from vllm_rollout.parts.sessions.http.body import FinishRequest, SessionGroupRequest
from vllm_rollout.parts.sessions.http.service import SessionService

SMALL, LARGE = 64, 512


class Graders:
    """They grade at once, each trajectory in a turn of its own."""

    names = ("r",)

    def __init__(self, grade: Grade | None) -> None:
        self.limits, self._grade = TimeLimits(), grade

    async def grade(self, name: str, trajectory: Any, **_: Any) -> Grade:
        await asyncio.sleep(0)
        return self._grade or Grade("ok", float(len(trajectory.token_ids) % 2))


SAME, VOID = Grade("ok", 0.0), Grade("void", None)
SHAPES: dict[str, tuple[dict[str, Any], Grade | None, tuple[float, float]]] = {
    # Fields, grades, and group_size and redundancy as shares of all.
    "a race": ({}, None, (0.5, 0.5)),
    "all": ({}, None, (1, 0)),
    "the shortest": ({"selection": "shortest"}, None, (0.5, 0.5)),
    "both ends": ({"selection": {"dual_end": {"num_longest": 4}}, "early_stop": False}, None, (0.5, 0.5)),
    "a pruned race": ({"pruning": {"detection_length": 4}}, None, (0.5, 0.5)),
    "a graded race": ({"reward": "r"}, SAME, (0.5, 0.5)),
    "graded, none stopped": ({"reward": "r", "early_stop": False}, SAME, (0.5, 0.5)),
    "all void": ({"reward": "r", "early_stop": False}, VOID, (0.25, 0.25)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SHAPES)
def test_a_rollout_takes_work_by_its_candidates(name):
    fields, grade, (group_size, redundancy) = SHAPES[name]

    async def roll(num: int) -> None:
        engine = FakeEngine(max_num_seqs=2 * num, num_launch_places=4 * num)
        engine.lengths = {index: 8 + index % 3 for index in range(2 * num)}
        app = make_app(engine, graders=Graders(grade))
        sizes = {"group_size": max(2, int(group_size * num)), "redundancy": int(redundancy * num)}
        body = {"prompts": [{"id": "p", "prompt": "abc"}], **sizes, **fields}
        async with http_of(app) as http:
            response = await http.post("/v1/rollouts", json=body)
        assert response.status_code == 200, response.text

    assert faster_than_linear(lambda num: asyncio.run(roll(num)), SMALL, LARGE) == {}


SESSIONS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[float, float]]] = {
    # Fields, how each second session ends, and group_size and redundancy as shares of all.
    "a race": ({}, {}, (0.5, 0.5)),
    "all": ({}, {}, (1, 0)),
    "void ones are replaced": ({"max_sessions": 4}, {"void": True}, (1, 0)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SESSIONS)
def test_a_group_of_sessions_takes_work_by_its_sessions(name):
    fields, other, (group_size, redundancy) = SESSIONS[name]

    async def play(num: int) -> None:
        service: SessionService = make_app(FakeEngine()).state.session_service
        most = {"max_sessions": fields["max_sessions"] * num} if "max_sessions" in fields else {}
        sizes = {"group_size": int(group_size * num), "redundancy": int(redundancy * num)}
        group = service.declare(SessionGroupRequest(**{**fields, **most, **sizes}), "")
        for number, session in enumerate(iter(group.declared)):
            turn = service.turn(turn_from_xargs({}, session, n=1), None, [1])
            if turn is not None:
                assert service.begin(turn)
                service.end(turn, [1], [2], finish_reason="stop")
                await service.finish(session, FinishRequest(**(other if number % 2 else {"reward": 0.0})))
        assert group.status in ("complete", "incomplete"), group.answer(0.0)

    assert faster_than_linear(lambda num: asyncio.run(play(num)), SMALL, LARGE) == {}


@pytest.mark.parametrize("reason", ["stop", "length", "failed"])
def test_steps_in_which_one_candidate_ends_take_no_loop_over_the_others(reason):
    def play(num: int) -> None:
        group = Group(GroupTerms(num // 2, num))
        for _ in range(num):
            group.launch()
        for index in range(num // 2 - 1):
            group.end(index, reason, index)
            assert group.settle().lost_ties == ()

    assert faster_than_linear(play, SMALL, LARGE) == {}

"""Work per session does not grow with the size of the group."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kernel.http.conftest import make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.kernel.http.test_work import LARGE, SMALL
from tests.support.work import faster_than_linear
from vllm_rollout.parts.sessions.http.asked import turn_from_xargs
from vllm_rollout.parts.sessions.http.body import FinishRequest, SessionGroupRequest
from vllm_rollout.parts.sessions.http.service import SessionService

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

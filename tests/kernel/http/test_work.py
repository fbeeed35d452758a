"""Work per candidate does not grow with the size of the group: groups of thousands block no other request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kernel.http.conftest import http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.support.work import faster_than_linear
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.terms import GroupTerms

SMALL, LARGE = 64, 512
SHAPES: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
    # Fields, and group_size and redundancy as shares of all.
    "a race": ({}, (0.5, 0.5)),
    "all": ({}, (1, 0)),
    "the shortest": ({"selection": "shortest"}, (0.5, 0.5)),
    "both ends": ({"selection": {"dual_end": {"num_longest": 4}}, "early_stop": False}, (0.5, 0.5)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SHAPES)
def test_a_rollout_takes_work_by_its_candidates(name):
    assert_work_by_candidates(*SHAPES[name])


def assert_work_by_candidates(fields: dict[str, Any], shares: tuple[float, float], **settings: Any) -> None:
    """`settings`: of the app."""
    group_size, redundancy = shares

    async def roll(num: int) -> None:
        engine = FakeEngine(max_num_seqs=2 * num, num_launch_places=4 * num)
        engine.lengths = {index: 8 + index % 3 for index in range(2 * num)}
        sizes = {"group_size": max(2, int(group_size * num)), "redundancy": int(redundancy * num)}
        body = {"prompts": [{"id": "p", "prompt": "abc"}], **sizes, **fields}
        async with http_of(make_app(engine, **settings)) as http:
            response = await http.post("/v1/rollouts", json=body)
        assert response.status_code == 200, response.text

    assert faster_than_linear(lambda num: asyncio.run(roll(num)), SMALL, LARGE) == {}


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

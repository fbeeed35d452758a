"""The order in which groups of a round start."""

from __future__ import annotations

import pytest

from tests.kernel.http.conftest import http_of, make_app
from tests.parts.shaping.test_launches import engine_that_knows


@pytest.mark.parametrize("num_wanted", [6, 4])
async def test_a_round_that_waits_for_all_its_prompts_starts_the_longest_first_and_another_one_does_not(num_wanted):
    engine = await engine_that_knows()
    prompts = [{"id": f"p{i}", "prompt": f"prompt {i}"} for i in range(6)]
    run = {"id": "a", "group_size": 4, "prompts_per_round": num_wanted, "response_speculation": 1.0}
    async with http_of(make_app(engine)) as http:
        made = await http.post("/v1/runs", json={**run, "prompt_speculation": 6 / num_wanted})
        assert made.status_code == 201, made.text
        answer = (await http.post("/v1/runs/a/rounds", json={"prompts": prompts})).json()
        if num_wanted == 6:
            assert engine.started == ["p5", "p4", "p3", "p2", "p1", "p0"]
            assert len(answer["groups"]) == 6
        else:
            assert engine.started == sorted(engine.started)

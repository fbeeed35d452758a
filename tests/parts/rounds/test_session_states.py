"""Rounds of sessions in a saved state."""

from __future__ import annotations

from tests.parts.rounds.test_session_rounds import TERMS, Round, look, make, prompts


async def test_the_rounds_of_a_saved_state_are_those_of_sessions(app, http):
    await make(http, sessions={"max_turns": 3})
    round = await Round.begin(app, prompts=prompts(0, 3))
    await round.complete("q0", "q1")
    await round.over()
    state = (await http.get("/v1/rollouts/state")).content
    run = await look(http)
    await http.delete("/v1/runs/a")
    assert (await http.put("/v1/rollouts/state", content=state)).status_code == 204
    assert await look(http) == run
    assert (await http.post("/v1/runs", json={"id": "a", **TERMS, "sessions": {"max_turns": 3}})).status_code == 200
    response = await http.post("/v1/runs", json={"id": "a", **TERMS})
    assert (response.status_code, "sessions" in response.text) == (409, True)

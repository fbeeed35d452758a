"""Groups of sessions that were recorded, replayed: what they did is learned, though the longest were stopped."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from vllm_rollout.parts.page.recording.session_rows import SessionGroupRow
from vllm_rollout.parts.sessions.with_page.simulated import learned_terms, read_session_groups, trace_of_sessions
from vllm_rollout.parts.sessions.with_shaping.simulated import SessionTerms, draw_course
from vllm_rollout.parts.shaping.rules.trace import TracedCandidate

TERMS = SessionTerms(turns=4, tool_seconds=5, tool_sigma=0.8, tool_tokens=30, tool_failures=0.05)
SECONDS_PER_TOKEN = 0.01


def played(name: str, began: float, size: int, num_sessions: int, seed: int) -> SessionGroupRow:
    """A group as `TERMS` would have it, of which the first `size` come back."""
    sessions, chance = [], Random(f"{name}/{seed}")
    for number in range(num_sessions):
        course = draw_course(TERMS, round(chance.lognormvariate(4, 0.5)) + 20, chance)
        at, prompt, turns = 0.0, 100, []
        for turn, num in enumerate(course.turns):
            turns.append([at, at + num * SECONDS_PER_TOKEN, num, prompt, None, "extended" if turn else "first"])
            at += num * SECONDS_PER_TOKEN + (course.tools_s[turn] if turn < len(course.tools_s) else 0)
            prompt += num + TERMS.tool_tokens
        state = "void" if course.fails else "finished"
        told = {"id": f"s{number}", "state": state, "num_turns": len(turns), "num_tokens": sum(course.turns)}
        sessions.append({**told, "ended_s": at, "turns": turns})
    over = sorted(each["ended_s"] for each in sessions if each["state"] == "finished")[:size][-1]
    for each in sessions:
        if each["ended_s"] > over:
            each["turns"] = [turn for turn in each["turns"] if turn[0] < over]
            last = each["turns"][-1]
            if last[1] > over:
                last[1:3] = over, int((over - last[0]) / SECONDS_PER_TOKEN)
            each |= {"ended_s": over, "state": "surplus", "num_turns": len(each["turns"])}
            each["num_tokens"] = sum(turn[2] for turn in each["turns"])
    told = {"name": name, "id": f"id of {name}", "group_size": size, "status": "complete", "began": began}
    return SessionGroupRow.model_validate({**told, "seconds": over, "sessions": sessions})


def group(name: str, *sessions: tuple[str, int], **more: Any) -> SessionGroupRow:
    each = [{"id": f"s{n}", "state": s, "num_turns": 0, "num_tokens": t} for n, (s, t) in enumerate(sessions)]
    told = {"name": name, "id": name, "group_size": 2, "status": "complete", "began": 0.0, "seconds": 1.0}
    return SessionGroupRow.model_validate({**told, "sessions": each, **more})


@pytest.mark.parametrize("size", [16, 12, 8])
def test_what_sessions_do_is_learned_also_where_half_of_them_were_stopped(size: int) -> None:
    learned = learned_terms([played(f"g{n}", 0.0, size, 16, seed=1) for n in range(200)], in_steps=False)
    assert learned.turns == pytest.approx(TERMS.turns, rel=0.05)
    assert learned.tool_seconds == pytest.approx(TERMS.tool_seconds, rel=0.05)
    assert learned.tool_sigma == pytest.approx(TERMS.tool_sigma, rel=0.05)
    assert learned.tool_failures == pytest.approx(TERMS.tool_failures, abs=0.02)
    assert learned.tool_tokens == TERMS.tool_tokens


def test_without_a_profile_tools_take_as_many_steps_as_a_turn_of_their_time_has_tokens() -> None:
    rows = [played("g", 0.0, 16, 16, seed=1)]
    in_seconds, in_steps = (learned_terms(rows, in_steps=in_steps) for in_steps in (False, True))
    assert in_steps.tool_seconds == pytest.approx(in_seconds.tool_seconds / SECONDS_PER_TOKEN)


def test_sessions_without_a_turn_or_a_tool_teach_nothing() -> None:
    assert learned_terms([group("g", ("surplus", 0), ("void", 0))], in_steps=True) == SessionTerms()
    assert learned_terms([group("g", ("finished", 5))], in_steps=True) == SessionTerms(turns=1)


def test_groups_that_ran_together_are_a_rollout() -> None:
    rows = [
        group("a", ("finished", 5), ("truncated", 9), ("void", 3), ("surplus", 2), ("finished", 0), seconds=4.0),
        group("b", ("pruned", 4), ("deferred", 0), began=3.0, seconds=6.0, max_tokens=9),
        group("c", ("finished", 7), id="b", began=8.5, seconds=0.1),
        group("f", ("finished", 6), began=8.9),
        group("d", ("finished", 8), began=9.9, group_size=3),
        group("e", ("void", 3), began=20.0),
    ]
    trace = trace_of_sessions(rows)
    assert [[prompt.id for prompt in rollout.prompts] for rollout in trace.rollouts] == [["a", "b", "c", "f"], ["d"]]
    candidates = [TracedCandidate(5), TracedCandidate(9, "length"), TracedCandidate(2, "surplus")]
    assert trace.prompts[0].candidates == tuple(candidates)
    assert [candidate.end for candidate in trace.prompts[1].candidates] == ["pruned", "deferred"]
    assert (trace.prompts[1].max_tokens, trace.num_failed, trace.num_empty, trace.group_size) == (9, 2, 1, None)
    assert trace_of_sessions(rows[:2]).group_size == 2
    by_two = trace_of_sessions(rows, 2)
    assert [[prompt.id for prompt in rollout.prompts] for rollout in by_two.rollouts] == [["a", "b"], ["b", "f"], ["d"]]
    with pytest.raises(ValueError, match="none of the recorded sessions has generated a token"):
        trace_of_sessions(rows[-1:])


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Two groups at once, one later, a rollout of answers, and a row that was being written."""
    rows = [played(f"g{n}", began, 4, 8, seed=1).model_dump_json() for n, began in enumerate((0.0, 0.1, 1e6))]
    rows.insert(1, json.dumps({"rollout_id": "r", "prompts": [{"id": "q", "lengths": [3, 5]}]}))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([*rows, rows[0][:50]]))
    assert len(read_session_groups(path)[0]) == 3
    return path


def test_a_recording_is_replayed_with_what_it_has_or_what_is_said(run, numbers, recording: Path) -> None:
    result = run(recording, "--sessions", "recorded")
    assert result.exit_code == 0, result.output
    assert "3 groups of 4 in 2 rollouts" in result.output
    assert "Left out: 1 rollout of answers" in result.output
    recorded = numbers()["sessions"]
    assert (recorded["tool_tokens"], recorded["turns"] > 1) == (30, True)
    assert f"1 broken row was skipped: {recording}:5: not JSON" in "".join(numbers()["notes"])
    assert run(recording, "--sessions", "tool_seconds=7").exit_code == 0
    assert numbers()["sessions"] == {**recorded, "tool_seconds": 7}


def test_what_is_not_replayed_is_said(run, recording: Path, tmp_path: Path) -> None:
    result = run(recording, "--skip-broken")
    assert result.exit_code == 0, result.output
    assert "1 groups of 8 in 1 rollout" in result.output
    assert "3 groups of sessions, which --sessions recorded replays" in result.output
    only = tmp_path / "only.jsonl"
    only.write_text(recording.read_text().splitlines()[0])
    refused = run(only)
    assert (refused.exit_code, "it has 1 group of sessions, which --sessions recorded" in refused.output) == (1, True)
    refused = run("--generate", "prompts=2", "--sessions", "recorded")
    assert (refused.exit_code, "no group of sessions was recorded" in refused.output) == (2, True)

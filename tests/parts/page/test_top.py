"""A server in a terminal: drawn from what it tells, harmless whatever a prompt is called."""

from __future__ import annotations

from io import StringIO
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.kernel.http.conftest import make_app, serving
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.page.session_rows import LOST, WON, session_group
from vllm_rollout.cli import app as cli
from vllm_rollout.kernel.client.connection import RolloutError
from vllm_rollout.parts.page.watching.top import Screen, feed, top


def prompt(id: str, position: int, lengths: list[int], ends: list[str], **more: Any) -> dict[str, Any]:
    told = {"id": id, "position": position, "rank": 0, "status": "running", "over_s": None, "lengths": lengths}
    return {**told, "ends": ends, **more}


def rollout(*prompts: dict[str, Any], **more: Any) -> dict[str, Any]:
    told = {"rollout_id": "rollout-1", "state": "running", "began": 100.0, "seconds": None, "run": None}
    return {**told, "num_prompts": 2, "num_candidates": 6, "prompts": list(prompts), **more}


def drawn(screen: Screen, height: int = 40) -> str:
    console = Console(file=StringIO(), width=140, color_system=None)
    console.print(screen.draw(height))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_what_is_told_is_drawn() -> None:
    screen = Screen()
    assert "Nothing has run yet" in drawn(screen)
    screen.take("server", {"now": 110.0})
    screen.take("rollout", rollout())
    screen.take("group", {"rollout_id": "rollout-1", "position": 0, "prompt": prompt("q1", 0, [9], ["running"])})
    assert "of 6 candidates; 1 groups wait for places" in drawn(screen)
    over = prompt("q2", 1, [80, 40, 10], ["stop", "surplus", "length"], status="complete", over_s=9.0)
    screen.take("group", {"rollout_id": "rollout-1", "position": 1, "prompt": {**over, "rewards": [1.0, None, 0.0]}})
    ranks = [{"rank": 0, "state": "active", "running": 4, "waiting": 1, "kv": 0.5}]
    assert screen.take("ranks", {"at": 112.0, "ranks": ranks})
    told = {"run": "r", "round": 3, "kind": "short", "deferred": ["a"], "num_waiting": 2, "next_round": "long"}
    screen.take("round", told)
    text = drawn(screen)
    assert "rollout-1: running, 12 s, 1 of 2 groups complete; 1 run, 1 done, 1 cut, 1 surplus of 6" in text
    assert "groups wait" not in text
    assert "run r: round 3 was short, 1 prompts deferred, 2 wait, next long" in text
    assert "██████████" in text
    assert "50%" in text
    first, second = (next(line for line in text.splitlines() if line.startswith(id)) for id in ("q1", "q2"))
    assert text.index(first) < text.index(second)
    assert [word in second for word in ("█▄▁", "80", "1 done, 1 cut, 1 surplus", "+·-")] == [True] * 4
    screen.take("gone", {"rollout_ids": ["rollout-1"]})
    assert "Nothing has run yet" in drawn(screen)


def test_groups_of_sessions_are_drawn_too() -> None:
    screen = Screen()
    screen.take("server", {"now": 110.0})
    screen.take("sessions", session_group("won"))
    at_tools, in_turn = ({**WON, "state": state, "ended_s": None} for state in ("between_turns", "turn"))
    screen.take("sessions", session_group("race", at_tools, in_turn, LOST, status="running", seconds=None))
    text = drawn(screen)
    assert "Nothing has run" not in text
    assert "sessions: 1 of 2 groups complete, 1 run" in text
    race, won = (next(line for line in text.splitlines() if line.startswith(f"id of {id}")) for id in ("race", "won"))
    assert text.index(race) < text.index(won), "who runs is first"
    assert [word in race for word in ("██▄", "60", "1 in a turn, 1 at tools, 1 surplus")] == [True] * 3
    assert [word in won for word in ("1 finished, 1 surplus, 1 void", "+··")] == [True] * 2
    screen.take("gone", {"rollout_ids": [], "sessions": ["race", "won"]})
    assert "Nothing has run" in drawn(screen)
    screen.take("sessions", session_group("late"))
    screen.take("server", {"now": 111.0})
    assert "Nothing has run" in drawn(screen), "another server tells anew"


def test_a_terminal_that_is_too_small_says_how_many_groups_it_leaves_out() -> None:
    screen = Screen()
    screen.take("rollout", rollout(*(prompt(f"q{i}", i, [1], ["running"]) for i in range(30))))
    assert "… 20 more" in drawn(screen, height=20)


@pytest.mark.parametrize("name", ["\x1b[2J\x1b]0;x\x07", "[red]x[/red]", "\u202eabc", "x" * 9999])
def test_a_hostile_name_draws_nothing_but_itself(name: str) -> None:
    screen = Screen()
    screen.take("rollout", rollout(prompt(name, 0, [1], ["running"])))
    text = drawn(screen)
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert len(max(text.splitlines(), key=len)) <= 140


def test_one_picture_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(make_app(FakeEngine())) as url:
        result = CliRunner().invoke(cli, ["top", url, "--once"])
    assert "active" in result.output
    assert result.exit_code == 0


def test_line_ends_of_unicode_in_a_name_end_no_line() -> None:
    app = make_app(FakeEngine())
    with serving(app) as url:
        prompts = [{"id": "a\u2028b\u0085c", "prompt": "x"}]
        assert httpx.post(f"{url}/v1/rollouts", json={"prompts": prompts, "group_size": 1}).is_success
        told = next(data for name, data in feed(url, None) if name == "rollout")
    assert told["prompts"][0]["id"] == "a\u2028b\u0085c"


def test_what_is_no_server_is_an_error_with_a_remedy() -> None:
    with pytest.raises(RolloutError, match=r"127\.0\.0\.1:9"):
        top("http://127.0.0.1:9", None, once=True)
    with pytest.raises(RolloutError, match="'http://'"):
        top("127.0.0.1:9", None, once=True)
    with serving(make_app(FakeEngine())) as url, pytest.raises(RolloutError, match="answers 404"):
        top(f"{url}/none", None, once=True)
    result = CliRunner().invoke(cli, ["top", "http://127.0.0.1:9", "--once"])
    assert result.exit_code == 1

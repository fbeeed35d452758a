"""`vllm-rollout receipt`: of a trace, an answer, a server; what is neither says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from tests.kernel.http.conftest import make_app, serving
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.page.session_rows import LOST, VOID, session_group
from vllm_rollout.cli import app as cli
from vllm_rollout.simulator import advice

RACED = {"prompts": [{"id": "q", "prompt": "x"}], "group_size": 2, "redundancy": 2}


def run(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["receipt", *map(str, arguments)])
    return result.exit_code, result.output + str(result.exception or "")


def row(number: int, prompts: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"rollout_id": f"rollout-{number}", "group_size": 4, "max_tokens": 2000, "prompts": prompts, **more}


def lengths(seed: int, num_prompts: int = 8) -> list[list[int]]:
    chance = Random(seed)
    return [[round(chance.lognormvariate(5, 1)) + 1 for _ in range(4)] for _ in range(num_prompts)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two rollouts without times, and one with them, raced."""
    whole = [row(n, [{"id": f"q{i}", "lengths": its} for i, its in enumerate(lengths(n))]) for n in range(2)]
    timed = {"started_s": 0.0, "ended_s": [1.0, 2.0, 4.0, 5.0, 5.0], "selected": [0, 1, 2, 3]}
    ends = ["stop"] * 4 + ["surplus"]
    raced = row(2, [{"id": "q", "lengths": [100, 200, 400, 500, 500], "ends": ends, **timed}], seconds=5.5)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (*whole, raced)))
    return path


def test_a_trace_is_a_row_each_and_a_sum(trace: Path) -> None:
    status, said = run(trace, "--json")
    told = json.loads(said)
    assert status == 0
    assert [each["name"] for each in told["receipts"]] == ["rollout-0", "rollout-1", "rollout-2"]
    first, _, raced = (each["receipt"] for each in told["receipts"])
    num_later = [sum(num > sorted(its)[1] for its in rollout for num in its) for rollout in (lengths(0), lengths(1))]
    assert (first["saved_tokens"], first["saved_seconds"], first["num_checked"]) == (0, None, num_later[0])
    assert (raced["num_stopped"], raced["generated_tokens"], raced["returned_tokens"]) == (1, 1700, 1200)
    assert raced["saved_seconds"] > 0
    assert told["sum"]["saved_seconds"] == pytest.approx(raced["saved_seconds"])
    assert told["sum"]["num_checked"] == sum(num_later)
    assert told["next"]["setting"]["redundancy"] != 1
    assert 0 < told["next"]["saves_seconds"] < 5.5
    status, said = run(trace)
    assert status == 0
    assert [word in said for word in ("rollout-2", "sum of 3", "Next: ", "less time", "queue")] == [True] * 5


def test_advice_is_for_as_many_ranks_as_there_were_and_spoils_no_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [{"id": f"q{rank}", "lengths": [5, 6], "rank": rank} for rank in (0, 2)]
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row(0, [*prompts, {"id": "m", "lengths": [5], "moves": [[0.0, 1], [1.0, 3]]}])) + "\n")
    seen = []

    def fails(trace: Any, options: Any, seconds: float | None) -> None:
        seen.append(options.data_parallel_size)
        raise ValueError("--tensor-parallel-size must say which")

    monkeypatch.setattr(advice, "next_setting", fails)
    status, said = run(path)
    assert (status, seen, "rollout-0" in said) == (0, [4], True)
    assert "Next: not known: --tensor-parallel-size must say which" in said
    status, said = run(path, "--json")
    assert (status, json.loads(said)["next"]) == (0, None)


def test_a_long_round_is_taken_off_the_sum_and_a_written_receipt_is_shown_as_it_is(tmp_path: Path) -> None:
    prompts = [{"id": "[red]\x1b[2J", "lengths": [5, 6]}]
    short = {"seconds": 10.0, "generated_tokens": 7, "waiting_seconds": 30.0, "saved_seconds": 20.0}
    long = {"seconds": 8.0, "waiting_seconds": 8.0, "saved_seconds": 0.0}
    rows = [
        row(0, prompts, run="[red]\x1b[2J", round=0, kind="short", receipt=short),
        row(1, prompts, run="r", round=1, kind="long", receipt=long),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([*map(json.dumps, rows), "{broken"]))
    status, said = run(path, "--json")
    told, _ = json.JSONDecoder().raw_decode(said[said.index("{\n") :])  # what was skipped stands beside it
    assert "1 broken row was skipped" in said
    assert told["receipts"][0]["receipt"]["generated_tokens"] == 7
    assert told["sum"]["saved_seconds"] == 12.0
    status, said = run(path)
    assert (status, "[red]\\x1b[2J round 0 (short)" in said, "\x1b" in said) == (0, True, False)


def test_a_saved_answer_and_a_server(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    with serving(make_app(FakeEngine())) as url:
        status, said = run(url)
        assert (status, "Ask for a rollout first" in said) == (1, True)
        answer = httpx.post(f"{url}/v1/rollouts", json=RACED)
        path.write_bytes(answer.content)
        of_server, of_file = (json.loads(run(source, "--json")[1]) for source in (url, path))
    assert of_server["receipts"] == of_file["receipts"]
    assert of_file["sum"] == answer.json()["receipt"]
    assert of_file["receipts"][0]["name"] == answer.json()["id"]


def refusing(status: int) -> FastAPI:
    app = FastAPI()
    app.add_api_route("/v1/rollouts/watch", lambda: None, status_code=status)
    return app


@pytest.mark.parametrize(("status", "remedy"), [(401, "VLLM_API_KEY"), (404, "earlier version")])
def test_a_server_that_refuses(status: int, remedy: str) -> None:
    with serving(refusing(status)) as url:
        code, said = run(url)
    assert (code, f"answers {status}" in said, remedy in said) == (1, True, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file or directory. Name what `--rollout-record` wrote"),
        ("", "holds no row that can be replayed"),
        ("not a trace", "not JSON"),
        ('{"prompt_id": "q", "lengths": [3]}', "holds no rollout, only single prompts"),
        ('{"id": "r", "created": 1, "model": "m", "usage": {}, "timing": {}}', "this answer has no receipt"),
        ("[" * 100_000, "nested too deeply"),
        (
            '{"rollout_id": "r", "prompts": [{"id": "a", "lengths": [3, 4], "selected": [7]}]}',
            "prompts.0: selected names candidate 7, and there are 2",
        ),
    ],
)
def test_what_is_neither(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text)
    code, output = run(path)
    assert (code, said in output) == (1, True), output


def test_nobody_at_that_address() -> None:
    code, said = run("http://127.0.0.1:9")
    assert (code, "http://127.0.0.1:9" in said) == (1, True)


def test_a_key_that_no_header_takes_and_an_address_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = run("http://[bad")
    assert (code, "http://[bad" in said) == (1, True), said
    monkeypatch.setenv("VLLM_API_KEY", "schlüssel")
    code, said = run("http://127.0.0.1:9")
    assert (code, "VLLM_API_KEY, must be ASCII characters. Character 5 is none." in said) == (1, True), said
    assert "schl" not in said, "a key is not for a terminal"


def test_groups_of_sessions_are_counted_and_their_sum_has_the_time_in_which_any_ran(trace: Path) -> None:
    pruned = {**LOST, "state": "pruned", "num_turns": 33}
    rows = [
        session_group("g1"),
        session_group("g2", pruned, VOID, id="[red]\u2028\x1b[2J", status="incomplete", selected=[], began=1006.0),
    ]
    rows[0]["sessions"][2] = {**rows[0]["sessions"][2], "num_tokens": 5}
    reward = {"name": "g1", "rewards": [{"index": 1, "reward": 0.5}]}
    trace.write_text(
        trace.read_text() + "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in [*rows, reward])
    )
    status, said = run(trace, "--json")
    told = json.loads(said)
    assert (status, len(told["receipts"]), told["sum"]["num_stopped"]) == (0, 3, 1), (
        "those of rollouts are as they were"
    )
    first, second = told["sessions"]
    assert (second["id"], second["status"]) == ("[red]\u2028\x1b[2J", "incomplete")
    assert first["receipt"] == {
        "seconds": 9.0, "generated_tokens": 95, "returned_tokens": 60, "wasted_tokens": 35, "num_sessions": 3,
        "num_stopped": 1, "stopped_tokens": 30, "num_void": 1, "num_turns": 3, "tool_seconds": 2.0,
        "prompt_tokens": 360, "cached_tokens": 224,
    }  # fmt: skip
    assert (second["receipt"]["returned_tokens"], second["receipt"]["stopped_tokens"]) == (0, 30)
    assert (second["receipt"]["tool_seconds"], second["receipt"]["cached_tokens"]) == (None, None), "of some turns only"
    summed = told["sum_of_sessions"]
    assert [summed[name] for name in ("seconds", "generated_tokens", "num_sessions", "num_turns")] == [15.0, 125, 5, 36]
    status, said = run(trace)
    assert (status, "\x1b" in said, "[red]\\u2028\\x1b[2J" in said) == (0, False, True)
    assert [part in said for part in ("sum of 2", "1 complete", "is not said", "62%", "Next: ")] == [True] * 5


def test_a_recording_of_sessions_alone_has_receipts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(session_group("g1")) + "\n" + json.dumps(session_group("half"))[:-5])
    status, said = run(path, "--json")
    assert (status, "1 broken row was skipped" in said) == (0, True)
    told, _ = json.JSONDecoder().raw_decode(said[said.index("{\n") :])
    assert (told["receipts"], told["sum"], told["next"], len(told["sessions"])) == ([], None, None, 1)
    status, said = run(path)
    assert (status, "rollout" in said.splitlines()[0], "sum of 1" in said) == (0, False, True)


def test_a_server_tells_of_groups_of_sessions_that_are_over() -> None:
    with serving(make_app(FakeEngine())) as url:
        for id in ("over", "open"):
            assert httpx.post(f"{url}/v1/groups", json={"group_size": 1, "redundancy": 1, "id": id}).status_code == 201
        assert "Ask for a rollout first" in run(url)[1]
        httpx.post(f"{url}/v1/sessions/over.0/finish", json={"void": True})
        httpx.delete(f"{url}/v1/groups/over")
        (told,) = json.loads(run(url, "--json")[1])["sessions"]
    assert (told["id"], told["status"], told["receipt"]["num_void"]) == ("over", "deferred", 1)

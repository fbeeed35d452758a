"""The demo's race, against the app around a FakeEngine."""

import asyncio
import errno
import io
import json
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from tests.kernel.http.conftest import app, engine, server_url  # noqa: F401
from tests.support.waiting import WAIT_S
from vllm_rollout import AsyncRolloutClient, on_cpu
from vllm_rollout.cli import app as app_of_cli
from vllm_rollout.demo import phases
from vllm_rollout.demo.clock import Clock
from vllm_rollout.demo.live import LiveRace, race_live
from vllm_rollout.demo.options import Options
from vllm_rollout.demo.phases import Phase, RacedCandidate, run_race, show_phase
from vllm_rollout.demo.run import RACE_TOKENS, STOCK_TOKENS, expected_seconds, record
from vllm_rollout.kernel.http.answers import TokensEvent
from vllm_rollout.process import ServerError

pytestmark = pytest.mark.anyio
OPTIONS = Options(prompts=3, group_size=2, candidates=4, max_tokens=64)


async def race(url: str, options: Options, on_group=lambda: None):
    async with AsyncRolloutClient(url) as client:
        return await run_race(client, options, on_group)


async def test_the_race_tells_every_candidate_and_every_group(server_url):  # noqa: F811
    groups_over = []
    phase = await race(server_url, OPTIONS, lambda: groups_over.append(True))
    assert len(groups_over) == OPTIONS.prompts
    assert [[c.index for c in group] for group in phase.groups] == [[0, 1, 2, 3]] * OPTIONS.prompts
    assert all(sum(c.state == "kept" for c in group) == OPTIONS.group_size for group in phase.groups)
    assert all(len(c.token_ids) == c.num_tokens for group in phase.groups for c in group if c.state == "kept")


async def test_the_race_fails_with_the_servers_words(server_url, engine):  # noqa: F811
    engine.max_num_seqs = 1
    with pytest.raises(ServerError, match="candidates"):
        await race(server_url, OPTIONS)


async def test_one_prompt_races_live_and_where_there_is_no_terminal_its_end_is_drawn_once(server_url):  # noqa: F811
    console = Console(file=io.StringIO(), width=200)
    async with AsyncRolloutClient(server_url) as client:
        live = await race_live(client, OPTIONS, console)
    assert live.states.count("finished") == OPTIONS.group_size
    assert sorted(set(live.states)) == ["finished", "stopped"]
    assert all(live.lengths)
    assert live.tokens_per_s > 0
    said = console.file.getvalue()
    assert said.count(f"{OPTIONS.group_size} of {OPTIONS.group_size} have finished") == 1
    assert [line.split()[0] for line in said.splitlines()[1:]] == [str(length) for length in live.lengths]
    assert live.summary.startswith("2 of 4 candidates finished after ")


def test_a_bar_grows_with_the_tokens_of_its_candidate():
    live = LiveRace(num_candidates=2, group_size=1)
    live.see(TokensEvent(prompt_id="0", index=1, offset=0, token_ids=[1, 2, 3, 4]))
    live.see(TokensEvent(prompt_id="0", index=1, offset=4, token_ids=[5, 6]))
    assert (live.lengths, live.states) == ([0, 6], ["runs", "runs"])


def test_what_is_expected_follows_from_how_fast_the_first_race_was():
    live = LiveRace(num_candidates=16, group_size=8)
    live.lengths, live.seconds = [100] * 16, 10.0
    stock_s, race_s = expected_seconds(Options(), live)
    assert (round(stock_s), round(race_s)) == (190, 73)
    shorter = expected_seconds(Options(max_tokens=100), live)
    assert shorter == pytest.approx((stock_s * 50 / STOCK_TOKENS, race_s * 50 / RACE_TOKENS))


@pytest.mark.parametrize("is_terminal", [False, True])
async def test_phases_are_said_in_lines_where_there_is_no_terminal(is_terminal, monkeypatch):
    monkeypatch.setattr(phases, "POLL_INTERVAL_S", 0.001)
    console = Console(file=io.StringIO(), width=200, force_terminal=is_terminal)
    metrics = f"{phases.GENERATION_TOKENS} 12\n{phases.REQUESTS_RUNNING} 3\n"
    polls = count(1)
    seen = asyncio.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        if next(polls) > phases.POLLS_PER_LINE:
            seen.set()
        return httpx.Response(200, text=metrics)

    async def run(over) -> Phase:
        over()
        await asyncio.wait_for(seen.wait(), WAIT_S)
        return Phase("race", 1.0, [[RacedCandidate(0, 7, "kept")]])

    with Progress(console=console, disable=not is_terminal) as progress:
        row = progress.add_task("race (about 20 s)", total=2, start=False, tokens="", running="")
        async with httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(answer)) as client:
            await show_phase(run, client, SimpleNamespace(check_alive=lambda: None), progress, row, Clock(console))
    said = console.file.getvalue()
    lines = ["race (about 20 s): starts", "race (about 20 s): 1 of 2 groups, 0 tokens", "race (about 20 s): done after"]
    assert [line in said for line in lines] == [not is_terminal] * 3


def test_the_record_says_on_which_cpu_and_in_which_type(monkeypatch):
    monkeypatch.setattr(on_cpu, "this_cpu", lambda: on_cpu.Cpu("Old Xeon", frozenset({"avx2"}), 2))
    phase = Phase("stock vLLM", 8.0, [[RacedCandidate(0, 7, "kept"), RacedCandidate(1, 9, "unused")]])
    found = record(OPTIONS, phase, replace(phase, name="vllm-rollout", seconds=2.0))
    assert (found["cpu"], found["device"], found["cores"], found["dtype"]) == ("Old Xeon", "cpu", 2, "float32")
    assert found["stock vLLM"] == {
        "seconds": 8.0, "generated_tokens": 16, "returned_tokens": 7, "wasted_tokens": 9,
    }  # fmt: skip
    assert found["speed_up"] == 4.0
    assert json.loads(json.dumps(found)) == found


def test_a_picture_that_cannot_be_written_is_one_sentence(monkeypatch, tmp_path):
    def full(options) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(options.output))

    monkeypatch.setattr("vllm_rollout.demo.run.run", full)
    done = CliRunner().invoke(app_of_cli, ["demo", "--output", str(tmp_path / "race.png")])
    assert "No space left on device" in str(done.exception)
    assert "Free some space, or name another place with --output" in str(done.exception)

"""The rounds benchmark without a model: its own tail batching on a server of this file, numbers of made-up rounds."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace

import httpx
import pytest

from benchmarks.common import in_turn
from benchmarks.rounds.client_side import client_rounds
from benchmarks.rounds.measures import Run, run_row, summarize
from benchmarks.rounds.picture import draw, tables
from benchmarks.rounds.setup import WAY_NAMES, Sizes, check
from vllm_rollout.parts.rounds.demo.rounds import Period, ReturnedGroup, Round
from vllm_rollout.process import ServerError

SIZES = Sizes("fake", prompts_per_round=4, group_size=2, max_tokens=64, temperature=1.0, repeats=2, seed=3)


class StepStream(httpx.AsyncByteStream):
    """Candidate i of a question with n words ends after n + i tokens; a token of each is a step of the loop."""

    def __init__(self, num_words: int, num_candidates: int) -> None:
        self._lengths = [num_words + i for i in range(num_candidates)]
        self.is_closed = False

    async def __aiter__(self):
        for step in range(1, 1 + max(self._lengths)):
            await asyncio.sleep(0)
            for index, length in enumerate(self._lengths):
                if step <= length:
                    reason = "stop" if step == length else None
                    choice = {"index": index, "token_ids": [step], "finish_reason": reason}
                    yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
        yield b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        self.is_closed = True


def client_period(questions, streams=None) -> Period:
    streams = [] if streams is None else streams

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        streams.append(StepStream(len(body["messages"][0]["content"].split()), body["n"]))
        return httpx.Response(200, stream=streams[-1])

    async def run():
        async with httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(answer)) as client:
            rounds = client_rounds(client, questions, SIZES.terms, SIZES.sampling(0))
            return Period(tuple([each async for each in rounds]))

    return asyncio.run(run())


def questions_of_words(*counts: int) -> list[str]:
    return [" ".join(["word"] * count) for count in counts]


def test_the_clients_tail_batching_defers_the_slowest_prompt_of_each_short_round():
    counts = [5, 5, 5, 5, 90, 5, 80, 5, 5, 5, 5, 5, 5, 70, 5, 60, 5, 5, 5, 5]
    period = client_period(questions_of_words(*counts))
    assert [(each.name, each.deferred) for each in period.rounds] == [
        ("short", [4]), ("short", [6]), ("short", [13]), ("short", [15]), ("long", [])
    ]  # fmt: skip
    assert Counter(g.prompt for each in period.rounds for g in each.groups if not g.is_deferred) == Counter(range(20))
    assert sorted(period.rounds[-1].lengths) == [60, 61, 70, 71, 80, 81, 90, 91]


def test_streams_of_a_round_are_closed_and_only_what_came_is_counted():
    streams: list[StepStream] = []
    counts = [5, 5, 5, 5, 90, *[5] * 15]
    period = client_period(questions_of_words(*counts), streams)
    assert all(stream.is_closed for stream in streams)
    assert period.rounds[0].generated_tokens < 90
    assert period.rounds[0].returned_tokens == 4 * (5 + 6)


def test_prompts_that_do_not_fill_a_period_come_back_too():
    period = client_period(questions_of_words(*[5] * 7))
    assert Counter(g.prompt for each in period.rounds for g in each.groups if not g.is_deferred) == Counter(range(7))


def test_the_client_fails_with_the_servers_words():
    async def run():
        transport = httpx.MockTransport(lambda request: httpx.Response(400, text="too long"))
        async with httpx.AsyncClient(base_url="http://test", transport=transport) as client:
            async for _ in client_rounds(client, SIZES.questions(0), SIZES.terms, SIZES.sampling(0)):
                pass

    with pytest.raises(ServerError, match="too long"):
        asyncio.run(run())


def made_up(way: str, repeat: int, seconds: float) -> Run:
    short = Round("short", seconds, (ReturnedGroup(0, 1.0, (5, 6)), ReturnedGroup(1, seconds)), 25)
    long = Round("long", seconds, (ReturnedGroup(1, seconds, (30, 40)),), 80)
    return Run((way, repeat), 1.5, 0.5, Period((short, long)))


def test_numbers_are_of_returned_trajectories_and_ratios_of_one_repeat(tmp_path):
    seconds = {"plain": (4.0, 8.0), "client": (4.0, 4.0), "run": (2.0, 2.0)}
    rows = [run_row(made_up(way, repeat, seconds[way][repeat])) for repeat in range(2) for way in WAY_NAMES]
    ways = summarize(rows)
    assert ways["run"]["speed_ups"] == [2.0, 4.0]
    assert ways["client"]["speed_up"] == 1.5
    row = rows[0]
    assert (row["generated_tokens"], row["returned_tokens"], row["wasted_tokens"]) == (105, 81, 24)
    assert [each["max_tokens"] for each in row["rounds"]] == [6, 40]
    assert row["rounds"][0]["deferred"] == [1]
    sizes = {"prompts_per_round": 1, "group_size": 2, "model": "fake", "max_tokens": 64, "repeats": 2}
    result = {"ways": ways, "measurements": rows, "sizes": sizes, "note": "note"}
    assert "3.00 (2.00 to 4.00)" in tables(result)
    draw(result, tmp_path / "rounds.png")
    assert (tmp_path / "rounds.png").read_bytes().startswith(b"\x89PNG")


def test_every_way_begins_in_turn_and_a_repeat_has_its_own_order():
    assert [in_turn(WAY_NAMES, repeat)[0] for repeat in range(3)] == list(WAY_NAMES)
    assert SIZES.questions(0) == SIZES.questions(0) != SIZES.questions(1)


@pytest.mark.parametrize("given", [{"repeats": 0}, {"prompts_per_round": 100}])
def test_sizes_that_cannot_run_are_refused(given):
    with pytest.raises(ValueError, match=r"must be|fewer prompts"):
        check(replace(SIZES, **given))

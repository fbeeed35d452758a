"""The demo's rounds, against the app around a FakeEngine, and stock answers of a transport."""

import json
from collections import Counter
from dataclasses import replace

import httpx
import pytest

from tests.kernel.http.conftest import app, engine, server_url  # noqa: F401
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.parts.rounds.demo.options import QUICK, RoundsOptions
from vllm_rollout.parts.rounds.demo.picture import draw
from vllm_rollout.parts.rounds.demo.prompts import LONG, make_prompts
from vllm_rollout.parts.rounds.demo.rounds import Period, ReturnedGroup, Round, plain_rounds, tail_rounds
from vllm_rollout.parts.rounds.demo.run import rounds_table
from vllm_rollout.process import ServerError

pytestmark = pytest.mark.anyio
OPTIONS = RoundsOptions(prompts=4, group_size=2, max_tokens=64)


async def collect(rounds) -> Period:
    return Period(tuple([each async for each in rounds]))


async def plain(answer) -> Period:
    async with httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(answer)) as client:
        return await collect(plain_rounds(client, OPTIONS.questions(), OPTIONS.terms, OPTIONS.sampling))


def answer(request: httpx.Request) -> httpx.Response:
    """As many candidates as asked for, as long as the question has words."""
    body = json.loads(request.content)
    num_tokens = len(body["messages"][0]["content"].split())
    return httpx.Response(200, json={"choices": [{"token_ids": [1] * num_tokens}] * body["n"]})


async def test_a_period_defers_prompts_to_one_long_round_and_returns_each_once(server_url):  # noqa: F811
    groups_over = []
    async with AsyncRolloutClient(server_url) as client:
        rounds = tail_rounds(
            client, OPTIONS.questions(), OPTIONS.terms, OPTIONS.sampling, lambda: groups_over.append(True)
        )
        period = await collect(rounds)
        assert not await client.runs()
    assert [each.name for each in period.rounds] == ["short"] * 4 + ["long"]
    returned = Counter(group.prompt for each in period.rounds for group in each.groups if not group.is_deferred)
    assert returned == Counter(range(20))
    assert len(groups_over) == 20
    assert period.deferred <= {group.prompt for group in period.rounds[-1].groups}
    assert all(len(each.lengths) == OPTIONS.prompts * OPTIONS.group_size for each in period.rounds)
    assert period.wasted_tokens >= 0


async def test_plain_rounds_return_every_prompt_in_the_order_of_the_data():
    period = await plain(answer)
    assert [[group.prompt for group in each.groups] for each in period.rounds] == [
        list(range(first, first + 4)) for first in range(0, 20, 4)
    ]
    assert [each.lengths for each in period.rounds[:1]] == [
        [len(question.split()) for question in OPTIONS.questions()[:4] for _ in range(2)]
    ]
    assert period.wasted_tokens == 0


async def test_plain_rounds_fail_with_the_servers_words():
    with pytest.raises(ServerError, match="answered 400: too long"):
        await plain(lambda request: httpx.Response(400, text="too long"))


def test_prompts_are_a_function_of_the_seed_and_one_in_ten_is_long():
    prompts = make_prompts(40, 7)
    assert prompts == make_prompts(40, 7) != make_prompts(40, 8)
    assert len(set(prompts)) == 40
    assert sum(prompt in LONG for prompt in prompts) == 4


@pytest.mark.parametrize("given", [{}, QUICK])
def test_a_period_fills_its_long_round(given):
    options = RoundsOptions(**given)
    num_short_rounds = options.terms.num_period_prompts // options.terms.num_prompts
    deferred = num_short_rounds * (options.terms.num_prompts - options.prompts)
    assert deferred == options.prompts


@pytest.mark.parametrize("given", [{"prompts": 0}, {"prompts": 16}, {"group_size": 200}, {"max_tokens": 10**6}])
def test_sizes_that_cannot_run_are_refused(given):
    with pytest.raises(ValueError, match=r"--|fewer prompts"):
        RoundsOptions(**given)


def test_the_table_and_the_picture_show_both_ways(tmp_path):
    before = Period((Round("plain", 4.0, (ReturnedGroup(0, 1.0, (5, 6)), ReturnedGroup(1, 4.0, (30, 40))), 81),))
    short = Round("short", 1.0, (ReturnedGroup(0, 1.0, (5, 6)), ReturnedGroup(1, 1.0)), 25)
    after = Period((short, replace(short, name="long", groups=(ReturnedGroup(1, 1.0, (30, 40)),), generated_tokens=70)))
    table = rounds_table(before, after)
    cells = [list(column.cells) for column in table.columns]
    assert cells[1][0] == "4.0"
    assert cells[4][:2] == ["1.0", "1.0"]
    assert cells[6][0] == "#2"
    assert "2.00x" in cells[4][-1]
    path = tmp_path / "rounds.png"
    draw(before, after, RoundsOptions(prompts=1), path)
    assert path.read_bytes().startswith(b"\x89PNG")

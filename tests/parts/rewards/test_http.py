"""A reward server that works, fails for a while, answers nonsense, or never does."""

import asyncio
import json

import httpx
import pytest

from vllm_rollout.parts.rewards.grading import Trajectory
from vllm_rollout.parts.rewards.grading import http as rewards_http
from vllm_rollout.parts.rewards.grading.http import RewardServer

ASKED = Trajectory("6 * 7?", "42", {"answer": "42"})


def grade_of(answers, limit_s=60):
    """`answers`: what the server says to each attempt, a number for a status, or a function of what it was sent."""
    left = list(answers)
    sent = []

    async def answer(request):
        sent.append(json.loads(request.content))
        said = left.pop(0) if len(left) > 1 else left[0]
        if callable(said):
            said = said(sent[-1])
        if said is None:
            await asyncio.sleep(60)
        if isinstance(said, Exception):
            raise said
        if isinstance(said, bytes):
            return httpx.Response(200, content=said)
        return httpx.Response(said, text="no") if type(said) is int else httpx.Response(200, json=said)

    async def ask():
        async with RewardServer("http://rewards/grade", httpx.MockTransport(answer)) as server:
            return await server.grade(ASKED, limit_s)

    return asyncio.run(ask()), sent


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(rewards_http, "FIRST_PAUSE_S", 0.01)


def test_what_may_be_secret_in_its_url_is_not_told():
    async def refuse(request):
        raise httpx.ConnectError("refused")

    async def ask():
        url = "http://user:s3cret@rewards:9000/grade?key=k3y"
        async with RewardServer(url, httpx.MockTransport(refuse)) as server:
            return await server.grade(ASKED, 0.05)

    assert asyncio.run(ask()).reason == "the reward server rewards:9000 gave no reward: refused"


def test_the_server_gets_the_trajectory_and_its_reward_comes_back():
    grade, (sent,) = grade_of([lambda asked: {"id": asked["id"], "reward": 0.5, "right": 1, "why": "close"}])
    assert (grade.status, grade.reward, grade.parts) == ("ok", 0.5, {"right": 1})
    assert {name: sent[name] for name in ("prompt", "text", "data")} == {
        "prompt": "6 * 7?",
        "text": "42",
        "data": {"answer": "42"},
    }
    assert grade_of([1.5])[0].reward == 1.5
    assert grade_of([{"reward": None}])[0].status == "void"
    assert grade_of([b'{"reward": 1, "\\ud800": 2}'])[0].parts == {"\\ud800": 2}  # it could not be answered as it is


@pytest.mark.parametrize("first", [500, 503, 429, httpx.ConnectError("refused"), httpx.ReadError("cut")])
def test_what_may_pass_is_tried_again_with_the_same_id(first):
    grade, sent = grade_of([first, first, {"reward": 1}])
    assert (grade.status, grade.reward, len(sent)) == ("ok", 1, 3)
    assert len({each["id"] for each in sent}) == 1


@pytest.mark.parametrize(
    ("answer", "said", "attempts"),
    [
        (400, "answered 400: no", 1),
        (b"<html>", "no JSON", 1),
        ({"reward": "1"}, "'reward'", 1),
        ({"id": "another", "reward": 1}, "another trajectory", 1),
        (b"9" * (2 << 20), "more than 1 MiB", 1),
        (500, "it answered 500", None),
        (None, "did not answer within 0.3 s", 1),
    ],
)
def test_a_server_that_is_wrong_or_dead_is_an_error_and_no_reward(answer, said, attempts):
    # The limit is short only where the question ends by it: on a slow machine another answer takes a second.
    grade, sent = grade_of([answer], limit_s=0.3 if answer in (None, 500) else 60)
    assert (grade.status, grade.reward) == ("error", None)
    assert said in grade.reason
    assert attempts in (None, len(sent))


@pytest.mark.parametrize("url", ["grade", "http://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="must be a URL such as"):
        RewardServer(url)

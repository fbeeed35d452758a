"""POST /v1/votes: majority, confidence and quality, over answers or over texts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from tests.kernel.http.test_errors import check_error
from tests.support.waiting import WAIT_S
from vllm_rollout import RolloutClient, RolloutError
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.parts.pruning.http import votes
from vllm_rollout.parts.pruning.http.votes import MAX_VOTES, VoteAnswer

ANSWERS = ["7", "8", "8.0", None, "7", "8"]
WEIGHTS = [9.0, 1.0, 2.0, 50.0, 8.0, 3.0]


async def vote(http: httpx.AsyncClient, **body: Any) -> VoteAnswer:
    response = await http.post("/v1/votes", json=body)
    assert response.status_code == 200, response.text
    return VoteAnswer.model_validate_json(response.content)


@pytest.mark.parametrize(
    ("fields", "winner", "tally", "counts"),
    [
        ({"answers": ANSWERS}, "8", {"8": 3, "7": 2}, (5, 1, 0)),
        ({"answers": ANSWERS, "method": "confidence", "weights": WEIGHTS}, "7", {"7": 17, "8": 6}, (5, 1, 0)),
        (
            {"answers": ["7", "8", "8", "9"], "method": "quality", "weights": [-5.0, 0.1, 0.2, None]},
            "8", {"8": 5 / 3, "7": 1 / 3}, (3, 1, 1),
        ),
        ({"answers": [None, " "]}, None, {}, (0, 2, 0)),
    ],
)  # fmt: skip
async def test_each_method_counts_by_its_rule(http, fields, winner, tally, counts):
    answer = await vote(http, **fields)
    assert (answer.winner, answer.tally) == (winner, tally)
    assert answer.share == (pytest.approx(tally[winner] / sum(tally.values())) if tally else 0)
    assert (answer.num_votes, answer.num_abstained, answer.num_without_weight) == counts
    assert (answer.method, answer.is_correct, answer.maj_at_k) == (fields.get("method", "majority"), None, None)


async def test_the_right_answer_is_compared_in_its_normal_form(http):
    assert (await vote(http, answers=["1,000"], correct="1000.0")).is_correct is True
    assert (await vote(http, answers=["1,000"], correct="100")).is_correct is False
    answer = await vote(http, answers=[None, " "], correct="4", k=1)
    assert (answer.is_correct, answer.maj_at_k.accuracy) == (False, 0)


async def test_maj_at_k_counts_subsets(http):
    answer = await vote(http, answers=["1", "1", "2"], correct="1", k=1)
    assert answer.maj_at_k.model_dump() == {"k": 1, "accuracy": pytest.approx(2 / 3), "is_exact": True}
    answer = await vote(http, answers=["1"] * 40 + ["2"] * 20, correct="1", k=15)
    assert 0.8 < answer.maj_at_k.accuracy < 1
    assert not answer.maj_at_k.is_exact


def body(**fields: Any) -> dict[str, Any]:
    return {"answers": ["1", "2"], **fields}


def texts(**fields: Any) -> dict[str, Any]:
    return {"texts": ["Answer: 4"] * 2, "answer_pattern": r"(\d)", **fields}


BAD = {
    # name: body, param, words of the message
    "neither": ({}, None, ["exactly one of answers, texts", "neither"]),
    "answers_empty": (body(answers=[]), "answers", [f"1 to {MAX_VOTES}", "list of 0"]),
    "answer_long": (body(answers=["x" * 5000]), "answers.0", ["4096"]),
    "texts_without_pattern": ({"texts": ["a"]}, "answer_pattern", ["needed with texts"]),
    "pattern_without_texts": (body(answer_pattern="a"), "answer_pattern", ["only applies to texts"]),
    "pattern_long": (texts(answer_pattern="a" * 600), "answer_pattern", ["512"]),
    "pattern_repeats": (
        texts(answer_pattern="(a{65535}){65535}"),
        "answer_pattern",
        ["4294836225", "at most 1176", "* or +"],
    ),
    "pattern_nested": (texts(answer_pattern="((a{100,}){,100}){2}"), "answer_pattern", ["20000", "at most 1000"]),
    "pattern_long_and_repeated": (
        texts(answer_pattern="(?:" + "a?" * 80 + "){200}"),
        "answer_pattern",
        ["200", "at most 118"],
    ),
    "pattern_fuzzy": (texts(answer_pattern="(?b)(?:(?:abc|bcd)+){e<=200}"), "answer_pattern", ["fuzzy counts"]),
    "pattern_fuzzy_costs": (texts(answer_pattern=r"\\N{2i+1d<9}"), "answer_pattern", ["fuzzy counts"]),
    "pattern_recursive": (texts(answer_pattern="a(?R)"), "answer_pattern", ["recursion", "choices"]),
    "pattern_calls_a_group": (texts(answer_pattern="(a|(?1))"), "answer_pattern", ["recursion"]),
    "pattern_calls_a_name": (texts(answer_pattern="(?P<x>(?&x)a|a)"), "answer_pattern", ["recursion"]),
    "pattern_calls_pythons_name": (texts(answer_pattern="(?P<x>(?P>x)a|a)"), "answer_pattern", ["recursion"]),
    "pattern_verbose": (texts(answer_pattern="(?ix)(# a\n?R)"), "answer_pattern", ["the flag x"]),
    "pattern_malformed": (texts(answer_pattern="(a"), "answer_pattern", ["no regular expression", "(a"]),
    "weights_missing": (body(method="quality"), "weights", ["needed with method quality", "majority"]),
    "weights_few": (body(weights=[1.0]), "weights", ["as many as candidates (2)", "got 1"]),
    "weight_negative": (body(weights=[-1.0, 2.0], method="confidence"), "weights", ["got -1", "quality"]),
    "k_many": (body(k=3, correct="1"), "k", ["at most the number of candidates (2)", "got 3"]),
    "k_without_correct": (body(k=1), "k", ["needs correct"]),
    "correct_blank": (body(correct=" "), "correct", ["blank"]),
    "unknown_field": (body(pattern="a"), "pattern", ["not a field", "answer_pattern"]),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_vote_is_explained(http, name):
    bad, param, words = BAD[name]
    check_error(await http.post("/v1/votes", json=bad), 400, param, words)


async def test_a_weight_that_is_no_number_is_explained(http):
    content = b'{"answers": ["1"], "method": "confidence", "weights": [NaN]}'
    response = await http.post("/v1/votes", content=content, headers={"content-type": "application/json"})
    check_error(response, 400, "weights.0", ["finite number"])


@pytest.mark.parametrize(
    ("text", "pattern", "answer"),
    [
        (r"First \boxed{1}, then \boxed{1,042.50}.", r"\\boxed{(.*?)}", "1042.5"),
        ("The answer is 7. No: the Answer is $-42.", r"(?i)answer is\s*\$?(-?\d+)", "-42"),
        ("2 + 3 = 5", r"-?\d+(?:\.\d+)?", "5"),
        ("#### 12\n####  \n", r"####([^\n]*)", "12"),
        ("A: x", r"B: (\w)|A: (\w)", "x"),
        (r"\boxed{e} (?R)", r"\\boxed\{(e)\} \(\?R\)", "e"),
        ("on 2026-11-30", r"\p{Ll}+ (\d{4}-\d{2}-\d{2})", "2026-11-30"),
        ("= 1" + " " * votes.SEARCH_LENGTH, r"= (\d)", None),
        ("no number", r"\d+", None),
        ("", r"\d+", None),
    ],
)
async def test_the_last_match_is_the_answer(http, text, pattern, answer):
    assert (await vote(http, texts=[text, None], answer_pattern=pattern)).answers == [answer, None]


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|a)*b", r"(.*)*=", r"(a?){30}a{30}"])
async def test_a_pattern_that_would_take_forever_is_given_up(http, monkeypatch, pattern):
    monkeypatch.setattr(votes, "MAX_PATTERN_TIME_S", 0.2)
    # Without a limit, backtracking would take longer than the universe has.
    response = await http.post("/v1/votes", json={"texts": ["a" * 3000 + "!"] * 3, "answer_pattern": pattern})
    if response.status_code != 200:  # some of them are seen through
        check_error(response, 400, "answer_pattern", ["more than 0.2 s for 3 texts", "literal"])


@pytest.fixture
def others_are_done(monkeypatch) -> threading.Event:
    """maj@k is counted when it is set."""
    event, count = threading.Event(), votes.accuracy_at_k
    monkeypatch.setattr(votes, "accuracy_at_k", lambda *args: count(*args) if event.wait(60) else None)
    return event


def test_the_client_votes(client: RolloutClient):
    arguments: dict[str, Any] = {"method": "quality", "weights": [1, 2.5, None], "correct": "4", "k": 2}
    answer = client.vote(["3", "4", "4"], **arguments)
    assert (answer.winner, answer.is_correct, answer.maj_at_k.k) == ("4", True, 2)
    assert client.vote(texts=["= 3", "= 4", "= 4"], answer_pattern=r"= (\d+)", **arguments) == answer
    with pytest.raises(RolloutError, match="exactly one of answers, texts") as raised:
        client.vote()
    assert raised.value.status == 400


async def test_votes_beyond_what_may_wait_are_told_when_to_come_back(http, monkeypatch, others_are_done):
    monkeypatch.setattr(votes, "counter", votes.VoteCounter(num_threads=1, max_requests=2))
    slow = {"answers": ["1", "2"], "correct": "1", "k": 1}
    waiting = [asyncio.create_task(http.post("/v1/votes", json=slow)) for _ in range(2)]
    response = None
    async with asyncio.timeout(WAIT_S):
        while response is None or response.status_code == 200:
            response = await http.post("/v1/votes", json={"answers": ["1"]})
            await asyncio.sleep(0)
    check_error(response, 429, None, ["2 votes", "answers in place of texts"])
    assert int(response.headers["retry-after"]) >= 1
    others_are_done.set()
    assert [(await task).status_code for task in waiting] == [200, 200]
    assert (await vote(http, answers=["1"])).winner == "1"


async def test_a_client_that_goes_frees_its_place_when_its_search_has_ended(monkeypatch):
    counter = votes.VoteCounter(num_threads=1, max_requests=1)
    may_end = threading.Event()
    monkeypatch.setattr(votes, "_count_votes", lambda request: may_end.wait(60))
    request = votes.VoteRequest(answers=["1"])
    gone = asyncio.create_task(counter.count(request))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    with pytest.raises(RequestError, match="1 votes"):
        await counter.count(request)
    may_end.set()
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                assert await counter.count(request)
                break
            except RequestError:
                await asyncio.sleep(0.001)

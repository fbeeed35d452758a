"""A judge's model that works, fails for a while, lies or never ends; texts that try to become its template."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from vllm_rollout.parts.rewards.grading import Grader, Trajectory
from vllm_rollout.parts.rewards.grading import http as rewards_http
from vllm_rollout.parts.rewards.grading import judge as rewards_judge
from vllm_rollout.parts.rewards.grading import verdicts as rewards_verdicts
from vllm_rollout.parts.rewards.grading.judge import Judge, JudgeEngine

ASKED = Trajectory("6 * 7?", "It is 42.", {"answer": "42", "points": [{"worth": 3}]})
PATTERN = {"template": "{prompt} {text}", "pattern": r"Score: (\S+)"}
CHOICES = {"template": "{text}", "choices": {"yes": 1, "no": 0, "maybe": 0.5}}
WHERE = {"url": "http://judge", "model": "critic"}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(rewards_http, "FIRST_PAUSE_S", 0.01)
    monkeypatch.delenv(rewards_judge.ENGINE_VARIABLE, raising=False)


def chat(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}


def likely(*tokens):
    """A chat's answer with these next tokens and their log probabilities."""
    ways = [{"token": token, "logprob": logprob, "bytes": None} for token, logprob in tokens]
    return {"choices": [{"message": {"content": "y"}, "logprobs": {"content": [{"token": "y", "top_logprobs": ways}]}}]}


async def endless():
    while True:
        yield b"9" * (1 << 16)


class Model:
    """A fake model. Its answer to each request is a status, an error, JSON, bytes, or a function of the request."""

    def __init__(self, *answers):
        self._answers = list(answers)
        self.requests = []

    async def __call__(self, request):
        self.requests.append(request)
        said = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if callable(said):
            said = await said(request)
        if isinstance(said, Exception):
            raise said
        if type(said) is int:
            return httpx.Response(said, text="no")
        return httpx.Response(200, json=said) if isinstance(said, dict | list) else httpx.Response(200, content=said)

    @property
    def bodies(self):
        return [json.loads(request.content) for request in self.requests]

    @asynccontextmanager
    async def judge(self, **terms):
        async with Judge(transport=httpx.MockTransport(self), **(WHERE | PATTERN | terms)) as judge:
            yield judge


def grade_of(*answers, trajectory=ASKED, limit_s=60, **terms):
    """The grade and the bodies that the model got."""
    model = Model(*answers)

    async def ask():
        async with model.judge(**terms) as judge:
            return await judge.grade(trajectory, limit_s)

    return asyncio.run(ask()), model.bodies


def test_a_chat_is_asked_with_the_fields_filled_in_and_the_last_match_is_the_reward():
    template = [
        {"role": "system", "content": 'You grade. {{"a": {{}}}}'},
        {"role": "user", "content": "{prompt}|{text}|{data.answer}|{data[points][0].worth}|{data.points}"},
    ]
    answer = chat("Score: 1 would be too low.\nScore: 0.75")
    grade, (body,) = grade_of(answer, template=template, sampling_params={"max_tokens": 64, "seed": 1})
    assert (grade.status, grade.reward) == ("ok", 0.75)
    assert body["messages"] == [
        {"role": "system", "content": 'You grade. {"a": {}}'},
        {"role": "user", "content": '6 * 7?|It is 42.|42|3|[{"worth": 3}]'},
    ]
    assert {name: body[name] for name in ("model", "temperature", "max_tokens", "seed")} == {
        "model": "critic", "temperature": 0, "max_tokens": 64, "seed": 1,
    }  # fmt: skip


def test_a_plain_text_is_completed_and_a_chat_in_it_is_written_by_its_messages(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text"}]}]
    model = Model({"choices": [{"text": "Score: 2"}]})
    terms = {
        "template": "{prompt}\n{text}",
        "api": "completions",
        "api_key_env": "JUDGE_KEY",
        "url": "http://judge/v1/",
    }

    async def ask():
        async with model.judge(**terms) as judge:
            return await judge.grade(Trajectory(prompt, "no"), 60)

    assert asyncio.run(ask()).reward == 2
    assert model.bodies[0]["prompt"] == 'system: Be brief.\n\nuser: [{"type": "text"}]\nno'
    assert str(model.requests[0].url) == "http://judge/v1/completions"
    assert model.requests[0].headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    "text", ["{data.answer}", "{prompt.__class__.__mro__}", "{0}", "{{", "}", "%(data)s", "$prompt", "\\1 \\g<0>", "{"]
)
def test_a_text_cannot_become_a_part_of_the_template(text):
    grade, (body,) = grade_of(chat("Score: 0"), trajectory=Trajectory(text, text, {"answer": text}))
    assert grade.status == "ok"
    assert body["messages"][0]["content"] == f"{text} {text}"


def test_data_that_lack_a_field_are_an_error_that_says_what_they_have():
    grade, bodies = grade_of(chat("Score: 1"), template="{data.gold}")
    assert (grade.status, grade.reward, bodies) == ("error", None, [])
    assert "asks for data.gold; the prompt's data has ['answer', 'points']" in grade.reason


@pytest.mark.parametrize(
    ("said", "values", "reward", "reason"),
    [
        ("Score: Yes", {"yes": 1.0, "no": 0.0}, 1.0, None),
        ("Score: -2e1", None, -20.0, None),
        ("Score: perhaps", {"yes": 1.0, "no": 0.0}, None, "'perhaps' is none of yes, no"),
        ("Score: nan", None, None, "'nan' is no finite number"),
        ("Score: inf", None, None, "'inf' is no finite number"),
        ("Score: 1e308", None, None, "'1e308' is no finite number up to 1e+100"),  # two of them have no mean
        ("Score: ten", None, None, "say values"),
        ("I would rather not.", None, None, "its pattern is not in 'I would rather not.'"),
        ("Score: 1" + " " * 5000, None, None, "its pattern is not in"),
        (None, None, None, "its pattern is not in ''"),
    ],
)
def test_a_verdict_is_a_finite_number_or_none(said, values, reward, reason):
    grade, _ = grade_of(chat(said), values=values)
    assert (grade.status, grade.reward) == ("error" if reason else "ok", reward)
    assert reason is None or (reason in grade.reason and "the judge critic: " in grade.reason)


def test_a_pattern_that_searches_for_ever_ends(monkeypatch):
    monkeypatch.setattr(rewards_verdicts, "PATTERN_S", 0.05)
    grade, _ = grade_of(chat("a" * 4000 + "!"), pattern=r"((?:a+)+)$")
    assert "its pattern takes more than 0.05 s" in grade.reason


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_choices_are_weighed_by_how_likely_they_are_among_themselves(api):
    tokens = [(" Yes", -1.0), ("yes", -1.0), ("No", -1.0), ("the", -0.5), ("maybe", -9999.0)]
    answer = likely(*tokens)
    if api == "completions":
        answer = {"choices": [{"text": "y", "logprobs": {"top_logprobs": [dict(tokens)]}}]}
    grade, (body,) = grade_of(answer, api=api, top_logprobs=5, pattern=None, **CHOICES)
    assert grade.reward == pytest.approx(2 / 3)
    assert grade.parts == pytest.approx({"yes": 2 / 3, "no": 1 / 3, "maybe": 0})
    asked = {name: body.get(name) for name in ("logprobs", "top_logprobs", "max_tokens")}
    many = {"chat": (True, 5), "completions": (5, None)}[api]
    assert asked == {"logprobs": many[0], "top_logprobs": many[1], "max_tokens": 1}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (likely(("the", -0.1), ("a", -2.0)), "none of yes, no, maybe is among its likeliest tokens ['the', 'a']"),
        (likely(("yes", -9999.0)), "none of yes, no, maybe"),
        (likely(("yes", 1e9)), "is no log probability"),
        (json.dumps(likely(("yes", float("nan")))).encode(), "is no log probability"),
        (json.dumps(likely(("yes", 10**400))).encode(), "no OpenAI answer"),
        (likely(("yes", "high")), "no OpenAI answer"),
        (chat("yes"), "none of yes, no, maybe is among its likeliest tokens []"),
    ],
)  # fmt: skip
def test_choices_without_a_probability_are_no_verdict(answer, reason):
    grade, _ = grade_of(answer, pattern=None, **CHOICES)
    assert (grade.status, grade.reward) == ("error", None)
    assert reason in grade.reason


@pytest.mark.parametrize("first", [500, 429, httpx.ConnectError("refused"), httpx.ReadError("cut")])
def test_what_may_pass_is_tried_again(first):
    grade, bodies = grade_of(first, first, chat("Score: 1"))
    assert (grade.reward, len(bodies)) == (1, 3)


async def never(request):
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (404, "answered 404: no"),
        (500, "it answered 500"),
        (never, "did not answer within 0.3 s"),
        (b"<html>", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (endless(), "more than 1 MiB"),
        ([], "no OpenAI answer"),
        ({"choices": []}, "no choice"),
        ({"choices": [{"text": "Score: 1"}]}, "no OpenAI answer"),
        ({"choices": [{"message": {"content": ["Score: 1"]}}]}, "no OpenAI answer"),
    ],
)
def test_a_judge_that_is_wrong_or_dead_is_an_error_and_no_reward(answer, reason):
    # The limit is short only where the question ends by it: on a slow machine another answer takes a second.
    grade, _ = grade_of(answer, limit_s=0.3 if answer in (never, 500) else 60)
    assert (grade.status, grade.reward) == ("error", None)
    assert reason in grade.reason


def test_equal_questions_are_asked_once_and_the_least_recently_asked_is_forgotten():
    model = Model(chat("Score: 1"))

    async def ask():
        async with model.judge(cache=2) as judge:
            for text in "abacab":
                assert (await judge.grade(Trajectory("p", text), 60)).reward == 1
        async with model.judge(cache=0) as judge:
            for text in "dd":
                await judge.grade(Trajectory("p", text), 60)

    asyncio.run(ask())
    assert [body["messages"][0]["content"] for body in model.bodies] == ["p a", "p b", "p c", "p b", "p d", "p d"]


def test_a_failure_is_not_remembered():
    model = Model(chat("?"), chat("Score: 1"))

    async def ask():
        async with model.judge() as judge:
            return [(await judge.grade(ASKED, 60)).status for _ in range(3)]

    assert asyncio.run(ask()) == ["error", "ok", "ok"]
    assert len(model.requests) == 2


def test_who_leaves_does_not_end_a_question_that_another_waits_for():
    came, answers = asyncio.Event(), asyncio.Event()

    async def when_told(request):
        came.set()
        await answers.wait()
        return chat("Score: 1")

    model = Model(when_told)

    async def ask():
        async with model.judge() as judge:
            leaves, hasty, stays = (asyncio.create_task(judge.grade(ASKED, limit_s)) for limit_s in (60, 0.01, 60))
            await came.wait()
            leaves.cancel()
            late = await hasty
            answers.set()
            return late, await stays

    late, kept = asyncio.run(ask())
    assert "did not answer within 0.01 s" in late.reason
    assert kept.reward == 1
    assert len(model.requests) == 1


def test_a_question_that_nobody_waits_for_ends():
    came, ended = asyncio.Event(), asyncio.Event()

    async def until_cancelled(request):
        came.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    model = Model(until_cancelled, chat("Score: 1"))

    async def ask():
        async with model.judge() as judge:
            both = [asyncio.create_task(judge.grade(ASKED, 60)) for _ in range(2)]
            await came.wait()
            for each in both:
                each.cancel()
            await asyncio.wait_for(ended.wait(), 5)
            return await judge.grade(ASKED, 60)

    assert asyncio.run(ask()).reward == 1


def test_a_judge_without_a_url_asks_the_engine_beside_the_server(tmp_path, monkeypatch):
    file = tmp_path / "judge.json"
    monkeypatch.setenv(rewards_judge.ENGINE_VARIABLE, str(file))
    JudgeEngine("http://127.0.0.1:1234", "key").write(file)
    model = Model(chat("Score: 1"), httpx.ConnectError("refused"))

    async def ask():
        async with Judge(transport=httpx.MockTransport(model), **PATTERN) as judge:
            yield await judge.grade(ASKED, 60)
            dying = asyncio.create_task(judge.grade(Trajectory("p", "another"), 0.2))
            await asyncio.sleep(0)
            JudgeEngine("http://127.0.0.1:1234", "key", "it ended with exit status -9").write(file)
            yield await dying
            yield await judge.grade(Trajectory("p", "a third"), 60)

    async def all_of_them():
        return [grade async for grade in ask()]

    graded, dying, refused = asyncio.run(all_of_them())
    assert graded.reward == 1
    assert str(model.requests[0].url) == "http://127.0.0.1:1234/v1/chat/completions"
    assert model.requests[0].headers["authorization"] == "Bearer key"
    assert model.bodies[0]["model"] == "judge"
    assert [grade.status for grade in (dying, refused)] == ["error", "error"]
    assert "refused; it ended with exit status -9" in dying.reason
    assert "does not run: it ended with exit status -9" in refused.reason


def test_without_a_url_and_without_an_engine_nobody_can_be_asked():
    async def enter():
        async with Judge(**PATTERN):
            pass

    with pytest.raises(ValueError, match="--rollout-judge MODEL"):
        asyncio.run(enter())


def test_a_grader_takes_a_judge_or_the_file_that_a_user_writes(tmp_path):
    file = tmp_path / "judge.toml"
    file.write_text(
        'url = "http://judge"\nmodel = "critic"\nchoices = {yes = 1, no = 0}\n'
        'template = """\n{prompt}\n{text}\nIs {data.answer} right?"""\n'
    )

    async def grade():
        judge = Judge(transport=httpx.MockTransport(Model(chat("Score: 3"))), **WHERE, **PATTERN)
        async with Grader({"mine": judge, "file": str(file)}) as grader:
            return grader.names, await grader.grade("mine", ASKED)

    names, graded = asyncio.run(grade())
    assert names == ["mine", "file"]
    assert graded.reward == 3


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('template = "{answer}"\npattern = "(.)"', "there is no field 'answer', there are {prompt}, {text}, {data}"),
        ('template = "{prompt.x}"\npattern = "(.)"', "there is no field 'prompt.x'"),
        ('template = "{data.__class__!r}"\npattern = "(.)"', "there is no field"),
        ('template = "{text} }"\npattern = "(.)"', "a lone }"),
        ('template = ""\npattern = "(.)"', "must say something"),
        ('template = [{role = "user", says = "x"}]\npattern = "(.)"', "role and content"),
        ('template = "x"', "`pattern` or by `choices`"),
        ('template = "x"\npattern = "(.)"\nchoices = {a = 1}', "`pattern` or by `choices`"),
        ('template = "x"\nchoices = {a = 1}\nvalues = {a = 1}', "values: are words of a `pattern`"),
        ('template = "x"\npattern = "."', "must have one group"),
        ('template = "x"\npattern = "("', "no regular expression"),
        ('template = "x"\nchoices = {}', "choices: must name words"),
        ('template = "x"\nchoices = {a = 1, A = 0}', "differ in more than case"),
        ('template = "x"\nchoices = {a = inf}', "a finite number up to 1e+100, got inf for a"),
        ('template = "x"\nchoices = {a = "1"}', "Expected `float`"),
        ('template = "x"\npattern = "(.)"\ntemperature = 1', "no field 'temperature', it has template, pattern"),
        (
            'template = "x"\npattern = "(.)"\nsampling_params = {stream = true}',
            "sampling_params: stream cannot be said",
        ),
        ('template = "x"\npattern = "(.)"\nsampling = {seed = 1}', "sampling: renamed, write sampling_params"),
        ('template = "x"\npattern = "(.)"\nmodel = "m"', "'m' is at some url"),
        ('template = "x"\npattern = "(.)"\nurl = "judge"\nmodel = "m"', "url: must be one such as"),
        ('template = "x"\npattern = "(.)"\nurl = "http://judge"', "with a model"),
        ('template = [{role = "user", content = "x"}]\npattern = "(.)"\napi = "completions"', "takes a text"),
        ('template = "x"\npattern = "(.)"\napi_key_env = "NO_SUCH_KEY"', "NO_SUCH_KEY is not set"),
        ('template = "x"\npattern = "(.)"\ncache = -1', "cache must be at least 0"),
        ('pattern = "(.)"', "missing required field `template`"),
        ("template = ", "Invalid value"),
        (None, "No such file"),
    ],
)
def test_a_judge_that_cannot_be_is_refused_by_name(tmp_path, lines, said):
    file = tmp_path / "judge.toml"
    if lines is not None:
        file.write_text(lines)
    with pytest.raises(ValueError, match=r"the judge file .*judge\.toml: ") as refused:
        Grader({"mine": str(file)})
    assert said in str(refused.value)

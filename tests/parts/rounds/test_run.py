"""Runs as trainers use them, over a socket."""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import httpx
import pytest

from tests.kernel.http.conftest import make_app, serving
from tests.kernel.http.fake_engine import FakeEngine
from tests.support.waiting import WAIT_S, wait_until
from vllm_rollout import AsyncRolloutClient, AsyncRun, RolloutClient, RolloutError, Run, answers
from vllm_rollout.kernel.http.answers import GroupEvent
from vllm_rollout.parts.rounds.client import run as run_module
from vllm_rollout.parts.rounds.client.run_calls import named
from vllm_rollout.parts.rounds.http.answers import DeferredEvent, RoundDoneEvent, RoundEvent, RoundStreamEvent


def make_run(client: RolloutClient, **options: object) -> Run:
    return client.run(2, 4, prompt_speculation=1.5, response_speculation=1.5, sampling_params={"seed": 3}, **options)


def data(count: int) -> list[dict[str, str]]:
    return [{"id": f"q{i}", "prompt": f"question {i}"} for i in range(count)]


def test_rounds_return_every_prompt_once(client: RolloutClient) -> None:
    run = make_run(client, id="train")
    answers = list(run.rounds(data(23)))
    back = Counter(group.prompt_id for answer in answers for group in answer.groups)
    assert back == {f"q{i}": 1 for i in range(23)}
    assert {answer.kind for answer in answers} == {"short", "long"}
    assert all(len(group.trajectories) == 2 for answer in answers for group in answer.groups)
    for answer in answers[:-2]:
        assert len(answer.groups) == 4
    assert run.info.totals.num_waiting == 0
    assert client.runs()[0].totals.num_returned == 23


def test_a_run_of_the_same_name_is_gone_on_with(client: RolloutClient) -> None:
    first = make_run(client, id="train")
    first.round(data(6))
    again = make_run(client, id="train")
    assert again.info.num_rounds == 1
    assert again.info.queue == first.refresh().queue
    with pytest.raises(RolloutError, match="exists with group_size 2, got 3"):
        client.run(3, 4, id="train", prompt_speculation=1.5, response_speculation=1.5, sampling_params={"seed": 3})
    again.delete()
    with pytest.raises(RolloutError, match="not known"):
        first.refresh()


def test_a_round_is_streamed(client: RolloutClient) -> None:
    run = make_run(client)
    events = list(run.stream(data(6), key="k"))
    assert isinstance(events[0], RoundEvent)
    assert {event.__name__ for event in get_args(RoundStreamEvent)} <= {*answers.__all__}
    done = events[-1]
    assert isinstance(done, RoundDoneEvent)
    deferred = [event.prompt_id for event in events if isinstance(event, DeferredEvent)]
    assert sorted(deferred) == sorted(done.deferred)
    assert sum(isinstance(event, GroupEvent) for event in events) == 4
    assert [type(event) for event in run.stream(key="k")][-1] is RoundDoneEvent


async def test_the_async_client_does_the_same(server_url: str) -> None:
    async with AsyncRolloutClient(server_url) as client:
        run = await client.run(2, 4, prompt_speculation=1.5)
        back = Counter[str]()
        async for answer in run.rounds(data(13)):
            back.update(group.prompt_id for group in answer.groups)
        assert back == {f"q{i}": 1 for i in range(13)}
        events = [event async for event in run.stream(data(6))]
        assert isinstance(events[-1], RoundDoneEvent)
        assert (await client.runs())[0].num_rounds == run.info.num_rounds + 1
        await run.delete()


def test_both_runs_have_the_same_methods() -> None:
    for name in ("refresh", "round", "stream", "rounds", "give_up", "delete"):
        sync, other = getattr(Run, name), getattr(AsyncRun, name)
        assert list(inspect.signature(sync).parameters) == list(inspect.signature(other).parameters)
        assert sync.__doc__ == other.__doc__


def test_prompts_without_an_id_are_named_by_what_they_say(client: RolloutClient) -> None:
    assert named("17 + 25 =", 0) == named({"prompt": "17 + 25 ="}, 5)
    assert named("17 + 25 =", 0)["id"] != named("17 + 26 =", 0)["id"]
    assert named({"id": "a", "prompt": "x"}, 0)["id"] == "a"
    answers = list(make_run(client).rounds(f"{i % 5} + 1 =" for i in range(9)))  # some say the same
    back = Counter(group.prompt_id for answer in answers for group in answer.groups)
    ids = [named(f"{i} + 1 =", 0)["id"] for i in range(5)]
    assert back == Counter([*ids, *(f"{id}-2" for id in ids[:4])])


def test_two_trainers_take_turns(client: RolloutClient, server_url: str) -> None:
    make_run(client, id="shared")
    back: list[str] = []

    def train(first: int) -> None:
        with RolloutClient(server_url) as own:
            run = make_run(own, id="shared")
            for answer in run.rounds(data(40)[first::2]):
                back.extend(group.prompt_id for group in answer.groups)

    trainers = [threading.Thread(target=train, args=(first,)) for first in (0, 1)]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.join(WAIT_S)
    assert Counter(back) == {f"q{i}": 1 for i in range(40)}


def test_a_round_that_a_server_left_open_is_asked_for_again(tmp_path: Path) -> None:
    """The trainer is started again, too: it knows the run's name, and nothing of the key."""
    database = tmp_path / "runs.sqlite"
    engine = FakeEngine(dies_at_step=3)
    with serving(make_app(engine, database=database)) as url, RolloutClient(url) as client:
        run = make_run(client, id="train")
        with pytest.raises(RolloutError, match="has stopped"):
            run.round(data(6), key="lost", patience_s=0, include=["text", "logprobs"])
        wait_until(lambda: run.refresh().open_round.state == "interrupted")
    with serving(make_app(FakeEngine(), database=database)) as url, RolloutClient(url) as client:
        run = make_run(client, id="train")
        answers = list(run.rounds(data(12)[6:], include=["text", "logprobs"]))
    assert answers[0].idempotency_key == "lost"
    assert Counter(group.prompt_id for answer in answers for group in answer.groups) == {f"q{i}": 1 for i in range(12)}


def against(answer: Callable[[], httpx.Response]) -> tuple[Run, list[float]]:
    """A run whose server answers so, and when it was asked."""
    asked: list[float] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(time.monotonic())
        return answer()

    client = RolloutClient(transport=httpx.MockTransport(handle))
    return Run(AsyncRun(client._awaited, SimpleNamespace(id="r", next_round="short"))), asked


def refusal(status: int, **headers: str) -> httpx.Response:
    said = {"message": "no", "type": "Refused", "param": None, "code": status}
    return httpx.Response(status, json={"error": said}, headers=headers)


@pytest.mark.thorough
def test_patience_begins_when_the_server_is_gone_and_not_when_the_round_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "LASTED_S", 0.3)

    def answer() -> httpx.Response:
        if len(asked) == 1:
            time.sleep(0.5)  # it ran for longer than one would wait for a server
        if len(asked) < 4:
            raise httpx.RemoteProtocolError("the server is started again")
        return refusal(418)

    run, asked = against(answer)
    with pytest.raises(RolloutError, match="418"):
        run.round([], patience_s=0.4)


def test_another_trainer_s_round_is_waited_for_however_long_it_takes() -> None:
    run, asked = against(lambda: refusal(409, **{"retry-after": "1"}) if len(asked) < 3 else refusal(418))
    with pytest.raises(RolloutError, match="418"):
        run.round([], patience_s=0.5)


def test_what_would_end_alike_is_not_asked_for_again() -> None:
    def late() -> httpx.Response:
        raise httpx.ReadTimeout("late")

    for answer in (lambda: httpx.Response(200, json={"nonsense": 1}), late):
        run, asked = against(answer)
        with pytest.raises(RolloutError):
            run.round([], patience_s=60)
        assert len(asked) == 1


def test_a_wrong_option_is_named(client: RolloutClient) -> None:
    with pytest.raises(TypeError, match="redundency is no option; there are"):
        client.run(2, 4, redundency=3)
    with pytest.raises(TypeError, match="got one str"):
        list(make_run(client).rounds("a prompt"))

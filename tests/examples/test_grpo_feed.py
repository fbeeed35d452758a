"""The reference trainer with a feed at a server around a fake engine: what is lost, and how it goes on."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry

from examples.grpo import server as asked
from examples.grpo import train
from examples.grpo.train import Training
from tests.examples.test_grpo_server import _tokens, app_of, learned_from, lines_of, once, start  # noqa: F401
from tests.kernel.http.conftest import serving
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.feeds.test_restarts import kill
from vllm_rollout import RolloutClient
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.parts.feeds.http.service import FeedService
from vllm_rollout.parts.feeds.http.store import FeedStore

Ask = Callable[[Request], Any]


def fed_app(engine: FakeEngine) -> FastAPI:
    """With names of weights."""
    app = app_of(engine)

    async def named(request: Request) -> dict[str, Any]:
        engine.weight_version = (await request.json())["new_version"]
        return {"success": True}

    app.router.routes.insert(0, APIRoute("/update_weight_version", named, methods=["POST"]))
    return app


def before_batch(app: FastAPI, key: str, happens: Callable[[], Any]) -> None:
    """Let something happen before the first request for this batch is served."""
    asked: list[bytes] = []

    @app.middleware("http")
    async def look(request: Request, ask: Ask) -> Response:
        if request.url.path.endswith("/batches") and key.encode() in (body := await request.body()):
            asked.append(body)
            if len(asked) == 1:
                await happens()
        response: Response = await ask(request)
        return response


def check_each_once(seen: Counter[str], num: int) -> None:
    assert len(seen) == num
    assert {*seen.values()} == {1}


class Killed(BaseException):
    """Stands in for a kill of the trainer."""


def kill_before(training: Training, work: str, step: int) -> None:
    """Let the trainer die before it calls `work`, after that many completed steps."""
    do = getattr(training, work)

    def done(*args: Any) -> Any:
        if training.progress.step == step:
            raise Killed
        return do(*args)

    setattr(training, work, done)


@pytest.fixture
def url() -> Iterator[str]:
    with serving(fed_app(FakeEngine())) as url:
        yield url


def test_a_server_that_was_started_anew_amid_a_wait_gets_its_weights_again(start, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(train, "LOOK_S", 0.5)
    app = fed_app(engine := FakeEngine(lengths={index: 30 + index for index in range(4)}))

    def serve_feeds() -> None:
        store = FeedStore(tmp_path / "feeds.sqlite")
        app.state.feed_service = FeedService(app.state.rollout_service, engine, Metrics(CollectorRegistry()), store)

    async def restart() -> None:
        await kill(app)
        engine.weight_version, engine.step_s = None, 0.0
        serve_feeds()

    def say(step: train.Step) -> None:
        said(step)
        engine.step_s = 0.5 * (training.progress.step == 1)  # groups of the next batch do not end before the restart

    serve_feeds()
    before_batch(app, "step-1", restart)
    with serving(app) as url:
        training = start(url, "--feed", "--max-staleness", "0")
        said, training.say = training.say, say
        check_each_once(learned_from(training), 3 * 4)
    assert "lost (412: timeout_s: no batch within 0.5 s: the server has started anew." in capsys.readouterr().out
    assert [line["staleness"] for line in lines_of(training, "step")] == [[0] * 4] * 3


def test_a_server_that_ends_amid_a_wait_is_started_again(start, monkeypatch):  # noqa: F811
    """Its feed has ended with it. The next feed begins with the problems after those of completed steps."""
    monkeypatch.setattr(asked, "RolloutClient", partial(RolloutClient, backoff_s=0.01))
    apps = [fed_app(FakeEngine()), fed_app(FakeEngine())]

    async def end() -> None:
        threading.Thread(target=first.close).start()
        await asyncio.Event().wait()

    before_batch(apps[0], "step-1", end)
    with ExitStack() as first, serving(apps[1]) as second:
        urls = [first.enter_context(serving(apps[0])), second]
        training = start(urls[0], "--feed", "--max-staleness", "0")

        def started(args: Any) -> SimpleNamespace:
            log = args.output / "server.log"
            log.touch()
            return SimpleNamespace(url=urls.pop(0), log=log, stop=lambda: None, wait_until_healthy=lambda on_wait: 1.0)

        monkeypatch.setattr(asked, "start", started)
        training.args.serve = True
        training.server.bring_back()
        check_each_once(learned_from(training), 3 * 4)
    assert urls == []
    assert training.progress.first_problem == 2 * 4  # with max_staleness 0 a step's prompts and the next one's are put


@pytest.mark.thorough
def test_a_training_that_goes_on_with_more_steps_has_new_problems(url, start) -> None:  # noqa: F811
    """Its feed was deleted at the end, and the next one counts its prompts from 0."""
    seen = learned_from(start(url, "--feed", "--steps", "2"))
    more = start(url, "--feed", "--steps", "3")
    kill_before(more, "say", 3)  # its prompts are in the feed
    with pytest.raises(Killed):
        more.go()
    check_each_once(seen + learned_from(start(url, "--feed", "--steps", "5")), 5 * 4)


def test_weights_that_are_not_finite_leave_the_checkpoint(url, start, monkeypatch) -> None:  # noqa: F811
    training, finish = start(url, "--feed"), train.Update.finish

    def explode(update: train.Update) -> Any:
        result = finish(update)
        if update.model is bad and training.progress.step == 1:
            next(bad.parameters()).data[3, 3] = math.nan
        return result

    bad = training.model
    monkeypatch.setattr(train.Update, "finish", explode)
    with pytest.raises(ValueError, match="after 2 steps: 1 weights are NaN"):
        training.go()
    training = start(url, "--feed", "--lr", "1e-5")
    training.go()
    assert [line["step"] for line in lines_of(training, "step")] == [0, 1, 2]
    assert [line["lr"] for line in lines_of(training, "start")] == ["0.0003", "1e-05"]


@pytest.mark.parametrize("work", ["say", "save", "give_weights"])
def test_a_kill_at_the_end_of_a_step_loses_no_line(work, url, start) -> None:  # noqa: F811
    training = start(url, "--feed")
    kill_before(training, work, 2)
    with pytest.raises(Killed):
        training.go()
    training = start(url, "--feed")
    training.go()
    lines = lines_of(training, "step")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert sum(line["seconds"]["step"] for line in lines) == pytest.approx(training.progress.seconds)


@pytest.mark.parametrize("flags", ["", "--feed"])
def test_seconds_of_steps_leave_out_a_server_that_was_lost(flags, url, start, monkeypatch) -> None:  # noqa: F811
    clock = [0.0]
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: clock[0], monotonic=time.monotonic))
    training = start(url, "--steps", "1", *flags.split())
    bring_back = training.server.bring_back

    def bring_back_later() -> None:
        clock[0] += 100.0
        bring_back()

    def learn(update: train.Update) -> Any:
        clock[0] += 2.0
        return finish(update)

    finish = train.Update.finish
    monkeypatch.setattr(train.Update, "finish", learn)
    training.server.bring_back = bring_back_later
    training.learned_by_server = once(training.learned_by_server, lambda: lines_of(training, "evaluation"))
    training.give_weights = once(training.give_weights, lambda: training.progress.step == 1)
    training.go()
    assert clock == [202.0]
    assert training.progress.seconds == 2.0


@pytest.mark.parametrize("flag", ["--feed", "--rounds"])
def test_a_server_that_is_lost_again_while_it_is_prepared_is_waited_for(start, flag: str) -> None:  # noqa: F811
    engine = FakeEngine()
    with serving(fed_app(engine)) as url:
        training = start(url, flag, "--steps", "2")
        lost: list[str] = []
        roll_out, give = training.roll_out_and_learn, training.give_weights

        def roll_out_once_lost() -> Any:
            if not lost:
                lost.append("roll out")
                raise train.RolloutError(503, "lost", "ServiceUnavailable")
            return roll_out()

        def give_once_lost() -> None:
            if lost == ["roll out"]:
                lost.append("give weights")
                raise train.RolloutError(503, "lost again", "ServiceUnavailable")
            give()

        training.roll_out_and_learn, training.give_weights = roll_out_once_lost, give_once_lost
        training.go()
    assert lost == ["roll out", "give weights"]
    assert [line["step"] for line in lines_of(training, "step")] == [0, 1]

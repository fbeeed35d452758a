"""The reference trainer at a server around a fake engine: what is lost, or asked for, and how it goes on."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from examples.grpo import server as asked
from examples.grpo import train
from examples.grpo.model import new_model, new_tokenizer, save
from examples.grpo.server import Server
from examples.grpo.train import Step, Training, parse
from tests.kernel.http import fake_engine
from tests.kernel.http.conftest import make_app, serving
from tests.kernel.http.fake_engine import MODEL, FakeEngine
from tests.parts.rewards.test_grading import FakeGraders, by_length
from vllm_rollout import RolloutClient, RolloutError
from vllm_rollout.kernel.http.answers import GroupAnswer
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.grading.values import Trajectory

LOST = RolloutError(None, "no connection", "ConnectError")


class Graders(FakeGraders):
    names = ("chain",)


def app_of(engine: FakeEngine, grade: Callable[[Trajectory], Grade] = by_length) -> FastAPI:
    """With vLLM's endpoints that a trainer asks for."""
    app, tokenizer = make_app(engine, graders=Graders(grade)), new_tokenizer()
    app.router.routes[:] = [r for r in app.router.routes if not isinstance(r, APIRoute) or r.path != "/v1/models"]

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": MODEL, "root": "/not/on/this/host"}]}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        return {"tokens": tokenizer.encode((await request.json())["prompt"], add_special_tokens=False)}

    @app.post("/{done:path}")  # what takes new weights
    async def done() -> dict[str, Any]:
        return {"success": True}

    return app


class Sampling(fake_engine.Sampling):
    """With what means nothing to the fake engine."""

    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


@pytest.fixture(autouse=True)
def _tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says what the small policy knows, but is not that policy."""
    monkeypatch.setattr(fake_engine, "VOCAB_SIZE", 64)
    monkeypatch.setattr(fake_engine, "Sampling", Sampling)
    monkeypatch.setattr(train, "LARGEST_DIFFERENCE", math.inf)


FIRST_ARE_RIGHT = dict.fromkeys(range(4), 2) | dict.fromkeys(range(4, 8), 31)
"""Lengths by index: of eight candidates the first four win a race, and are right."""


@pytest.fixture
def urls() -> Iterator[tuple[str, str]]:
    """URLs of two servers."""
    with serving(app_of(FakeEngine())) as first, serving(app_of(FakeEngine())) as second:
        yield first, second


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Training]:
    """Start a training at a server."""
    save(new_model(0), new_tokenizer(), tmp_path / "model")

    def start(url: str, *words: str) -> Training:  # the same folder each time
        small = "--prompts 4 --group-size 4 --max-tokens 32 --held-out 4 --evaluate-every 9 --steps 3"
        args = parse([str(tmp_path / "model"), str(tmp_path / "run"), "--url", url, *small.split(), *words])
        args.output.mkdir(exist_ok=True)
        server = Server(args)
        server.bring_back()
        return Training(args, server)

    return start


def once(work: Callable[..., Any], happens: Callable[[], bool], how: RolloutError = LOST) -> Callable[..., Any]:
    """The function `work`, which raises `how` once, as soon as `happens` is true."""
    lost: list[bool] = []

    def done(*args: Any) -> Any:
        if not lost and happens():
            lost.append(True)
            raise how
        return work(*args)

    return done


def lines_of(training: Training, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, training.record.read_text().splitlines()) if line["kind"] == kind]


def learned_from(training: Training) -> Counter[str]:
    """Count of each prompt's use in training steps, until the training ends."""
    seen: Counter[str] = Counter()
    say = training.say

    def say_and_count(step: Step) -> None:
        seen.update(group.prompt_id for group in step.groups)
        say(step)

    training.say = say_and_count  # type: ignore[method-assign]
    training.go()
    return seen


def check_run(training: Training, seen: Counter[str]) -> None:
    """Each prompt that was handed in has taught once, or waits."""
    assert training.run is not None
    run = training.run.refresh()
    handed_in = {f"train-1-{i}" for i in range(training.progress.num_prompts)}
    assert Counter(handed_in) == seen + Counter([*run.queue, *run.unstarted])


@pytest.mark.thorough
def test_what_waits_in_a_run_is_kept_where_the_server_dies_before_it_has_the_weights(urls, start) -> None:
    training = start(urls[0], "--rounds")

    def bring_back() -> None:
        training.server.client = RolloutClient(urls[1])  # it knows nothing

    training.server.bring_back = bring_back
    training.give_weights = once(training.give_weights, lambda: training.progress.step == 1)
    check_run(training, learned_from(training))


@pytest.mark.thorough
def test_a_first_round_that_ended_unheard_is_done_again(urls, start) -> None:
    training = start(urls[0], "--rounds", "--speculation", "2")  # a long round comes next
    groups = training.groups

    def lost_at_the_end(step: Step) -> Iterator[GroupAnswer]:
        training.groups = groups
        yield from groups(step)
        raise LOST

    training.groups = lost_at_the_end
    check_run(training, learned_from(training))


@pytest.mark.thorough
@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_server_that_its_proxy_does_not_find_is_waited_for(urls, start, status) -> None:
    training = start(urls[0])
    error = RolloutError(status, "no upstream", "Bad Gateway")
    training.give_weights = once(training.give_weights, lambda: training.progress.step == 1, error)
    assert sum(learned_from(training).values()) == 3 * 4


@pytest.mark.thorough
@pytest.mark.parametrize("is_dead", [True, False])
def test_an_engine_that_died_is_waited_for_where_its_api_process_still_answers(urls, start, monkeypatch, is_dead):
    training = start(urls[0])
    error = RolloutError(500, "EngineCore encountered an issue", "Internal Server Error")
    training.give_weights = once(training.give_weights, lambda: training.progress.step == 1, error)
    monkeypatch.setattr(training.server.client, "health", lambda: not is_dead)
    if is_dead:
        assert sum(learned_from(training).values()) == 3 * 4
    else:  # whatever it is, another server would say it, too
        with pytest.raises(RolloutError, match="encountered an issue"):
            training.go()


@pytest.mark.thorough
def test_a_server_that_was_started_anew_behind_the_trainers_back_gets_its_run_again(urls, start) -> None:
    training = start(urls[0], "--rounds")
    roll_out = training.roll_out_and_learn

    def roll_out_at_another() -> Step:
        if training.progress.step == 1:
            training.roll_out_and_learn = roll_out
            training.server.client = RolloutClient(urls[1])  # it knows no run
        return roll_out()

    training.roll_out_and_learn = roll_out_at_another
    check_run(training, learned_from(training))


@pytest.mark.thorough
@pytest.mark.parametrize("flags", ["", "--rounds --resume"])
def test_weights_that_somebody_else_gave_are_not_trained_on(start, flags) -> None:
    with serving(app_of(FakeEngine(weight_version="another-7"))) as url:
        training = start(url, *flags.split())
        if flags:  # what goes on may have begun by earlier ones
            training.go()
            return
        with pytest.raises(RuntimeError, match=r"other weights: it sampled with \{'another-7'\}"):
            training.go()
        assert training.progress.step == 0


def test_weights_that_are_not_finite_are_not_sent(start) -> None:
    sent: list[str] = []
    app = app_of(FakeEngine())

    @app.middleware("http")
    async def look(request: Request, ask: Callable[[Request], Any]) -> Response:
        sent.append(request.url.path)
        return await ask(request)

    with serving(app) as url:
        training = start(url)
        next(training.model.parameters()).data[3, 3] = math.nan
        sent.clear()
        with pytest.raises(ValueError, match=r"NaN or infinite, the first is .*embed_tokens"):
            training.go()
        assert sent == []


@pytest.mark.thorough
def test_the_learning_rate_may_change_where_a_training_goes_on(urls, start) -> None:
    start(urls[0], "--steps", "1").go()
    training = start(urls[0], "--steps", "2", "--lr", "1e-4", "--micro-tokens", "512")
    training.go()
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4 * 2 / 5)
    assert [line["lr"] for line in lines_of(training, "start")] == ["0.0003", "0.0001"]
    with pytest.raises(RuntimeError, match=r"was made with \{'group_size': '4'\}"):
        start(urls[0], "--group-size", "5").go()


@pytest.mark.thorough
def test_a_training_in_which_nothing_teaches_ends(start) -> None:
    with serving(app_of(FakeEngine(), lambda _: Grade("ok", 1.0))) as url:
        training = start(url, "--steps", "20")
        with pytest.raises(RuntimeError, match=r"for 10 steps nothing taught: rewards are all the same.*1\.000"):
            training.go()
    assert [line["gradient_norm"] for line in lines_of(training, "step")] == [0.0] * 10


def test_a_group_that_is_incomplete_teaches_by_what_it_has_and_is_said(start, capsys) -> None:
    with serving(app_of(FakeEngine(failures={0: 0}))) as url:
        training = start(url, "--steps", "1", "--held-out", "1")
        training.go()
    (step,) = lines_of(training, "step")
    assert (step["groups"], len(step["rewards"])) == (4, 4 * 3)
    assert step["gradient_norm"] > 0
    assert "train-1-0 is incomplete: " in capsys.readouterr().out


def test_a_tokenizer_that_differs_in_one_word_of_an_answer_is_another_one(start) -> None:
    words = {"answer": "total", "total": "answer"}
    app = app_of(FakeEngine())

    @app.middleware("http")
    async def swap(request: Request, ask: Callable[[Request], Any]) -> Response:
        if request.url.path != "/tokenize":
            return await ask(request)
        text = (await request.json())["prompt"]
        ids = new_tokenizer().encode(" ".join(words.get(word, word) for word in text.split()), add_special_tokens=False)
        return JSONResponse({"tokens": ids})

    with serving(app) as url, pytest.raises(RuntimeError, match=r"tokenizer makes .* of the token"):
        start(url)


def test_a_server_that_is_not_there_is_waited_for_with_a_word(tmp_path, capsys) -> None:
    server = Server(parse(["model", str(tmp_path), "--url", "http://127.0.0.1:9", "--patience", "0"]))
    with pytest.raises(TimeoutError):
        server.bring_back()
    assert "no server at http://127.0.0.1:9 yet: waiting for it (--serve starts one)" in capsys.readouterr().out


def test_weights_go_by_vllms_own_transfer(start, monkeypatch) -> None:
    """Its two ends without a GPU: what would go over NCCL is looked at."""
    nccl = pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")
    sent: list[str] = []
    app, wanted = app_of(FakeEngine()), ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    wanted += ["/update_weight_version", "/v1/weights/recompute", "/resume"]

    @app.get("/get_world_size")
    async def get_world_size() -> dict[str, int]:
        return {"world_size": 2}

    @app.middleware("http")
    async def look(request: Request, ask: Callable[[Request], Any]) -> Response:
        if request.method == "POST":
            sent.append(request.url.path)
            if request.url.path in ("/init_weight_transfer_engine", "/update_weights"):
                told[request.url.path] = await request.json()
        return await ask(request)

    told: dict[str, Any] = {}
    monkeypatch.setattr(nccl, "open_trainer_endpoint", lambda info: "a communicator")
    monkeypatch.setattr(
        nccl, "packed_nccl_broadcast_producer", lambda iterator, **_: told.update(broadcast=[n for n, _ in iterator])
    )
    with serving(app) as url:
        training = start(url, "--nccl")
        sent.clear()
        training.prepare_server()
        assert sent == ["/init_weight_transfer_engine", *wanted]
        sent.clear()
        training.give_weights()
        assert sent == wanted
    assert told["/init_weight_transfer_engine"]["init_info"]["world_size"] == 3
    assert told["/update_weights"]["update_info"]["names"] == told["broadcast"] == list(training.learned)
    assert not (training.args.output / "weights").exists()


def test_a_server_that_is_lost_when_it_says_what_it_has_learned_is_waited_for(urls, start) -> None:
    training = start(urls[0], "--redundancy", "auto")
    training.prepare_server()
    client = training.server.client
    client.state = once(client.state, lambda: True)
    assert sum(learned_from(training).values()) == 3 * 4


def test_who_was_stopped_makes_a_group_of_right_winners_teach_with_dapo_too(start) -> None:
    with serving(app_of(FakeEngine(lengths=FIRST_ARE_RIGHT))) as url:
        training = start(url, "--algorithm", "dapo", "--race", "--stopped-teach", "--steps", "1")
        assert sum(learned_from(training).values()) == training.progress.num_prompts == 4
    (step,) = lines_of(training, "step")
    assert (step["teaching"], step["filtered"]) == (4, 0)


def test_a_server_with_a_key_is_looked_at_with_it(start, monkeypatch) -> None:
    app = app_of(FakeEngine())

    @app.middleware("http")
    async def refuse(request: Request, ask: Callable[[Request], Any]) -> Response:
        allowed = request.url.path == "/health" or request.headers.get("authorization") == "Bearer secret"
        return await ask(request) if allowed else Response(status_code=401)

    monkeypatch.setenv("VLLM_API_KEY", "secret")  # vLLM's server and our client read it
    with serving(app) as url:
        start(url, "--steps", "0").go()


@pytest.mark.parametrize(
    ("failures", "grade", "why"),
    [
        ({0: 0, 1: 0}, by_length, "2 failed"),
        ({}, lambda _: Grade("error", reason="no answer in the data"), "no answer in the data"),
        ({}, lambda _: Grade("void", reason="the sandbox is gone"), "4 void"),
    ],
)
def test_an_evaluation_without_a_reward_says_why(start, failures, grade, why) -> None:
    with serving(app_of(FakeEngine(failures=failures), grade)) as url, pytest.raises(RuntimeError, match=why):
        start(url).evaluate()


def test_answers_whose_grader_failed_are_not_wrong_ones(start, capsys) -> None:
    grades = cycle([Grade("ok", 1.0), Grade("error", reason="out of disk")])
    with serving(app_of(FakeEngine(), lambda _: next(grades))) as url:
        start(url).evaluate()
    said = capsys.readouterr().out
    assert "success 1.000" in said
    assert "4 of 8 trajectories have no reward; of the first one: out of disk" in said


def test_the_log_of_a_server_that_was_lost_is_kept(
    urls: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = ["out of memory", "all is well"]

    def start(args: argparse.Namespace) -> SimpleNamespace:
        log = args.output / "server.log"
        log.write_text(logs.pop(0))
        return SimpleNamespace(url=urls[0], log=log, stop=lambda: None, wait_until_healthy=lambda on_wait: 1.0)

    monkeypatch.setattr(asked, "start", start)
    server = Server(parse(["model", str(tmp_path), "--serve"]))
    server.bring_back()
    server.bring_back()
    texts = [(tmp_path / name).read_text() for name in ("server.lost.log", "server.log")]
    assert texts == ["out of memory", "all is well"]

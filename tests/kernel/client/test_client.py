"""The clients say what was asked, in the server's words, over connections that break."""

from __future__ import annotations

import asyncio
import json
import pickle
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import aclosing, closing, contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

import vllm_rollout
from tests.kernel.http.fake_engine import MODEL, FakeEngine
from tests.support.waiting import WAIT_S, wait_until
from vllm_rollout import AsyncRolloutClient, RolloutClient, RolloutError, answers
from vllm_rollout.kernel.client.body import rollout_body
from vllm_rollout.kernel.client.connection import raise_for_error
from vllm_rollout.kernel.client.groups import GroupStream
from vllm_rollout.kernel.http.answers import (
    DoneEvent,
    Event,
    GroupAnswer,
    RestartedEvent,
    RewardEvent,
    RolloutEvent,
    TokensEvent,
    Trajectory,
    TrajectoryEvent,
)
from vllm_rollout.kernel.http.protocol import DualEnd, DualEndSelection, Prompt, RolloutRequest

FAST = {"backoff_s": 0.01}
ENDLESS = {"min_tokens": 4000}


def test_importing_the_package_and_the_client_stays_light():
    code = (
        "import sys, vllm_rollout; assert 'httpx' not in sys.modules; assert 'RolloutClient' in dir(vllm_rollout); "
        "from vllm_rollout import RolloutClient, AsyncRolloutClient, RolloutError; "
        "assert not {'vllm', 'torch', 'fastapi'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)


def test_every_event_of_a_stream_is_a_public_answer():
    assert {event.__name__ for event in get_args(RolloutEvent)} <= {*answers.__all__}
    assert all(getattr(answers, name) for name in answers.__all__)


def test_unknown_names_of_the_package_are_attribute_errors():
    assert all(getattr(vllm_rollout, name) for name in vllm_rollout.__all__)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        vllm_rollout.nothing_of_the_kind  # noqa: B018


def test_both_clients_have_the_same_methods():
    names = {name for name in dir(RolloutClient) if name == "__init__" or not name.startswith("_")}
    assert names >= {"rollout", "stream", "post_rewards"}
    for name in names:
        ours, theirs = (signature(getattr(cls, name)) for cls in (RolloutClient, AsyncRolloutClient))
        assert ours.parameters == theirs.parameters


@pytest.mark.parametrize("cls", [RolloutClient, AsyncRolloutClient])
@pytest.mark.parametrize(("name", "own"), [("rollout", set()), ("stream", {"stream_tokens"})])
def test_help_names_every_option_with_its_default(cls, name, own):
    method = getattr(cls, name)
    mine, body = signature(method).parameters, RolloutRequest.model_fields
    options = {name for name in body if name not in ("stream", "stream_tokens")}
    assert mine.keys() - {"self", "timeout"} == options | own
    known = {name: body[name] for name in options - {"prompts", "group_size", "sampling_params"}}
    assert mine["sampling_params"].default is None
    assert {name: mine[name].default for name in known} == {name: field.default for name, field in known.items()}
    assert all(f"\n{name}: {known[name].description}" in method.__doc__ for name in known.keys() - {"redundancy"})


@pytest.mark.parametrize("wrong", ["temperature", "stream", "stream_tokens"])
def test_arguments_that_rollout_does_not_know_are_type_errors(client: RolloutClient, wrong):
    with pytest.raises(TypeError, match=wrong):
        client.rollout(["p"], 1, **{wrong: 1})


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("text", {"prompt": "text"}),
        ([1, 2], {"prompt_token_ids": [1, 2]}),
        ((1, 2), {"prompt_token_ids": [1, 2]}),
        ([], {"prompt_token_ids": []}),
        ([{"role": "user", "content": "hi"}], {"messages": [{"role": "user", "content": "hi"}]}),
        ({"id": "q", "prompt": "text"}, {"id": "q", "prompt": "text"}),
        (Prompt(id="q", prompt_token_ids=[1]), {"id": "q", "prompt_token_ids": [1]}),
    ],
)
def test_prompts_come_in_every_form(prompt, sent):
    assert rollout_body([prompt], 1)["prompts"] == [sent]


def test_token_ids_may_be_numpy_integers():
    numpy = pytest.importorskip("numpy")
    sent = rollout_body([numpy.array([1, 2]), list(numpy.array([3], dtype=numpy.int32))], 1)["prompts"]
    assert json.dumps(sent) == '[{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]'


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("one text", r"Write \[prompt\]"),
        ({"prompt": "text"}, r"Write \[prompt\]"),
        ([1, 2, 3], r"prompts\[0\] must be text"),
        (["text", [1, "x"]], r"prompts\[1\] must be text"),
        ([[1.5]], r"prompts\[0\] must be text"),
        ([b"text"], "decode it"),
    ],
)
def test_prompts_of_no_known_form_are_type_errors(prompts, words):
    with pytest.raises(TypeError, match=words):
        rollout_body(prompts, 1)


def test_every_argument_reaches_the_body():
    arguments: dict[str, Any] = {
        "redundancy": 2, "early_stop": False, "selection": DualEndSelection(dual_end=DualEnd(num_longest=2)),
        "pruning": {"detection_length": 5}, "sampling_params": {"seed": 1}, "include": ["text", "stopped"],
        "model": "m", "stream": True, "stream_tokens": 8, "audit_ratio": 0.1, "audit_unit": "group",
        "migration": "auto", "scale_down": "auto", "on_engine_failure": "retry", "reward": "math",
        "max_candidates": 64, "order": "prompts", "priority": -1,
    }  # fmt: skip
    fields = RolloutRequest.model_fields.keys()  # of the parts that are there
    body = rollout_body(["p"], 4, **{name: value for name, value in arguments.items() if name in fields})
    request = RolloutRequest.model_validate(body)
    assert request.model_fields_set == fields
    assert request.model_dump(exclude={"prompts"}, exclude_unset=True) == {
        k: v for k, v in body.items() if k != "prompts"
    }


def test_sync_and_async_give_the_same(server_url):
    arguments: dict[str, Any] = {
        "prompts": ["one", "two"],
        "group_size": 2,
        "redundancy": 2,
        "sampling_params": {"seed": 3},
    }

    async def run() -> tuple[list[Any], list[Event], list[str], bool]:
        async with AsyncRolloutClient(server_url) as client:
            await client.wait_until_ready(5)
            events = [event async for event in client.stream(**arguments, stream_tokens=2)]
            groups = (await client.rollout(**arguments)).groups
            return groups, events, await client.models(), await client.health()

    groups, events, models, healthy = asyncio.run(run())
    with RolloutClient(server_url + "/v1/") as client:
        client.wait_until_ready(5)
        assert [g.trajectories for g in client.rollout(**arguments).groups] == [g.trajectories for g in groups]
        mine = [e for e in client.stream(**arguments, stream_tokens=2) if isinstance(e, TokensEvent)]
        assert mine == [e for e in events if isinstance(e, TokensEvent)]
        assert client.models() == models == [MODEL]
        assert client.health() is healthy is True


def test_errors_carry_the_servers_words(client: RolloutClient):
    with pytest.raises(RolloutError, match="max_num_seqs") as raised:
        client.rollout(["p"], 60, 60)
    error = raised.value
    assert (error.status, error.param, error.type) == (400, "redundancy", "BadRequest")
    assert error.message in str(error)
    with pytest.raises(RolloutError, match="max_num_seqs"):
        next(client.stream(["p"], 60, 60))
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.status, copy.message, copy.type, copy.param) == (400, error.message, error.type, "redundancy")


def test_error_events_are_raised(server_url, engine: FakeEngine):
    engine.dies_at_step = 2
    seen: list[Event] = []

    async def run() -> None:
        async with AsyncRolloutClient(server_url) as client:
            async for event in client.stream(["p"], 2, stream_tokens=1):
                seen.append(event)

    with pytest.raises(RolloutError, match="engine has stopped") as raised:
        asyncio.run(run())
    assert raised.value.status == 503
    assert seen
    assert engine.num_running == 0


def test_errors_that_are_not_ours_are_told_in_short(server_url):
    with RolloutClient(server_url + "/elsewhere") as client, pytest.raises(RolloutError, match="Not Found") as raised:
        client.rollout(["p"], 1)
    assert raised.value.status == 404


def test_leaving_a_stream_early_aborts_its_candidates(server_url, engine: FakeEngine):
    engine.step_s = 0.001
    with RolloutClient(server_url) as client:
        for _ in client.stream(["p"], 4, sampling_params=ENDLESS, stream_tokens=1):
            break
        wait_until(lambda: engine.num_aborted == 4)
        with closing(client.stream(["p"], 4, sampling_params=ENDLESS, stream_tokens=1)) as events:
            next(events)
        wait_until(lambda: engine.num_aborted == 8)

    async def run() -> None:
        async with AsyncRolloutClient(server_url) as client:
            async with aclosing(client.stream(["p"], 4, sampling_params=ENDLESS, stream_tokens=1)) as events:
                await anext(events)
            await asyncio.to_thread(wait_until, lambda: engine.num_aborted == 12)
            waiting = asyncio.create_task(client.rollout(["p"], 4, sampling_params=ENDLESS))
            await asyncio.to_thread(wait_until, lambda: engine.num_launched == 16)
            waiting.cancel()
            await asyncio.to_thread(wait_until, lambda: engine.num_aborted == 16)

    asyncio.run(run())
    assert engine.num_running == 0


@pytest.mark.thorough
def test_read_timeout_is_told_and_not_retried(server_url, engine: FakeEngine):
    engine.step_s = 0.01
    # Long enough for the candidates to be launched on a loaded machine.
    with RolloutClient(server_url, read_timeout_s=3) as client:
        for call in (client.rollout, lambda *args, **fields: list(client.stream(*args, **fields))):
            with pytest.raises(RolloutError, match="read_timeout_s") as raised:
                call(["p"], 2, sampling_params=ENDLESS)
            assert (raised.value.status, raised.value.type) == (None, "ReadTimeout")
        assert client.rollout(["p"], 1, timeout=30, sampling_params={"max_tokens": 20, "min_tokens": 20}).groups
    assert engine.num_launched == 5


def test_api_key_is_sent():
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"data": [{"id": "m"}]})

    with RolloutClient("http://host/v1", api_key="secret", transport=httpx.MockTransport(answer)) as client:
        assert client.models() == ["m"]
    assert seen[0].headers["authorization"] == "Bearer secret"
    assert seen[0].url == "http://host/v1/models"


def test_waits_are_as_stated():
    seen: list[dict[str, float | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.extensions["timeout"])
        return httpx.Response(404)

    for settings, timeout in (({}, None), ({}, 5.0), ({"connect_timeout_s": 1, "read_timeout_s": 2}, None)):
        with RolloutClient(transport=httpx.MockTransport(answer), **settings) as client, pytest.raises(RolloutError):
            client.rollout(["p"], 1, timeout=timeout)
    assert [(waits.pop("connect"), waits.pop("read")) for waits in seen] == [(10.0, None), (10.0, 5.0), (1, 2)]
    assert seen == [{"write": None, "pool": None}] * 3


@contextmanager
def raw_server(answers: list[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """Accepts one connection per answer, reads a request, sends the answer as it is and closes."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    received.append(connection.recv(65536))
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", received
        thread.join(5)


def http_answer(body: bytes, kind: str = "application/json", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {size}\r\n\r\n".encode() + body


MODELS = http_answer(b'{"data": [{"id": "m"}]}')


def models(url: str, **settings: Any) -> list[str]:
    with RolloutClient(url, **settings) as client:
        return client.models()


def test_connection_lost_before_the_answer_is_retried():
    with raw_server([b"", b"", MODELS]) as (url, received):
        assert models(url, **FAST) == ["m"]
    assert len(received) == 3


def test_connection_refused_is_retried_then_told():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(RolloutError, match="in 3 attempts") as raised:
        models(url, num_retries=2, **FAST)
    assert (raised.value.status, raised.value.type) == (None, "ConnectError")
    assert "vllm-rollout serve" in raised.value.message


def test_backoff_doubles(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("vllm_rollout.kernel.client.client.time.sleep", waits.append)

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with RolloutClient(transport=httpx.MockTransport(refuse)) as client, pytest.raises(RolloutError):
        client.models()
    assert waits == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("answer", "call", "words"),
    [
        (http_answer(b": comment\n\n", "text/event-stream"), "stream", "ended before its done event"),
        (b"HTTP/1.1 308 Permanent Redirect\r\ncontent-length: 0\r\n\r\n", "stream", "308: Permanent Redirect"),
        (http_answer(b'{"object": "rollout"}'), "rollout", "not of this client's version"),
        (http_answer(b'{"data"', length=100), "rollout", "incomplete|peer closed|reset by peer"),
    ],
)
def test_an_answer_that_is_cut_or_of_another_version_is_an_error_and_not_asked_for_again(answer, call, words):
    with (
        raw_server([answer]) as (url, received),
        RolloutClient(url, **FAST) as client,
        pytest.raises(RolloutError, match=words),
    ):
        list(getattr(client, call)(["p"], 1))
    assert len(received) == 1


def test_events_survive_any_split_of_the_bytes(client: RolloutClient, server_url):
    body = rollout_body(["p"], 2, include=["text", "logprobs"], stream_tokens=1, stream=True)
    content = httpx.post(f"{server_url}/v1/rollouts", json=body).content
    assert "\u2028".encode() in content

    def in_pieces(size: int, ends: bytes) -> list[Event]:
        text = content.replace(b"\n", ends)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=iter(pieces)))
        with RolloutClient(transport=transport) as split:
            return list(split.stream(["p"], 2))

    whole = in_pieces(len(content), b"\n")
    assert isinstance(whole[-1], DoneEvent)
    assert in_pieces(1, b"\n") == in_pieces(7, b"\r\n") == whole


def test_examples_run(server_url, capsys):
    folder = Path(__file__).parents[3] / "examples"
    runpy.run_path(str(folder / "rollout.py"))["main"](server_url)
    assert "poem: complete" in capsys.readouterr().out
    asyncio.run(runpy.run_path(str(folder / "stream.py"))["main"](server_url))
    assert "group 0: complete" in capsys.readouterr().out
    asyncio.run(runpy.run_path(str(folder / "stream_tokens.py"))["main"](server_url))
    assert "0: complete, selected [" in (out := capsys.readouterr().out)
    assert ": surplus, dropped" in out


def test_the_trainers_loop_standardizes_rewards_within_a_group():
    advantages = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "trainer_loop.py"))["advantages"]
    assert advantages([1, 0, 0, 0]) == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])
    assert advantages([1, 1]) == [0, 0]
    assert advantages([]) == []


def test_health_is_false_without_a_server_or_an_engine(client: RolloutClient, app):
    assert client.health()
    app.state.healthy = False
    assert not client.health()
    with pytest.raises(TimeoutError, match=r"not ready within 0\.05 s"):
        client.wait_until_ready(0.05)
    timer = threading.Timer(0.1, lambda: setattr(app.state, "healthy", True))
    timer.start()
    client.wait_until_ready(5)
    timer.join(WAIT_S)
    with RolloutClient("http://127.0.0.1:9") as nobody:
        assert not nobody.health()


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "localhost:8000", ""])
def test_an_address_without_http_is_told_at_once_and_not_waited_for(address):
    with pytest.raises(ValueError, match="base_url must begin with http://"):
        RolloutClient(address)


@pytest.mark.parametrize("key", ["ключ", "line\n", "\x7f"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(key: str) -> None:
    for name in ("api_key", "admin_key"):
        with pytest.raises(ValueError, match=f"{name} must have printable ASCII") as raised:
            RolloutClient(**{name: key})
        assert key not in str(raised.value)


PROMPTS = [{"id": f"q{i}", "prompt": f"question {i}"} for i in range(5)]


def what_is_said(group: GroupAnswer) -> dict[str, Any]:
    said = group.model_dump(mode="json", exclude={"group_id"})
    said["candidates"].sort(key=lambda candidate: candidate["index"])
    return said


def test_they_are_those_of_a_rollout(client: RolloutClient) -> None:
    asked = {
        "group_size": 2,
        "redundancy": 2,
        "sampling_params": {"seed": 3},
        "include": ["text", "logprobs", "stopped"],
    }
    stream = GroupStream(client.stream(PROMPTS, **asked))
    assert stream.summary is None
    groups = {group.prompt_id: what_is_said(group) for group in stream}
    answer = client.rollout(PROMPTS, **asked)
    assert groups == {group.prompt_id: what_is_said(group) for group in answer.groups}
    assert stream.summary is not None
    for name in ("usage", "model", "weight_version", "budget"):
        assert getattr(stream.summary, name) == getattr(answer, name)


def test_rewards_come_later_and_a_group_that_runs_again_forgets(client: RolloutClient) -> None:
    events = list(client.stream(PROMPTS[:1], 2, sampling_params={"seed": 3}))
    name = {"prompt_id": "q0", "group_id": events[0].group_id}
    lost = TrajectoryEvent(**name, trajectory=Trajectory(index=9, num_tokens=1, token_ids=[1], finish_reason="stop"))
    again = RestartedEvent(**name, reason="the engine died")
    last = next(place for place, event in enumerate(events) if event.type == "group")
    rewards = [RewardEvent(**name, index=index, reward=float(index)) for index in (0, 1)]
    (group,) = GroupStream([lost, again, *events[:last], *rewards, *events[last:]])
    assert [(t.index, t.reward) for t in group.trajectories] == [(0, 0.0), (1, 1.0)]
    assert group.candidates == []


def test_the_key_of_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200)

    for key, asked in ((None, None), ("", None), ("theirs", None), ("theirs", "ours")):
        monkeypatch.delenv("VLLM_API_KEY", raising=False) if key is None else monkeypatch.setenv("VLLM_API_KEY", key)
        with RolloutClient(api_key=asked, transport=httpx.MockTransport(answer)) as client:
            client.health()
    assert seen == [None, None, "Bearer theirs", "Bearer ours"]


def test_a_proxy_in_front_of_a_server_that_starts_is_waited_for() -> None:
    statuses = iter([502, 504, 503, 200])
    with RolloutClient(transport=httpx.MockTransport(lambda _: httpx.Response(next(statuses)))) as client:
        client.wait_until_ready(60)
    assert next(statuses, None) is None


def test_an_answer_of_a_proxy_says_when_to_try_again():
    answer = httpx.Response(503, headers={"retry-after": "5"}, text="<html>no upstream</html>")
    with pytest.raises(RolloutError, match="no upstream") as error:
        raise_for_error(answer)
    assert (error.value.status, error.value.retry_after_s) == (503, 5.0)

"""Token-level streaming: who is announced when, what a slow reader holds up, and what the clients check."""

from __future__ import annotations

import asyncio
import gc
import json
from contextlib import aclosing, closing
from typing import Any

import httpx
import pytest

from tests.kernel.http.conftest import DEADLINE_S
from tests.kernel.http.fake_engine import FakeEngine
from tests.support.waiting import wait_until
from vllm_rollout import RolloutClient, RolloutError
from vllm_rollout.kernel.http import serialised
from vllm_rollout.kernel.http.answers import (
    Candidate,
    CandidateEvent,
    DoneEvent,
    Event,
    GroupEvent,
    TokensEvent,
    TrajectoryEvent,
)
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.service import EVENT_BUFFER, RolloutService

pytestmark = pytest.mark.anyio

PROMPTS = [{"id": "a", "prompt": "one"}, {"id": "b", "prompt_token_ids": [1, 2, 3]}, {"prompt": "three"}]
ENDLESS = {"min_tokens": 4000}
RACE: dict[str, Any] = {"prompts": PROMPTS, "group_size": 4, "redundancy": 4, "sampling_params": {"seed": 7}}


def key_of(event: Event) -> tuple[str, int] | None:
    """Whom a token, trajectory or candidate event is about."""
    match event:
        case TokensEvent():
            return event.prompt_id, event.index
        case TrajectoryEvent(trajectory=ended) | CandidateEvent(candidate=ended):
            return event.prompt_id, ended.index
    return None


def announced(events: list[Event], state: str) -> list[int]:
    """Positions of the events that announce candidates of that state."""
    return [i for i, e in enumerate(events) if isinstance(e, CandidateEvent) and e.candidate.state == state]


def num_after(events: list[Event], position: int) -> int:
    """Tokens of siblings that come after the candidate event at that position."""
    prompt_id = events[position].prompt_id
    later = (event for event in events[position:] if isinstance(event, TokensEvent) and event.prompt_id == prompt_id)
    return sum(len(event.token_ids) for event in later)


def assert_announcements_hold(events: list[Event]) -> None:
    """Assert that each candidate is announced or returned, once. An announced candidate has no later event and is in no
    selection."""
    dropped: set[tuple[str, int]] = set()
    returned: set[tuple[str, int]] = set()
    for event in events:
        if isinstance(event, GroupEvent):
            assert not dropped & {(event.prompt_id, index) for index in event.selected}
        elif (key := key_of(event)) is not None:
            assert key not in dropped | returned
            if isinstance(event, CandidateEvent):
                dropped.add(key)
            elif isinstance(event, TrajectoryEvent):
                returned.add(key)
    assert len(dropped) + len(returned) == events[-1].usage.num_candidates


def test_a_failed_candidate_is_announced_while_its_siblings_run(client: RolloutClient, engine: FakeEngine) -> None:
    engine.lengths = {index: 20 + index for index in range(8)}
    engine.failures = {2: 5}
    events = list(client.stream(**RACE, stream_tokens=1))
    positions = announced(events, "failed")
    assert len(positions) == 3
    for position in positions:
        assert events[position].candidate.num_tokens == 5
        assert num_after(events, position) >= 7 * 15  # until the fourth of the others ends
    assert_announcements_hold(events)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"early_stop": False},
        {"early_stop": False, "selection": "shortest"},
        {"selection": {"dual_end": {"num_longest": 2}}},
        {"sampling_params": {"seed": 7, "max_tokens": 12}},
        {"redundancy": 0, "group_size": 8},
    ],
)
def test_announcements_hold_whatever_the_selection(client: RolloutClient, engine: FakeEngine, fields) -> None:
    engine.failures = {1: 3, 6: 9}
    for seed in range(8):
        arguments = {**RACE, **fields}
        arguments["sampling_params"] = {**arguments["sampling_params"], "seed": seed}
        events = list(client.stream(**arguments, stream_tokens=3))
        assert_announcements_hold(events)


STALLED = [{"id": f"stalled-{i}", "prompt": "p"} for i in range(3)]


def num_held() -> int:
    """Events with tokens of the stalled prompts, in the whole process."""
    gc.collect()
    events = [thing for thing in gc.get_objects() if type(thing) is TokensEvent]
    return sum(event.prompt_id.startswith("stalled-") for event in events)


async def test_for_a_reader_that_never_reads_a_bounded_number_of_events_is_held(engine: FakeEngine) -> None:
    service = RolloutService(engine, Metrics())
    request = RolloutRequest.model_validate(
        {
            "prompts": STALLED,
            "group_size": 8,
            "sampling_params": ENDLESS,
            "stream": True,
            "stream_tokens": 1,
        }
    )
    async with aclosing(service.events(await service.prepare(request))) as events:
        first = await anext(events)
        await asyncio.to_thread(wait_until, lambda: engine.is_idle)
        assert num_held() == 1 + EVENT_BUFFER + len(STALLED)
        assert engine.num_running == 24
    assert isinstance(first, TokensEvent)
    assert engine.num_running == 0


def test_a_client_that_does_not_read_holds_up_nobody_else(client: RolloutClient, engine: FakeEngine) -> None:
    with closing(client.stream(STALLED, 8, sampling_params=ENDLESS, stream_tokens=1)) as stalled:
        next(stalled)
        wait_until(lambda: engine.is_idle)
        for _ in range(3):
            assert client.rollout(PROMPTS, 4, 4).usage.num_candidates == 24
            assert isinstance(list(client.stream(**RACE, stream_tokens=1))[-1], DoneEvent)
        assert engine.num_running == 24
        # Of 96,000: what the service holds, and what the client has parsed of one read.
        assert num_held() < EVENT_BUFFER + 1000
    wait_until(lambda: engine.num_running == 0)


def sse(events: list[Event]) -> bytes:
    return "".join(f"event: {event.type}\ndata: {event.model_dump_json()}\n\n" for event in events).encode()


def tokens(index: int, offset: int, *token_ids: int) -> TokensEvent:
    return TokensEvent(prompt_id="p", index=index, offset=offset, token_ids=list(token_ids))


def trajectory(index: int, *token_ids: int) -> TrajectoryEvent:
    trajectory = {"index": index, "num_tokens": len(token_ids), "token_ids": token_ids, "finish_reason": "stop"}
    return TrajectoryEvent.model_validate({"prompt_id": "p", "group_id": "g", "trajectory": trajectory})


def pruned(index: int, num_tokens: int) -> CandidateEvent:
    candidate = Candidate(index=index, num_tokens=num_tokens, state="pruned")
    return CandidateEvent(prompt_id="p", group_id="g", candidate=candidate)


DONE = DoneEvent.model_validate({"id": "r", "created": 0, "model": "m", "usage": {}, "timing": {}})


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (
            [tokens(3, 0, 1, 2), tokens(3, 3, 4)],
            r"candidate 3 of prompt 'p': got .* token 3 on, expected .* token 2 on",
        ),
        ([tokens(3, 0, 1, 2), tokens(3, 1, 2, 3)], "from token 1 on"),
        ([tokens(3, 1, 2)], "expected those from token 0 on"),
        ([tokens(3, 0, 1), pruned(3, 1), tokens(3, 1, 2)], "expected none, because it had ended"),
        ([tokens(3, 0, 1), pruned(3, 1), tokens(3, 0, 1)], "expected none, because it had ended"),
        ([tokens(3, 0, 1), trajectory(3, 1, 2)], "trajectory 3 of prompt 'p' has 2 tokens, 1 were streamed"),
        ([trajectory(3, 1, 2)], "has 2 tokens, 0 were streamed"),
    ],
)
def test_tokens_that_do_not_join_are_an_error(events, words) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["stream_tokens"] == 1
        return httpx.Response(200, content=sse([*events, DONE]))

    with (
        RolloutClient(transport=httpx.MockTransport(answer)) as client,
        pytest.raises(RolloutError, match=words) as raised,
    ):
        list(client.stream(["p"], 1, stream_tokens=1))
    assert (raised.value.status, raised.value.type) == (None, "IncompleteStream")


def test_tokens_that_join_are_passed_on_as_they_are() -> None:
    events = [
        tokens(3, 0, 1, 2), tokens(5, 0, 9), tokens(3, 2, 3), pruned(5, 1), trajectory(3, 1, 2, 3),
        trajectory(4), DONE,
    ]  # fmt: skip
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=sse(events)))
    with RolloutClient(transport=transport) as client:
        assert list(client.stream(["p"], 1, stream_tokens=1)) == events


async def test_a_stream_that_nobody_reads_ends_after_a_while(app, engine: FakeEngine, monkeypatch) -> None:
    monkeypatch.setattr(serialised, "STALLED_S", 0.05)
    service: RolloutService = app.state.rollout_service
    arguments = {**RACE, "stream": True, "stream_tokens": 1, "sampling_params": ENDLESS}
    rollout = await service.prepare(RolloutRequest.model_validate(arguments))
    taken = []

    async def send(message: dict[str, Any]) -> None:
        taken.append(message["type"])
        if len(taken) == 3:
            await asyncio.Event().wait()

    stream = serialised.EventStream(serialised.server_sent_events(rollout.id, service.events(rollout)))
    await asyncio.wait_for(stream({"type": "http"}, asyncio.Event().wait, send), DEADLINE_S)
    assert len(taken) == 3
    assert engine.num_running == 0

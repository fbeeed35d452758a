"""Spans of rollouts: one trace with what the client has begun, phases and groups below; nothing without a provider."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from typing import Any

import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import DEFAULT_ON

from tests.kernel.http.conftest import DEADLINE_S, http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.page.test_receipts import body
from tests.parts.rewards.test_grading import FakeGraders
from tests.parts.rounds.test_runs import make, play, prompts
from tests.support.waiting import eventually
from vllm_rollout.kernel.http.clients import ClientNamespaces
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.parts.page.http import tracing

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
WAIT_S = 0.05
PHASES = ("preparing", "generating", "answering")


class TracedEngine(FakeEngine):
    """Keeps the headers that each group's candidates are sent with."""

    def run_group(self, order: Any) -> Any:
        self.headers = [*getattr(self, "headers", ()), order.trace_headers]
        return super().run_group(order)


@pytest.fixture
def engine() -> TracedEngine:
    return TracedEngine(lengths={0: 40, 1: 10, 2: 25, 3: 20}, step_s=0.001)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=DEFAULT_ON)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "tracer", provider.get_tracer("test"))
    return exporter


def traceparent(*, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{sampled:02d}"}


def traced_app(engine: FakeEngine) -> FastAPI:
    app = make_app(engine)
    app.add_middleware(ClientNamespaces)
    return app


def the_rollout(spans: InMemorySpanExporter) -> ReadableSpan:
    (rollout,) = [each for each in spans.get_finished_spans() if each.name == "rollout"]
    return rollout


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def below(parent: ReadableSpan, spans: InMemorySpanExporter) -> list[ReadableSpan]:
    return [
        each for each in spans.get_finished_spans() if each.parent and each.parent.span_id == parent.context.span_id
    ]


async def test_a_rollout_is_one_span_in_its_clients_trace(engine: TracedEngine, spans: InMemorySpanExporter) -> None:
    engine.num_launch_places = 4  # one group after the other
    async with http_of(traced_app(engine)) as http:
        answer = (await http.post("/v1/rollouts", json=body(), headers=traceparent())).json()
    rollout = the_rollout(spans)
    assert {f"{each.context.trace_id:032x}" for each in spans.get_finished_spans()} == {TRACE_ID}
    assert f"{rollout.parent.span_id:016x}" == PARENT_ID
    assert attributes(rollout) == {
        "rollout.id": answer["id"],
        "rollout.model": answer["model"],
        "rollout.state": "over",
        "rollout.group_size": 2,
        "rollout.num_prompts": 3,
        "rollout.num_candidates": 12,
    } | {f"rollout.{name}": answer["usage"][name] for name in tracing.OF_USAGE}
    children = below(rollout, spans)
    assert Counter(each.name for each in children) == {"group": 3, "waiting": 1, **dict.fromkeys(PHASES, 1)}
    assert all(rollout.start_time <= each.start_time <= each.end_time <= rollout.end_time for each in children)
    groups = [each for each in children if each.name == "group"]
    assert sorted(attributes(group)["group.prompt_id"] for group in groups) == [its["id"] for its in body()["prompts"]]
    for group in groups:
        assert attributes(group)["group.status"] == "complete"
        assert (attributes(group)["group.num_candidates"], attributes(group)["group.num_stopped"]) == (4, 2)
    parents = {headers["traceparent"] for headers in engine.headers}
    assert parents == {f"00-{TRACE_ID}-{group.context.span_id:016x}-01" for group in groups}
    (waiting,) = [each for each in children if each.name == "waiting"]
    assert waiting.end_time == max(group.start_time for group in groups)


async def test_a_round_says_which_it_is(engine: TracedEngine, spans: InMemorySpanExporter) -> None:
    async with http_of(make_app(engine)) as http:
        await make(http)
        await play(http, prompts=prompts(0, 6))
    rollout = the_rollout(spans)
    assert [attributes(rollout)[f"rollout.{name}"] for name in ("run", "round", "kind")] == ["a", 0, "short"]
    statuses = {attributes(each)["group.status"] for each in below(rollout, spans) if each.name == "group"}
    assert statuses == {"complete", "deferred"}


async def test_grading_is_what_goes_on_after_the_last_candidate(engine, spans):
    graders = FakeGraders()
    graders.may_end.clear()
    async with http_of(make_app(engine, graders=graders)) as http:
        asking = asyncio.create_task(http.post("/v1/rollouts", json=body(reward="even")))
        async with asyncio.timeout(DEADLINE_S):
            await eventually(lambda: len(graders.asked) == 6 and engine.num_running == 0, every_s=0.01)
        await asyncio.sleep(WAIT_S)
        graders.may_end.set()
        await asking
    by_name = {each.name: each for each in below(the_rollout(spans), spans)}
    generating, grading, answering = (by_name[name] for name in ("generating", "grading", "answering"))
    assert generating.end_time == grading.start_time < grading.end_time == answering.start_time
    assert grading.end_time - grading.start_time >= WAIT_S * 1e9


async def test_a_client_that_leaves_leaves_no_open_span(engine: TracedEngine, spans: InMemorySpanExporter) -> None:
    engine.num_launch_places = 8  # two groups, the third does not begin
    engine.lengths = dict.fromkeys(range(4), 1000)
    service = make_app(engine).state.rollout_service
    rollout = await service.prepare(
        RolloutRequest.model_validate(body(sampling_params={}, stream=True, stream_tokens=1))
    )
    async with aclosing(service.events(rollout)) as events:
        seen = {(await anext(events)).prompt_id for _ in range(20)}
    assert len(seen) == 2
    span = the_rollout(spans)
    assert attributes(span)["rollout.state"] == "left"
    assert Counter(each.name for each in below(span, spans))["group"] == 2


async def test_who_is_sampled_out_is_so_with_all_candidates(engine: TracedEngine, spans: InMemorySpanExporter) -> None:
    async with http_of(traced_app(engine)) as http:
        await http.post("/v1/rollouts", json=body(), headers=traceparent(sampled=False))
    assert spans.get_finished_spans() == ()
    assert {headers["traceparent"][-2:] for headers in engine.headers} == {"00"}


async def test_without_a_provider_nothing_is_passed(engine: TracedEngine) -> None:
    async with http_of(traced_app(engine)) as http:
        for headers in ({}, traceparent()):
            assert (await http.post("/v1/rollouts", json=body(), headers=headers)).status_code == 200
    assert engine.headers == [None] * 6

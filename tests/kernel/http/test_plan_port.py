"""The port of parts in the life of a rollout: what a part hears, in which order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from inspect import iscoroutinefunction
from typing import Any, Literal

import pytest
from prometheus_client import CollectorRegistry

from tests.kernel.http.fake_engine import FakeEngine
from vllm_rollout.kernel.http.answers import PartEvent
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.plan_port import GroupPart, GroupRecord, PlanPart, RolloutPart
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.reports import Graded
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.kernel.rules.rewards import Grade, Reward
from vllm_rollout.kernel.rules.selection import deferred

REQUEST = {"prompts": [{"id": "q", "prompt_token_ids": [1]}], "group_size": 2, "redundancy": 1}


def heard(kind: type, names: list[str]) -> type:
    """A part that notes the moments it hears."""

    def noting(name: str, of_part: Callable[..., Any]) -> Callable[..., Any]:
        def hear(self: Any, *args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return of_part(self, *args, **kwargs)

        async def hear_and_wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await hear(self, *args, **kwargs)

        return hear_and_wait if iscoroutinefunction(of_part) else hear

    moments = {name: noting(name, value) for name, value in vars(kind).items() if callable(value) and name[0] != "_"}
    return type("Heard", (kind,), moments)


class Listening(PlanPart):
    """A part whose object of each group is `make_group`."""

    def __init__(self, names: list[str], make_group: Callable[[GroupRecord], GroupPart]) -> None:
        self._names = names
        self._make_group = make_group

    def asked(self, request: RolloutRequest) -> RolloutPart:
        part: RolloutPart = heard(RolloutPart, self._names)()
        part.group = self._make_group  # type: ignore[method-assign]
        return part

    def rewarded(self, rollout_id: str, rewards: Any) -> None:
        self._names.append("rewarded later")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(lengths={0: 3, 1: 5, 2: 9})


@pytest.fixture
def service(engine: FakeEngine) -> RolloutService:
    return RolloutService(engine, Metrics(CollectorRegistry()))


async def run(service: RolloutService, part: PlanPart) -> list[Any]:
    service._parts.append(part)
    rollout = await service.prepare(RolloutRequest.model_validate(REQUEST))
    async with aclosing(service.events(rollout)) as events:
        return [event async for event in events]


async def test_a_part_hears_each_moment_in_the_documented_order(service: RolloutService) -> None:
    names: list[str] = []
    await run(service, Listening(names, lambda record: heard(GroupPart, names)()))
    before = ["choose", "check", "shape", "audit", "ready", "begun"]
    group = ["ordered", "launching", *["ended"] * 3, "stopped", "over", "decided", "keep", "account", "told"]
    assert names.count("fields_of") >= 3, "once for the client, and as often as parts ask"
    assert [name for name in names if name != "fields_of"] == [
        *before,
        *group,
        "finished",
        "warn",
        "leave",
        "over",
        "close",
    ]


async def test_rewards_of_a_finished_rollout_are_heard_by_the_parts_of_the_service(service: RolloutService) -> None:
    names: list[str] = []
    service._parts.append(Listening(names, lambda record: GroupPart()))
    service._rewards_posted("rollout-1", [Reward("q", 0, 1.0, True)])
    assert names == ["rewarded later"]


async def test_a_part_defers_a_group(service: RolloutService) -> None:
    class Deferred(PartEvent):
        type: Literal["deferred"] = "deferred"

    class Deferring(GroupPart):
        async def over(self, over: Any) -> None:
            over.result, over.deferred_because, over.event = deferred(over.result, "cut"), "cut", Deferred()

    events = await run(service, Listening([], lambda record: Deferring()))
    assert [event.type for event in events][-2:] == ["deferred", "done"]
    assert events[-1].usage.returned_tokens == 0


async def test_the_kernel_reads_what_a_part_adds_and_drops_reports_on_an_earlier_attempt(
    service: RolloutService,
) -> None:
    names: list[str] = []

    class Grading(GroupPart):
        adds_sources = True

        def __init__(self, record: GroupRecord) -> None:
            self._record = record

        def ended(self, end: Any) -> None:
            async def grades() -> AsyncGenerator[Graded, None]:
                yield Graded(end, Grade(reward=1.0, status="ok"))
                yield Graded(replace(end), Grade(reward=2.0, status="ok"))  # an end that is not on record

            self._record.sources.add(grades())

        def graded(self, index: int, grade: Grade) -> None:
            assert self._record.grades[index] is grade
            names.append(f"{index}: {grade.reward}")

        def launch_over(self) -> None:
            names.append("launch over")

    await run(service, Listening([], Grading))
    assert sorted(names) == ["0: 1.0", "1: 1.0", "2: 1.0", "launch over"]


def test_a_part_that_is_not_there_is_said_by_its_class(service: RolloutService) -> None:
    with pytest.raises(LookupError, match="Listening"):
        service.part(Listening)

"""A server without a part: rollouts run, and a field that only this part obeys is refused with its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing

import pytest
from prometheus_client import CollectorRegistry

from tests.kernel.http.fake_engine import FakeEngine
from tests.support.left_out import parts_left_out
from tests.without import with_dependents
from vllm_rollout.kernel import parts
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.plan_port import ASKS_A_PART
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.service import RolloutService

BODY = {"prompts": [{"prompt": "a"}], "group_size": 2}
VALUES = {"audit_ratio": 0.5, "redundancy": "auto", "reward": "exact"}
OF_BODIES = {"migration": "auto", "scale_down": "auto", "pruning": {"detection_length": 8}}
"""Fields that parts add to the body."""


def fields_of(name: str) -> frozenset[str]:
    plan, body = parts.face(name, "plan"), parts.face(name, "fields")
    return frozenset(() if plan is None else plan.fields) | frozenset(() if body is None else body.model_fields)


@pytest.fixture(params=sorted(parts.installed_parts()))
def left_out(request: pytest.FixtureRequest) -> Iterator[frozenset[str]]:
    """Fields of a part that is left out, and of all that need it."""
    gone = with_dependents([request.param])
    fields = frozenset().union(*map(fields_of, gone))
    with parts_left_out(gone):
        yield fields


def test_each_field_of_a_part_asks_it():
    obeyed = frozenset().union(*map(fields_of, parts.installed_parts()))
    assert ASKS_A_PART.keys() == VALUES.keys()
    assert obeyed <= VALUES.keys() | OF_BODIES.keys()


async def test_rollouts_run_and_fields_of_the_part_are_refused(engine: FakeEngine, left_out: frozenset[str]):
    service = RolloutService(engine, Metrics(CollectorRegistry()))
    rollout = await service.prepare(RolloutRequest.model_validate(BODY))
    async with aclosing(service.events(rollout)) as events:
        assert [event.status async for event in events if event.type == "group"] == ["complete"]
    for field in left_out:
        with pytest.raises(RequestError, match=f"^{field}: this server runs without the part ") as error:
            await service.prepare(RolloutRequest.model_validate({**BODY, field: (VALUES | OF_BODIES)[field]}))
        assert error.value.param == field

"""The port of parts in the engine core, with a made-up part."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_rollout.adapter.faults import Faults
from vllm_rollout.kernel.core.ports import CorePart, CoreParts


class Limiting(CorePart):
    """Sets a limit, and keeps what it hears."""

    def __init__(self, scheduler: Any) -> None:
        self.limit: int | None = scheduler.limit
        self.heard: list[Any] = []

    def most_running(self, first: Any) -> int | None:
        return self.limit

    def stepped(self, step: Any) -> None:
        self.heard.append(step)

    def forget(self, group_id: str) -> None:
        self.heard.append(group_id)


class Failing(CorePart):
    num_begun = 0

    def most_running(self, first: Any) -> int | None:
        raise RuntimeError("planted")

    def stepped(self, step: Any) -> None:
        raise RuntimeError("planted")

    def begin_again(self) -> None:
        self.num_begun += 1


def parts_of(*parts: CorePart) -> CoreParts:
    return CoreParts([(f"part{number}", part) for number, part in enumerate(parts)], Faults())


def limiting(limit: int | None) -> Limiting:
    return Limiting(SimpleNamespace(limit=limit))


def test_a_part_hears_of_steps_and_of_groups_that_are_over():
    parts = parts_of(part := limiting(None))
    parts.call(CorePart.stepped, "a step")
    parts.call(CorePart.interrupted)
    parts.call(CorePart.cache_reset)
    parts.call(CorePart.forget, "g")
    assert part.heard == ["a step", "g"]


@pytest.mark.parametrize(("limits", "most"), [((), None), ((None,), None), ((5, None, 3), 3)])
def test_the_lowest_limit_of_a_part_holds(limits, most):
    assert parts_of(*map(limiting, limits)).most_running("a request") == most


def test_an_exception_stays_with_its_part():
    parts = parts_of(failing := Failing(None), other := limiting(4))
    parts.call(CorePart.stepped, "a step")
    assert (parts.most_running("a request"), other.heard) == (4, ["a step"])
    assert (failing.num_begun, parts._faults.num) == (1, 2)


def test_a_part_is_found_by_its_class():
    parts = parts_of(limiting(None), failing := Failing(None))
    assert parts.part(Failing) is failing
    with pytest.raises(LookupError, match="no part has str"):
        parts.part(str)


def test_making_a_part_is_no_hook():
    assert not any(name.startswith("_") for name in parts_of(limiting(None))._with)

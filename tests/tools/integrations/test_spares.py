"""Calls for single answers that share spare candidates."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from vllm_rollout.integrations.spares import Spares

pytestmark = pytest.mark.anyio


class Engine:
    """Candidates end when the test says how."""

    def __init__(self, group_size: int = 2, redundancy: int = 2) -> None:
        """Each answer begins with its end state."""
        self.spares: Spares[str] = Spares(group_size, redundancy, lambda answer: answer.split()[0])
        self.ends: list[asyncio.Future[str]] = []
        self.extra_args: list[Mapping[str, Any]] = []
        self.numbers: list[int] = []

    def call(self, key: str = "q") -> asyncio.Task[str]:
        async def launch(extra_args: Mapping[str, Any], number: int) -> str:
            self.extra_args.append(extra_args)
            self.numbers.append(number)
            self.ends.append(asyncio.get_running_loop().create_future())
            return await self.ends[-1]

        return asyncio.create_task(self.spares.answer(key, launch))

    async def end(self, index: int, answer: str) -> None:
        self.ends[index].set_result(answer)
        await settle()

    @property
    def running(self) -> list[int]:
        return [index for index, end in enumerate(self.ends) if not end.done()]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calls_get_the_first_that_finish_whoever_started_them() -> None:
    engine = Engine()
    first, second = engine.call(), engine.call()
    await settle()
    assert engine.numbers == [0, 0, 1, 2]
    await engine.end(3, "finished by a spare one")
    assert first.result() == "finished by a spare one"
    assert not second.done()
    await engine.end(1, "finished")
    assert second.result() == "finished"
    assert engine.running == [], "nobody waits for the rest"


async def test_the_group_is_named_to_the_engine() -> None:
    engine = Engine()
    calls = [engine.call() for _ in range(4)]
    await settle()
    assert all(extra["rollout_group_size"] == 2 and extra["rollout_num_candidates"] == 4 for extra in engine.extra_args)
    ids = [extra["rollout_group_id"] for extra in engine.extra_args]
    assert len(set(ids)) == 2
    assert [ids.count(id) for id in set(ids)] == [4, 4]
    for call in calls:
        call.cancel()
    await settle()


async def test_fewer_calls_than_a_group_get_no_spare_candidates() -> None:
    engine = Engine(group_size=4)
    calls = [engine.call() for _ in range(3)]
    await settle()
    assert engine.numbers == [0, 0, 0]
    for index in range(3):
        await engine.end(index, "finished")
    assert [call.result() for call in calls] == ["finished"] * 3
    assert not engine.spares._open


async def test_another_prompt_is_another_group_and_so_is_a_later_call() -> None:
    engine = Engine(group_size=1, redundancy=1)
    one, other, later = engine.call("q"), engine.call("r"), engine.call("q")
    await settle()
    assert len({extra["rollout_group_id"] for extra in engine.extra_args}) == 3
    for index in range(0, 6, 2):
        await engine.end(index, f"finished {index}")
    assert [call.result() for call in (one, other, later)] == ["finished 0", "finished 2", "finished 4"]
    assert engine.running == []


async def test_a_stopped_candidate_is_an_answer_only_when_nothing_else_is_left() -> None:
    engine = Engine()
    first, second = engine.call(), engine.call()
    await settle()
    await engine.end(0, "stopped 0")
    await engine.end(1, "stopped 1")
    assert not first.done()
    await engine.end(2, "finished")
    assert first.result() == "finished"
    await engine.end(3, "stopped 3")
    assert second.result() == "stopped 0"


async def test_a_truncated_candidate_comes_before_every_stopped_one_and_after_what_may_finish() -> None:
    engine = Engine()
    first, second = engine.call(), engine.call()
    await settle()
    await engine.end(0, "stopped 0")
    await engine.end(1, "truncated 1")
    assert not first.done(), "two candidates run for two calls"
    await engine.end(2, "stopped 2")
    assert first.result() == "truncated 1", "one is left for two calls, so the engine counts it"
    await engine.end(3, "truncated 3")
    assert second.result() == "truncated 3"


async def test_a_finished_candidate_goes_before_a_truncated_one_that_came_earlier() -> None:
    engine = Engine(redundancy=1)
    first, second = engine.call(), engine.call()
    await settle()
    await engine.end(0, "truncated")
    await engine.end(1, "finished")
    await engine.end(2, "finished too")
    assert [first.result(), second.result()] == ["finished", "finished too"]


async def test_a_candidate_that_fails_fails_a_call_only_when_nothing_else_is_left() -> None:
    engine = Engine(redundancy=1)
    first, second = engine.call(), engine.call()
    await settle()
    engine.ends[0].set_exception(ValueError("too long"))
    await settle()
    await engine.end(1, "finished")
    await engine.end(2, "stopped")
    assert first.result() == "finished"
    with pytest.raises(ValueError, match="too long"):
        await second


async def test_a_caller_that_goes_away_leaves_its_candidate_to_the_others() -> None:
    engine = Engine(redundancy=0)
    gone, second = engine.call(), engine.call()
    await settle()
    gone.cancel()
    await settle()
    assert engine.running == [0, 1]
    await engine.end(0, "finished")
    assert second.result() == "finished"
    assert engine.running == []


async def test_a_candidate_that_was_cancelled_elsewhere_fails_a_call_when_nothing_else_is_left() -> None:
    engine = Engine(group_size=1, redundancy=1)
    call = engine.call()
    await settle()
    for end in engine.ends:
        end.cancel()
    with pytest.raises(RuntimeError, match="was cancelled by whoever sent it"):
        await asyncio.wait_for(call, 5)


async def test_when_all_callers_go_away_nothing_runs_on() -> None:
    engine = Engine(group_size=3)
    calls = [engine.call(), engine.call()]
    await settle()
    for call in calls:
        call.cancel()
    await settle()
    assert engine.running == []
    assert not engine.spares._open


@pytest.mark.parametrize(("group_size", "redundancy"), [(0, 1), (1, -1)])
def test_sizes_are_checked(group_size: int, redundancy: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        Spares(group_size, redundancy, lambda answer: "finished")

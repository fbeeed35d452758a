"""An engine is rebuilt when nothing runs in it, keeps what was learned, and comes back as it was if need be."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from types import SimpleNamespace

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_rollout.adapter.api.client.door import Door
from vllm_rollout.adapter.api.engine import rebuilding
from vllm_rollout.adapter.api.engine.lost_weights import LostWeights
from vllm_rollout.adapter.api.engine.rebuilding import Resizer
from vllm_rollout.adapter.api.engine.shaping import EngineShaping
from vllm_rollout.server.engine import RequestError
from vllm_rollout.server.runs.parallelism import Resized


class Core:
    """An engine core client: it knows what its engine has learned."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.learned = b""
        self.weight_version = "default"
        self.resources = SimpleNamespace(engine_dead=False)
        self.utility_results: dict[int, object] = {}

    async def get_weight_version_async(self) -> str:
        return self.weight_version

    async def call(self) -> int:
        assert not self.resources.engine_dead
        return self.size

    def shutdown(self) -> None:
        assert not self.utility_results, "somebody waits for an answer"
        self.resources.engine_dead = True


class Calls:
    """Stands for EngineCalls on a part of a client."""

    def __init__(self, part) -> None:
        self.part = part

    async def unless_dead(self, call):
        return await call


class Learning:
    """Stands for EngineLearning."""

    def __init__(self, calls, options) -> None:
        self._part = calls.part

    async def learning_state(self) -> bytes:
        assert not self._part.errored
        return self._part.engine_core.learned

    async def set_learning_state(self, state: bytes) -> None:
        self._part.engine_core.learned = state


class Client:
    """As much of RolloutAsyncLLM as a rebuild needs."""

    log_stats = False

    def __init__(self) -> None:
        self.door = Door()
        self.engine_core = Core(1)
        self.engine_core.learned = b"much"
        self.vllm_config = config_of(None, 1)
        self.output_handler = "reads"
        self.is_asleep = self.pauses = False
        self.num_unfinished = 0

    async def is_paused(self) -> bool:
        return self.pauses

    async def is_sleeping(self) -> bool:
        return self.is_asleep

    def get_num_unfinished_requests(self) -> int:
        return self.num_unfinished

    async def stop_reading(self) -> str:
        handler, self.output_handler = self.output_handler, None
        return handler

    def read_from(self, core: Core, config) -> None:
        self.engine_core, self.vllm_config, self.output_handler = core, config, "reads the new one"

    async def reset_mm_cache(self) -> None:
        pass


def config_of(args, size: int):
    return SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=size), additional_config={})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of engines that were started; those above 2 do not start."""
    sizes: list[int] = []

    def start(config, closed, log_stats) -> Core:
        size = config.parallel_config.tensor_parallel_size
        sizes.append(size)
        if size > 2:
            raise RuntimeError("Engine core initialization failed.")
        return Core(size)

    monkeypatch.setattr(rebuilding, "start_engine", start)
    monkeypatch.setattr(rebuilding, "config_of", config_of)
    monkeypatch.setattr(rebuilding, "EngineCalls", Calls)
    monkeypatch.setattr(rebuilding, "EngineLearning", Learning)
    monkeypatch.setattr(rebuilding, "LOOK_S", 0.0)
    return sizes


def make() -> tuple[Client, SimpleNamespace, Resizer]:
    client = Client()
    shaping = EngineShaping(client, Calls(None))
    engine = SimpleNamespace(is_busy=False, lost_weights=LostWeights(), calls=Calls(None), shaping=shaping)
    return client, engine, Resizer(client, engine, Namespace(rollout_profile=None, emulate=None))


async def turns(num: int = 50) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


def test_what_was_learned_is_in_the_new_engine_and_the_old_one_is_gone(started):
    client, engine, resizer = make()
    before = client.engine_core
    resized = asyncio.run(resizer.resize(2, 0.0))
    assert (resized.outcome, resized.size, resizer.tensor_parallel_size) == ("rebuilt", 2, 2)
    assert resized.seconds > 0
    assert before.resources.engine_dead
    assert (client.engine_core.size, client.engine_core.learned) == (2, b"much")
    assert client.output_handler == "reads the new one"
    assert engine.lost_weights.version is None


def test_weights_that_were_sent_are_missed(started):
    client, engine, resizer = make()
    client.engine_core.weight_version = "step-7"
    asyncio.run(resizer.resize(2, 0.0))
    assert engine.lost_weights.version == "step-7"


@pytest.mark.parametrize("reason", ["pauses", "is_asleep", "num_unfinished", "is_busy", "inside"])
def test_an_engine_with_something_in_it_is_left_alone_and_open(started, reason):
    async def main() -> None:
        client, engine, resizer = make()
        core = client.engine_core
        if reason == "is_busy":
            engine.is_busy = True
        elif reason == "inside":
            client.door.num_inside = 1
        else:
            setattr(client, reason, True)
        assert await resizer.resize(2, 0.01) == Resized("busy", 1, 0.0)
        assert (client.engine_core, started) == (core, [])
        async with client.door.passing():
            pass

    asyncio.run(asyncio.wait_for(main(), 10))


def test_requests_and_calls_on_their_way_are_answered_by_the_old_engine_and_later_ones_by_the_new(started):
    async def main() -> None:
        client, _, resizer = make()
        old, entered = client.engine_core, []

        async def enter() -> None:
            async with client.door.passing():
                entered.append(await client.engine_core.call())

        client.num_unfinished, old.utility_results[0] = 1, "asked"
        resizing = asyncio.create_task(resizer.resize(2, 60.0))
        await turns()
        late = asyncio.create_task(enter())
        await turns()
        assert (started, client.engine_core, entered) == ([], old, [])
        client.num_unfinished = 0
        while client.engine_core is old:  # and then what is asked waits
            await asyncio.sleep(0)
        asked = asyncio.create_task(client.engine_core.call())
        await turns()
        assert (started, asked.done()) == ([], False)
        old.utility_results.clear()
        assert (await resizing).outcome == "rebuilt"
        await late
        assert (entered, await asked) == ([2], 2)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_call_that_is_not_answered_leaves_the_engine_as_it_is(started, monkeypatch):
    monkeypatch.setattr(rebuilding, "CALLS_TIMEOUT_S", 0.0)
    client, _, resizer = make()
    core = client.engine_core
    core.utility_results[0] = "asked"
    assert asyncio.run(resizer.resize(2, 0.0)).outcome == "busy"
    assert (client.engine_core, client.output_handler, started) == (core, "reads", [])


def test_when_the_size_does_not_start_the_engine_that_was_comes_back(started):
    client, _, resizer = make()
    assert asyncio.run(resizer.resize(4, 0.0)).outcome == "failed"
    assert started == [4, 1]
    assert (client.engine_core.size, client.engine_core.learned, client.output_handler) == (
        1, b"much", "reads the new one",
    )  # fmt: skip


def test_when_none_starts_the_engine_is_dead_and_whoever_waits_is_told(started):
    async def main() -> None:
        client, _, resizer = make()
        client.vllm_config = config_of(None, 8)
        with pytest.raises(RequestError, match="the engine has stopped") as error:
            await resizer.resize(4, 0.0)
        assert error.value.status == 503
        assert started == [4, 8]
        assert client.engine_core.resources.engine_dead
        assert client.output_handler == "reads"  # ended: so vLLM's watch sees it
        with pytest.raises(EngineDeadError):
            await client.engine_core.call()
        async with client.door.passing():
            pass

    asyncio.run(asyncio.wait_for(main(), 10))


def test_an_engine_that_dies_before_it_is_stopped_is_a_dead_engine(started):
    async def main() -> None:
        client, _, resizer = make()

        async def dead() -> bool:
            raise EngineDeadError

        client.is_paused = dead
        with pytest.raises(RequestError) as error:
            await resizer.resize(2, 0.0)
        assert error.value.status == 503
        async with client.door.passing():
            pass

    asyncio.run(asyncio.wait_for(main(), 10))

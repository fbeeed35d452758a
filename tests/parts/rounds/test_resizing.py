"""An engine is rebuilt when nothing runs in it, keeps what was learned, and comes back as it was if need be. Whoever
asks meanwhile waits, and no rollout runs on the model's own weights where a trainer's were before."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from types import SimpleNamespace

import pytest
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine.exceptions import EngineDeadError

from tests.support.time_limit import end_within
from tests.support.waiting import eventually
from vllm_rollout.kernel.api.door import Door
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.parts.rounds.with_shaping.api import lost_weights, rebuilding
from vllm_rollout.parts.rounds.with_shaping.api.lost_weights import LostWeights
from vllm_rollout.parts.rounds.with_shaping.api.rebuilding import ClosedEngine, Resizer
from vllm_rollout.parts.rounds.with_shaping.http.parallelism import Resized
from vllm_rollout.parts.shaping.api.lengths import EngineShaping

pytestmark = pytest.mark.anyio


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


class Learning(ApiPart):
    """A part whose data the next engine gets."""

    def __init__(self) -> None: ...

    async def take(self, calls) -> bytes:
        assert not calls.part.errored
        return calls.part.engine_core.learned

    async def put(self, calls, taken: bytes) -> None:
        calls.part.engine_core.learned = taken


class Client:
    """As much of RolloutAsyncLLM as a rebuild needs."""

    log_stats = False

    def __init__(self) -> None:
        self.door = Door()
        self.engine_core = Core(1)
        self.engine_core.learned = b"much"
        self.vllm_config = config_of(None, 1)
        self.output_handler = asyncio.get_running_loop().create_future()
        self.is_asleep = self.pauses = False
        self.num_unfinished = 0

    async def is_paused(self) -> bool:
        return self.pauses

    async def is_sleeping(self) -> bool:
        return self.is_asleep

    def get_num_unfinished_requests(self) -> int:
        return self.num_unfinished

    def _run_output_handler(self) -> None:
        self.output_handler = "reads the new one"

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
    monkeypatch.setattr(rebuilding, "LOOK_S", 0.0)
    return sizes


def make() -> tuple[Client, SimpleNamespace, Resizer]:
    client = Client()
    shaping = EngineShaping(client, Calls(None))
    parts = [shaping, Learning()]
    engine = SimpleNamespace(is_busy=False, calls=Calls(None), parts=parts, part=lambda kind: shaping)
    return client, engine, Resizer(client, engine, Namespace(rollout_profile=None, rollout_emulate=None))


async def turns(num: int = 50) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


async def test_what_was_learned_is_in_the_new_engine_and_the_old_one_is_gone(started):
    client, _, resizer = make()
    before = client.engine_core
    resized = await resizer.resize(2, 0.0)
    assert (resized.outcome, resized.size, resizer.tensor_parallel_size) == ("rebuilt", 2, 2)
    assert resized.seconds > 0
    assert before.resources.engine_dead
    assert (client.engine_core.size, client.engine_core.learned) == (2, b"much")
    assert client.output_handler == "reads the new one"
    assert resizer.lost.version is None


async def test_weights_that_were_sent_are_missed(started):
    client, _, resizer = make()
    client.engine_core.weight_version = "step-7"
    await resizer.resize(2, 0.0)
    assert resizer.lost.version == "step-7"


@pytest.mark.parametrize("reason", ["pauses", "is_asleep", "num_unfinished", "is_busy", "inside"])
async def test_an_engine_with_something_in_it_is_left_alone_and_open(started, reason):
    end_within(10)
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


async def test_requests_and_calls_on_their_way_are_answered_by_the_old_engine_and_later_ones_by_the_new(started):
    end_within(10)
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
    await eventually(lambda: client.engine_core is not old)
    asked = asyncio.create_task(client.engine_core.call())
    await turns()
    assert (started, asked.done()) == ([], False)
    old.utility_results.clear()
    assert (await resizing).outcome == "rebuilt"
    await late
    assert (entered, await asked) == ([2], 2)


async def test_a_call_that_is_not_answered_leaves_the_engine_as_it_is(started, monkeypatch):
    monkeypatch.setattr(rebuilding, "CALLS_TIMEOUT_S", 0.0)
    client, _, resizer = make()
    core, reader = client.engine_core, client.output_handler
    core.utility_results[0] = "asked"
    assert (await resizer.resize(2, 0.0)).outcome == "busy"
    assert (client.engine_core, client.output_handler, started) == (core, reader, [])
    assert not reader.done()


async def test_when_the_size_does_not_start_the_engine_that_was_comes_back(started):
    client, _, resizer = make()
    assert (await resizer.resize(4, 0.0)).outcome == "failed"
    assert started == [4, 1]
    assert (client.engine_core.size, client.engine_core.learned, client.output_handler) == (
        1, b"much", "reads the new one",
    )  # fmt: skip


async def test_when_none_starts_the_engine_is_dead_and_whoever_waits_is_told(started):
    end_within(10)
    client, _, resizer = make()
    client.vllm_config, reader = config_of(None, 8), client.output_handler
    with pytest.raises(RequestError, match="the engine has stopped") as error:
        await resizer.resize(4, 0.0)
    assert error.value.status == 503
    assert started == [4, 8]
    assert client.engine_core.resources.engine_dead
    assert client.output_handler is reader
    assert reader.done()  # so vLLM's watch sees it
    with pytest.raises(EngineDeadError):
        await client.engine_core.call()
    async with client.door.passing():
        pass


async def test_an_engine_that_dies_before_it_is_stopped_is_a_dead_engine(started):
    end_within(10)
    client, _, resizer = make()

    async def dead() -> bool:
        raise EngineDeadError

    client.is_paused = dead
    with pytest.raises(RequestError) as error:
        await resizer.resize(2, 0.0)
    assert error.value.status == 503
    async with client.door.passing():
        pass


# -- whoever asks meanwhile


async def test_what_a_closed_engine_is_asked_the_next_one_answers() -> None:
    closed = ClosedEngine(Core(1))
    asked = [asyncio.create_task(closed.call()) for _ in range(2)]
    await turns()
    assert not any(task.done() for task in asked)
    assert (closed.resources.engine_dead, closed.size) == (False, 1)
    closed.give_way(Core(2))
    assert await asyncio.gather(*asked, closed.call()) == [2, 2, 2]


async def test_who_leaves_while_waiting_takes_nobody_with_him() -> None:
    closed = ClosedEngine(Core(1))
    gone, stays = (asyncio.create_task(closed.call()) for _ in range(2))
    await turns()
    gone.cancel()
    await turns()
    closed.give_way(Core(2))
    assert await stays == 2
    assert gone.cancelled()


async def test_a_server_that_ends_says_so_to_the_engine_that_is_being_built() -> None:
    closed = ClosedEngine(Core(1))
    assert not closed.is_stopping
    closed.shutdown(timeout=1.0)
    assert closed.is_stopping


async def test_a_shut_door_lets_nobody_in_and_all_of_them_when_it_opens() -> None:
    door, inside = Door(), []

    async def enter(name: str) -> None:
        async with door.passing():
            inside.append((name, door.num_inside))
            await asyncio.sleep(0)

    await enter("first")
    door.shut()
    waiting = [asyncio.create_task(enter(name)) for name in "ab"]
    await turns()
    assert (inside, door.num_inside) == ([("first", 1)], 0)
    door.open()
    await asyncio.gather(*waiting)
    assert inside == [("first", 1), ("a", 1), ("b", 2)]
    assert door.num_inside == 0


async def test_who_fails_or_leaves_inside_the_door_is_not_counted_any_more() -> None:
    door = Door()
    with pytest.raises(ValueError, match="bad prompt"):
        async with door.passing():
            raise ValueError("bad prompt")
    door.shut()

    async def enter() -> None:
        async with door.passing():
            pass

    gone = asyncio.create_task(enter())
    await turns()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert door.num_inside == 0


# -- weights that a trainer had sent


def versions(*said: str):
    """Answers these, one after the other; the last one for ever."""
    left = list(said)

    async def current_version() -> str:
        return left.pop(0) if len(left) > 1 else left[0]

    return current_version


def lost_by(get_weight_version) -> LostWeights:
    return LostWeights(SimpleNamespace(get_weight_version=get_weight_version))


async def test_where_none_were_lost_nothing_is_asked():
    async def ask() -> str:
        raise AssertionError("asked")

    await lost_by(ask).found()


async def test_a_rollout_waits_for_weights_and_the_next_one_does_not(monkeypatch):
    monkeypatch.setattr(lost_weights, "LOOK_S", 0.0)
    lost = lost_by(versions("default", "default", "step-8"))
    lost.version = "step-7"
    await lost.found()
    assert lost.version is None


async def test_without_them_it_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(lost_weights, "PATIENCE_S", 0.0)
    lost = lost_by(versions("default"))
    lost.version = "step-7"
    with pytest.raises(GracefulHTTPError, match="in place of version 'step-7'") as error:
        await lost.found()
    assert error.value.http_status == 409
    assert lost.version == "step-7"

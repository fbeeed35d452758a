"""KV blocks by CUDA IPC, over a runtime of host memory: what arrives, and that no failure leaves anything behind."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from tests.kernel.core.scheduler_runs import add_group
from tests.parts.moving.fake_cuda import FUNCTIONS, Runtime, cudaError_t, new_processes
from tests.parts.moving.moving_runs import Ranks, assert_each_once, ids_and_lengths
from vllm_rollout.parts.moving.core.moving import GroupMoves
from vllm_rollout.parts.moving.options import MovingOptions
from vllm_rollout.parts.moving.wire import KVSegment, Parcel
from vllm_rollout.parts.moving.worker import device_kv, kv_calls
from vllm_rollout.parts.moving.worker.device_kv import GRANULE_BYTES, LENT_S, SPARE_BYTES, DeviceKV, DeviceMemory
from vllm_rollout.parts.moving.worker.kv_layers import KV_FAILURES, KVLayers, TransferError
from vllm_rollout.parts.moving.worker.shared_kv import SharedKV

NUM_BLOCKS = 8
INVALID = cudaError_t.cudaErrorInvalidValue
UNDOING = ("cudaFree", "cudaSetDevice")
"""Functions whose failure cannot be mended: memory is lost, or a handle stays open."""
NO_ROOM = cudaError_t.cudaErrorMemoryAllocation


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Process:
    """A worker with a KV cache of two layers, whose rows are of different length. In one the axes are not in the order
    of its memory, as heads and tokens are not on CUDA."""

    def __init__(self, runtime: Runtime, seed: int, clock: Clock | None = None) -> None:
        torch.manual_seed(seed)
        self.runtime = runtime
        self.layers = [torch.rand(NUM_BLOCKS, 3, 2, 1).bfloat16().transpose(1, 2), torch.rand(NUM_BLOCKS, 1, 4)]
        self.kv = DeviceKV(KVLayers(self.layers), 0, DeviceMemory(torch.device("cpu"), runtime), clock or Clock())

    def assert_holds_only_a_spare(self) -> None:
        assert self.kv._lent == {}
        assert set(self.runtime.allocated) == {buffer.pointer for buffer in (self.kv._spare,) if buffer}
        assert self.runtime.opened.total() == 0


@pytest.fixture
def pair() -> list[Process]:
    return [Process(runtime, seed) for seed, runtime in enumerate(new_processes())]


def test_blocks_arrive_whole_and_nothing_else_changes(pair):
    source, target = pair
    before = [layer.clone() for layer in target.layers]
    segment = source.kv.share([5, 0, 3])
    assert segment.way == "cuda_ipc"
    target.kv.fetch(segment, [0, 2], [1, 6])
    for layer, there, expected in zip(target.layers, source.layers, before, strict=True):
        expected[[1, 6]] = there[[5, 3]]
        assert torch.equal(layer, expected)
    source.kv.drop(segment.name)
    for each in pair:
        each.assert_holds_only_a_spare()


def test_a_buffer_serves_the_next_segment_too(pair):
    source, target = pair
    for block in (1, 2, 3):
        segment = source.kv.share([block])
        target.kv.fetch(segment, [0], [0])
        assert torch.equal(target.layers[1][0], source.layers[1][block])
        source.kv.drop(segment.name)
    assert source.runtime.calls["cudaMalloc"] == 1
    assert source.runtime.calls["cudaFree"] == 0


def test_a_larger_segment_gets_a_larger_buffer(pair, monkeypatch):
    monkeypatch.setattr(device_kv, "GRANULE_BYTES", 64)
    source, target = pair
    source.kv.drop(source.kv.share([1]).name)
    segment = source.kv.share([7, 6, 5, 4])
    (buffer,) = source.runtime.allocated.values()
    assert len(buffer) == 128  # a stamp of 16 and 4 * (12 + 16), in whole granules
    target.kv.fetch(segment, [0, 1, 2, 3], [0, 1, 2, 3])
    assert torch.equal(target.layers[0][:4], source.layers[0][[7, 6, 5, 4]])
    source.kv.drop(segment.name)
    source.assert_holds_only_a_spare()


def test_a_large_buffer_is_not_kept(monkeypatch, pair):
    monkeypatch.setattr(device_kv, "SPARE_BYTES", GRANULE_BYTES - 1)
    source, _ = pair
    source.kv.drop(source.kv.share([1]).name)
    assert source.kv._spare is None
    assert source.runtime.allocated == {}


def test_who_comes_too_late_finds_another_segment(pair):
    source, target = pair
    late = source.kv.share([1])
    source.kv.drop(late.name)
    target.kv.fetch(late, [0], [0])  # its bytes are still there
    other = source.kv.share([2])
    with pytest.raises(ValueError, match="is another segment now"):
        target.kv.fetch(late, [0], [0])
    source.kv.drop(other.name)
    source.kv._free(source.kv._spare)
    source.kv._spare = None
    with pytest.raises(TransferError, match="cudaErrorMapBufferObjectFailed"):
        target.kv.fetch(late, [0], [0])
    assert target.runtime.opened.total() == 0


def test_a_segment_that_nobody_drops_is_dropped_in_time():
    clock = Clock()
    source = Process(new_processes()[0], 0, clock)
    first = source.kv.share([1])
    clock.now = LENT_S - 1
    second = source.kv.share([1])
    assert list(source.kv._lent) == [first.name, second.name]
    clock.now = LENT_S
    third = source.kv.share([1])
    assert list(source.kv._lent) == [second.name, third.name]
    assert source.runtime.calls["cudaMalloc"] == 2


def test_no_more_than_a_share_of_the_free_memory_is_taken():
    source = Process(new_processes(num_bytes=2 * GRANULE_BYTES)[0], 0)
    first = source.kv.share([1])
    with pytest.raises(MemoryError, match="2 MiB of KV blocks are more than 1 MiB"):
        source.kv.share([2])
    source.kv.drop(first.name)
    source.kv.drop(source.kv.share([2]).name)
    source.assert_holds_only_a_spare()


def test_what_cannot_come_is_refused(pair, monkeypatch):
    source, target = pair
    segment = source.kv.share([1])
    other = DeviceKV(KVLayers(target.layers[:1]), 0, DeviceMemory(torch.device("cpu"), target.runtime))
    with pytest.raises(ValueError, match="do not fit"):
        other.fetch(segment, [0], [0])
    with pytest.raises(TransferError, match="cudaIpcOpenMemHandle"):
        source.kv.fetch(segment, [0], [0])  # CUDA opens no handle of one's own
    short = KVSegment(0, segment.name, "cuda_ipc", segment.host, b"short", segment.layout, 1)
    with pytest.raises(ValueError, match="of 5 bytes is none"):
        target.kv.fetch(short, [0], [0])
    elsewhere = KVSegment(0, segment.name, "cuda_ipc", "another", segment.address, segment.layout, 1)
    with pytest.raises(ValueError, match="memory of another host"):
        target.kv.fetch(elsewhere, [0], [0])
    assert target.runtime.opened.total() == 0


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("error", [INVALID, NO_ROOM], ids=lambda error: error.name)
@pytest.mark.parametrize("end", [0, 1], ids=["source", "target"])
def test_whatever_fails_nothing_is_left_behind(pair, end, error, function, nth):
    source, target = pair
    pair[end].runtime.fails = {function: (nth, error)}
    segment = None
    try:
        segment = source.kv.share([1, 2])
        target.kv.fetch(segment, [1], [0])
        has_failed = False
        source.kv.drop(segment.name)
    except KV_FAILURES:
        has_failed = True
        assert set(source.kv._lent) == ({segment.name} if segment else set())
        for name in list(source.kv._lent):
            source.kv.drop(name)
    asked = pair[end].runtime.calls[function]
    assert has_failed == (asked >= nth and function != "cudaFree")
    if function not in UNDOING:
        source.assert_holds_only_a_spare()
        assert target.runtime.opened.total() == 0
    pair[end].runtime.fails = {}
    segment = source.kv.share([3])
    target.kv.fetch(segment, [0], [4])
    assert torch.equal(target.layers[1][4], source.layers[1][3])


@settings(max_examples=150, stateful_step_count=25, database=None)
class AnyOrder(RuleBasedStateMachine):
    """Two processes, each source and target. Any order of share, fetch, drop, failures and time."""

    segments = Bundle("segments")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        runtimes = new_processes(num_bytes=12 * GRANULE_BYTES)
        self.processes = [Process(runtime, seed, self.clock) for seed, runtime in enumerate(runtimes)]
        self.content: dict[str, tuple[int, torch.Tensor]] = {}

    @rule(target=segments, source=st.integers(0, 1), blocks=st.lists(st.integers(0, 7), min_size=1, max_size=5))
    def share(self, source, blocks):
        process = self.processes[source]
        content = process.layers[1][blocks].clone()
        try:
            segment = process.kv.share(blocks)
        except KV_FAILURES:
            return multiple()
        self.content[segment.name] = source, content
        return segment

    @rule(segment=segments)
    def fetch(self, segment):
        source, content = self.content[segment.name]
        process = self.processes[1 - source]
        slots = list(range(segment.num_blocks))
        try:
            process.kv.fetch(segment, slots, slots)
        except (TransferError, MemoryError):
            return
        except ValueError:
            assert segment.name not in self.processes[source].kv._lent
            return
        assert torch.equal(process.layers[1][slots], content)

    @rule(segment=segments)
    def drop(self, segment):
        source, _ = self.content[segment.name]
        self.processes[source].kv.drop(segment.name)

    @rule(
        process=st.integers(0, 1),
        function=st.sampled_from([name for name in FUNCTIONS if name not in UNDOING]),
        after=st.integers(1, 3),
        error=st.sampled_from([INVALID, NO_ROOM]),
    )
    def break_something(self, process, function, after, error):
        runtime = self.processes[process].runtime
        runtime.fails = {function: (runtime.calls[function] + after, error)}

    @rule(process=st.integers(0, 1))
    def repair(self, process):
        self.processes[process].runtime.fails = {}

    @rule(seconds=st.sampled_from([1.0, LENT_S]))
    def wait(self, seconds):
        self.clock.now += seconds

    @invariant()
    def every_buffer_is_lent_or_spare_and_no_handle_is_open(self):
        for process in self.processes:
            lent = [buffer.pointer for buffer, _ in process.kv._lent.values()]
            spare = [process.kv._spare.pointer] if process.kv._spare else []
            assert sorted(lent + spare) == sorted(process.runtime.allocated)
            assert process.runtime.opened.total() == 0
            assert not spare or process.kv._spare.num_bytes <= SPARE_BYTES


test_any_order_leaks_nothing = pytest.mark.thorough(AnyOrder.TestCase)


# -- in engine cores


PROMPT = [5] * 100
NUM_TOKENS = 60


def ranks_with_devices(new_ranks, num_bytes: int = 1 << 30) -> tuple[Ranks, list[Runtime]]:
    ranks = new_ranks()
    runtimes = new_processes(num_bytes=num_bytes)
    for core, runtime in zip(ranks.cores, runtimes, strict=True):
        layers = KVLayers(list(core.kv.kv_blocks))
        device = DeviceKV(layers, 0, DeviceMemory(torch.device("cpu"), runtime))
        core.kv.kv_transfers = {"cuda_ipc": device, "host_memory": SharedKV(layers, 0)}
    return ranks, runtimes


def test_a_group_takes_its_blocks_along_by_cuda_ipc(new_ranks):
    ranks, runtimes = ranks_with_devices(new_ranks)
    ids = add_group(ranks.runs[0], "g", [100, 100], group_size=2, prompt_token_ids=PROMPT)
    for id in ids:
        ranks.until(id, NUM_TOKENS)
    released = ranks.release("g", 0)
    (segment,) = Parcel.decode(released.parcel).kv.segments
    assert segment.way == "cuda_ipc"
    ranks.cores[1].adopt("g", released.parcel)
    ranks.cores[0].confirm("g")
    ranks.run()
    moves = [run.scheduler.part(GroupMoves).kv for run in ranks.runs]
    assert moves[1].num_blocks_in == segment.num_blocks
    assert [each.num_fallbacks for each in moves] == [0, 0]
    assert [runtime.opened.total() for runtime in runtimes] == [0, 0]
    assert_each_once(ranks, ids_and_lengths(ids, [100, 100]))


@pytest.mark.parametrize("function", ["cudaIpcOpenMemHandle", "cudaMemcpyAsync", "cudaIpcCloseMemHandle"])
def test_a_transfer_that_fails_is_computed_again(new_ranks, function):
    ranks, runtimes = ranks_with_devices(new_ranks)
    runtimes[1].fails = {function: (1, INVALID)}
    ids = add_group(ranks.runs[0], "g", [100], group_size=1, prompt_token_ids=PROMPT)
    ranks.until(ids[0], NUM_TOKENS)
    assert ranks.move("g") == "released"
    ranks.run()
    assert ranks.runs[1].scheduler.part(GroupMoves).kv.num_blocks_in == 0
    assert ranks.runs[1].scheduler.part(GroupMoves).kv.num_fallbacks == 1
    assert ranks.cores[1].kv.num_computed >= len(PROMPT) + NUM_TOKENS
    assert_each_once(ranks, ids_and_lengths(ids, [100]))


def test_what_has_no_room_on_the_device_goes_over_the_host(new_ranks):
    ranks, _ = ranks_with_devices(new_ranks, num_bytes=GRANULE_BYTES)
    ids = add_group(ranks.runs[0], "g", [100], group_size=1, prompt_token_ids=PROMPT)
    ranks.until(ids[0], NUM_TOKENS)
    released = ranks.release("g", 0)
    (segment,) = Parcel.decode(released.parcel).kv.segments
    assert segment.way == "host_memory"
    ranks.cores[1].adopt("g", released.parcel)
    ranks.cores[0].confirm("g")
    ranks.run()
    assert ranks.runs[1].scheduler.part(GroupMoves).kv.num_blocks_in == segment.num_blocks
    assert_each_once(ranks, ids_and_lengths(ids, [100]))


# -- which way is taken


def config(**options: bool) -> SimpleNamespace:
    return SimpleNamespace(additional_config=MovingOptions(**options).into({}))


def layers_on(device: str) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device(device), layout=[])


def test_the_way_follows_the_platform(monkeypatch):
    assert list(kv_calls.kv_transfers(config(), layers_on("cpu"), 0)) == ["host_memory"]
    assert list(kv_calls.kv_transfers(config(), layers_on("cuda"), 0)) == ["cuda_ipc", "host_memory"]
    monkeypatch.setattr(kv_calls, "cuda_runtime", lambda: None)
    assert list(kv_calls.kv_transfers(config(), layers_on("cuda"), 0)) == ["host_memory"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without one")
def test_the_real_runtime_understands_every_call_and_says_that_there_is_no_driver():
    """Its arguments are converted before the driver is looked for."""
    device = DeviceMemory(torch.device("cpu"), kv_calls.cuda_runtime())
    device._runtime = SimpleNamespace(**vars(device._runtime))
    device._runtime.cudaSetDevice = lambda index: (device._runtime.cudaError_t.cudaSuccess,)
    for call in (
        device.num_free_bytes,
        lambda: device.allocate(GRANULE_BYTES),
        lambda: device.free(GRANULE_BYTES),
        lambda: device.export(GRANULE_BYTES),
        lambda: device.open(bytes(range(64))),
        lambda: device.close(GRANULE_BYTES),
        lambda: device.copy(GRANULE_BYTES, 2 * GRANULE_BYTES, 16),
    ):
        with pytest.raises(TransferError, match=r"cudaErrorInsufficientDriver|cudaErrorNoDevice"):
            call()

"""Groups that move between the schedulers of two dry runs, with workers that know what is in their KV caches."""

from typing import Any

from vllm.v1.request import Request

from tests.kernel.core.scheduler_runs import TracedRun, assert_nothing_left
from tests.parts.moving.kv_worker import KVWorker
from vllm_rollout.parts.moving.calls import ADOPT_GROUP, RELEASE_GROUP, GroupToAdopt, GroupToRelease, Released
from vllm_rollout.parts.moving.core.moving import GroupMoves
from vllm_rollout.parts.moving.wire import WorkerState
from vllm_rollout.parts.moving.worker.shared_kv import SharedKV


class Core:
    """An engine core around a dry run, as far as moves need one."""

    def __init__(self, run: TracedRun) -> None:
        self.run = run
        self.scheduler = run.scheduler
        self.known: dict[str, WorkerState] = {}
        """States that the worker was sent, by request."""
        self.kv = KVWorker(run)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method.endswith("_kv"):
            return [self.kv.call(method, args)]
        if method == "rollout_detach":
            return [None, {id: WorkerState(generator=id.encode()) for id in args[0]}]
        assert method == "rollout_attach"
        self.kv.catch_up()
        for moved in args[0]:
            assert moved.output_token_ids
            self.kv.known.add(moved.request.request_id)
            self.known[moved.request.request_id] = moved.state
        return [None, None]

    def preprocess_add_request(self, request: Any) -> tuple[Request, int]:
        made = Request.from_engine_core_request(request, self.run._hasher)
        self.run.requests[made.request_id] = made
        return made, 0

    def add_request(self, request: Request, request_wave: int) -> None:
        self.scheduler.add_request(request)

    def release(self, group_id: str, epoch: int = 1) -> Released:
        wanted = RELEASE_GROUP.decode_argument(RELEASE_GROUP.encode_argument(GroupToRelease(group_id, epoch)))
        answer = self.scheduler.part(GroupMoves).release(self, wanted)
        return RELEASE_GROUP.decode_result(RELEASE_GROUP.encode_result(answer))

    def adopt(self, group_id: str, parcel: bytes, epoch: int = 1) -> None:
        wanted = GroupToAdopt(group_id, epoch, parcel)
        self.scheduler.part(GroupMoves).adopt(self, ADOPT_GROUP.decode_argument(ADOPT_GROUP.encode_argument(wanted)))

    def keep(self, group_id: str, epoch: int = 1) -> None:
        self.scheduler.part(GroupMoves).keep(self, GroupToRelease(group_id, epoch))

    def confirm(self, group_id: str, epoch: int = 1) -> None:
        self.scheduler.part(GroupMoves).confirm(self, GroupToRelease(group_id, epoch))


class Ranks:
    """Engine cores whose models say the same of the same request."""

    def __init__(self, new_run: Any, core_cls: type[Core] = Core, num_ranks: int = 2, **kwargs: Any) -> None:
        self.runs = [new_run(**kwargs) for _ in range(num_ranks)]
        first, *others = self.runs
        for other in others:
            for name in ("requests", "scripts", "_lengths", "_scored_lengths", "logits", "num_sampled", "outputs"):
                setattr(other, name, getattr(first, name))
        self.cores = [core_cls(run) for run in self.runs]

    def step(self) -> bool:
        return sum(run.step() for run in self.runs) > 0

    def run(self) -> None:
        for _ in range(5000):
            if not self.step():
                return
        raise AssertionError("requests are left")

    def until(self, request_id: str, num_tokens: int) -> None:
        while self.runs[0].requests[request_id].num_output_tokens < num_tokens:
            assert self.step()

    def release(self, group_id: str, source: int, epoch: int = 1) -> Released:
        """Release a group, and repeat until none of its tokens are in flight."""
        while (released := self.cores[source].release(group_id, epoch)).outcome in ("in_flight", "busy"):
            self.runs[source].step()
        return released

    def move(self, group_id: str, source: int = 0, epoch: int = 1) -> str:
        released = self.release(group_id, source, epoch)
        if released.outcome == "released":
            self.cores[1 - source].adopt(group_id, released.parcel, epoch)
            self.cores[source].confirm(group_id, epoch)
        return released.outcome


def assert_each_once(ranks: Ranks, lengths: dict[str, int]) -> None:
    """Every candidate has one last output, and its tokens are the first that it says, in order."""
    run = ranks.runs[0]
    for request_id, length in lengths.items():
        run.last(request_id)
        tokens = run.tokens(request_id)
        assert list(run.requests[request_id].output_token_ids) == tokens
        assert len(tokens) <= length
        said = run.own_tokens(request_id, len(tokens))
        assert tokens[: length - 1] == said[: length - 1]
    for each in ranks.runs:
        assert_nothing_left(each)
        moves = each.scheduler.part(GroupMoves)
        assert moves._released == moves._adopted == moves._stopped == moves.kv._shared == {}
    for core in ranks.cores:
        for transfer in core.kv.kv_transfers.values():
            assert_nothing_shared(transfer)


def assert_both_end(two: Ranks) -> None:
    """The group of the fixture `two` has said all of it, once."""
    two.run()
    assert_each_once(two, {"g-0": 50, "g-1": 70})
    assert [two.runs[0].num_tokens(id) for id in ("g-0", "g-1")] == [50, 70]


def assert_nothing_shared(transfer: Any) -> None:
    assert (transfer._files if isinstance(transfer, SharedKV) else transfer._lent) == {}


def ids_and_lengths(ids: list[str], lengths: list[int]) -> dict[str, int]:
    return dict(zip(ids, lengths, strict=True))

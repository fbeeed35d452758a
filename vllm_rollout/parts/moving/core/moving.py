"""Groups that leave this engine core, and groups that come.

A group leaves in two calls. The first call stops it as vLLM preempts: its blocks are free, and a step in flight still
delivers its tokens. Once no token is in flight, the second call packs the group. A group that comes looks like a
preempted one to the scheduler. Its prompt and its output are computed again, except for blocks in the prefix cache. It
may bring blocks along (`kv_moving.py`).

Invariant: a candidate is in one scheduler, packed, or over. Every token of it is sent once. A call that is repeated
with the same epoch changes nothing and gets the same answer. A call that fails leaves the group where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from vllm_rollout.kernel.core.calls import call_worker
from vllm_rollout.kernel.core.candidate import EngineCandidate
from vllm_rollout.kernel.core.ports import Answers, CorePart
from vllm_rollout.kernel.core.weights import OWN_SALT, Weights, has_own_hashes
from vllm_rollout.kernel.rules.detached import DetachedGroup, StayReason
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.step import GroupSteps
from vllm_rollout.kernel.rules.types import CandidateId
from vllm_rollout.parts.moving.calls import (
    ADOPT_GROUP,
    CONFIRM_MOVE,
    HOLD,
    KEEP_GROUP,
    RANK_STATE,
    RELEASE_GROUP,
    GroupToAdopt,
    GroupToRelease,
    Hold,
    Released,
)
from vllm_rollout.parts.moving.core.kv_moving import KVMoves
from vllm_rollout.parts.moving.core.versions import leave_deferred
from vllm_rollout.parts.moving.rules.load import EngineLoad, RankState, RunningGroup
from vllm_rollout.parts.moving.rules.placement import Holders
from vllm_rollout.parts.moving.wire import KVBlocks, MovedCandidate, Parcel, request_to_move

MOVABLE_STATUSES = (RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.PREEMPTED)
ANY_WAVE = -1
"""Wave of an added request. If ranks step together, it wakes an idle rank."""


P = ParamSpec("P")
T = TypeVar("T")


def _timed(method: Callable[Concatenate[GroupMoves, P], T]) -> Callable[Concatenate[GroupMoves, P], T]:
    """Add the method's time to `seconds`: no candidate of this engine core continues meanwhile."""

    @wraps(method)
    def timed(self: GroupMoves, *args: P.args, **kwargs: P.kwargs) -> T:
        started = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - started

    return timed  # type: ignore[return-value]


class MovableGroups(Protocol):
    """The part of our schedulers that moves need beside vLLM's scheduler."""

    group_steps: GroupSteps
    launched: Mapping[CandidateId, EngineCandidate]
    num_internal_errors: int
    num_preemptions: int
    clock: Callable[[], float]
    weights: Weights

    def preempt(self, request: Request) -> None: ...

    def stays_because(self, group_id: str) -> StayReason | None: ...

    def candidates_of(self, group_id: str) -> list[EngineCandidate]: ...

    def detach(self, group_id: str, candidates: Sequence[EngineCandidate]) -> DetachedGroup: ...

    def attach(self, candidate: EngineCandidate, id: CandidateId, group: Group) -> None: ...


class GroupMoves(CorePart):
    """The moves of one engine core. Overrides: answers, cache_reset, forget."""

    answers: ClassVar[Answers] = {
        RANK_STATE: lambda core, _: core.scheduler.part(GroupMoves).state(),
        HOLD: lambda core, wanted: core.scheduler.part(GroupMoves).hold(wanted),
        RELEASE_GROUP: lambda core, wanted: core.scheduler.part(GroupMoves).release(core, wanted),
        KEEP_GROUP: lambda core, wanted: core.scheduler.part(GroupMoves).keep(core, wanted),
        ADOPT_GROUP: lambda core, wanted: core.scheduler.part(GroupMoves).adopt(core, wanted),
        CONFIRM_MOVE: lambda core, wanted: core.scheduler.part(GroupMoves).confirm(core, wanted),
    }

    def __init__(self, scheduler: Any) -> None:
        self._groups: MovableGroups = scheduler
        self._scheduler: Scheduler = scheduler  # the same object, as vLLM's class
        self._stopped: dict[str, list[EngineCandidate]] = {}
        """Candidates in no queue, by group. They leave once no token of them is in flight."""
        self._released: dict[str, tuple[int, Parcel]] = {}
        """Epoch and packed group of groups that left and have not arrived."""
        self._adopted: dict[str, int] = {}
        """Epochs of groups that came and run here."""
        self.kv = KVMoves(scheduler)
        self._holders = Holders()
        self.num_in = 0
        self.num_out = 0
        self.seconds = 0.0
        """Seconds spent on moves."""

    @property
    def is_held(self) -> bool:
        """True if this engine core is kept empty."""
        return bool(self._holders)

    def state(self) -> RankState:
        return RankState(self._load(), self.is_held, self.num_in, self.num_out, self.seconds, self.kv.arrived)

    def _load(self) -> EngineLoad:
        num_running, num_waiting = self._scheduler.get_request_counts()
        by_group: dict[str, list[Request]] = {}
        for id, candidate in self._groups.launched.items():
            by_group.setdefault(id.group_id, []).append(candidate.request)
        groups = [
            RunningGroup(
                group_id,
                requests[0].num_prompt_tokens,
                [request.num_output_tokens for request in requests],
                requests[0].sampling_params.max_tokens,
            )
            for group_id, requests in by_group.items()
        ]
        return EngineLoad(
            num_running,
            num_waiting,
            self._scheduler.get_kv_cache_usage(),
            self._groups.num_preemptions,
            groups,
            num_internal_errors=self._groups.num_internal_errors,
            num_weight_changes=self._groups.weights.num_changes,
            weight_version=self._groups.weights.newest,
        )

    def hold(self, wanted: Hold) -> None:
        self._holders.change(wanted.owner, held=wanted.held)

    @_timed
    def release(self, core: EngineCore, wanted: GroupToRelease) -> Released:
        try:
            return self._release(core, wanted)
        except Exception:
            self._go_on(core, wanted)
            raise

    @_timed
    def keep(self, core: EngineCore, wanted: GroupToRelease) -> None:
        try:
            self._go_on(core, wanted)
        except Exception:  # its client ends the group, and nobody asks for it again
            if self._released.get(wanted.group_id, (None, None))[0] == wanted.epoch:
                del self._released[wanted.group_id]
            if wanted.group_id not in self._released:
                self.kv.drop(core, wanted.group_id)
            raise

    def _go_on(self, core: EngineCore, wanted: GroupToRelease) -> None:
        """Let a group that has stopped or left continue here."""
        group_id = wanted.group_id
        epoch, parcel = self._released.get(group_id, (None, None))
        if parcel is not None and epoch == wanted.epoch:
            self._unpack(core, parcel, None)
            del self._released[group_id]
        elif (candidates := self._stopped.get(group_id)) is not None:
            requests = [candidate.request for candidate in candidates]
            for request in requests:
                self._groups.weights.preempted(request)
            queue_again(self._scheduler, requests)
            del self._stopped[group_id]
        else:
            return
        self.kv.drop(core, group_id)

    @_timed
    def adopt(self, core: EngineCore, wanted: GroupToAdopt) -> None:
        if self._adopted.get(wanted.group_id) == wanted.epoch:
            return
        if self._groups.stays_because(wanted.group_id) != "over":
            raise ValueError(f"group {wanted.group_id} runs here already")
        parcel = Parcel.decode(wanted.parcel)
        self._unpack(core, parcel, parcel.kv)
        self._adopted[wanted.group_id] = wanted.epoch
        self.num_in += 1

    @_timed
    def confirm(self, core: EngineCore, wanted: GroupToRelease) -> None:
        if self._released.get(wanted.group_id, (None, None))[0] == wanted.epoch:
            del self._released[wanted.group_id]
            self.num_out += 1
            self.kv.drop(core, wanted.group_id)

    def cache_reset(self) -> None:
        self.kv.num_resets += 1

    def forget(self, group_id: str) -> None:
        self._adopted.pop(group_id, None)
        self._stopped.pop(group_id, None)

    def _release(self, core: EngineCore, wanted: GroupToRelease) -> Released:
        group_id = wanted.group_id
        self._groups.weights.look()  # while the group runs, so that it leaves with the KV that it has
        if group_id not in self._released:
            stays = self._groups.stays_because(group_id)
            if stays is not None:
                if stays == "over":
                    self._stopped.pop(group_id, None)
                return Released(stays)
            candidates = self._groups.candidates_of(group_id)
            if group_id not in self._stopped:
                refusal = next(filter(None, (move_refusal(candidate.request) for candidate in candidates)), None)
                if refusal is not None:
                    return Released("refused", reason=refusal)
                self._stopped[group_id] = candidates
                stop(self._groups, self._scheduler, [candidate.request for candidate in candidates])
            if any(candidate.request.num_in_flight_tokens for candidate in candidates):
                return Released("in_flight")
            self._released[group_id] = wanted.epoch, self._pack(core, group_id, candidates)
            del self._stopped[group_id]
        epoch, parcel = self._released[group_id]
        if epoch != wanted.epoch:
            return Released("busy")
        return Released("released", parcel.encode(), [moved.request.request_id for moved in parcel.candidates])

    def _pack(self, core: EngineCore, group_id: str, candidates: Sequence[EngineCandidate]) -> Parcel:
        """Pack a group. Steps that may fail come before the scheduler gives up the group."""
        self._groups.weights.look()  # so that the salt is not older than the last change
        kv = self.kv.share(core, group_id, [candidate.request for candidate in candidates])
        moved = [
            MovedCandidate(
                index=candidate.id.index,
                request=request_to_move(candidate.request, salt_to_move(candidate.request)),
                output_token_ids=list(candidate.request.output_token_ids),
                output_interval=candidate.held.interval,
                passes_next=candidate.held.passes_next,
                held=candidate.held.copy(candidate.request.request_id),
                weights=candidate.weights,
                num_preemptions=candidate.num_preemptions,
                state=None,
            )
            for candidate in candidates
        ]
        ids = [each.request.request_id for each in moved if each.output_token_ids]
        states = (ids and call_worker(core, "rollout_detach", ids)) or {}
        moved = [replace(each, state=states.get(each.request.request_id)) for each in moved]
        self._adopted.pop(group_id, None)
        return Parcel(self._groups.detach(group_id, candidates), moved, kv)

    def _unpack(self, core: EngineCore, parcel: Parcel, kv: KVBlocks | None) -> None:
        """Unpack a group and continue it. Raises: errors of a worker or of vLLM. Then nothing of the group is here."""
        groups, group_id = self._groups, parcel.detached.group_id
        begun = [moved for moved in parcel.candidates if moved.output_token_ids]
        ids = {moved.request.request_id for moved in begun}
        group: Group | None = None
        taken: list[EngineCandidate] = []
        try:
            if begun:
                core.collective_rpc("rollout_attach", args=(begun,))
            requests = [self._request(core, moved) for moved in parcel.candidates]
            is_void = [groups.weights.arrives(request) for request in requests]
            if kv is not None and not any(is_void):
                self.kv.fetch(core, group_id, kv, requests)
            group = groups.group_steps.attach(parcel.detached, groups.clock())
            for request, moved in zip(requests, parcel.candidates, strict=True):
                candidate = EngineCandidate(request, moved.output_interval)
                candidate.held.attach(moved.held, passes_next=moved.passes_next)
                candidate.weights, candidate.num_preemptions = [*moved.weights], moved.num_preemptions
                taken.append(candidate)
                groups.attach(candidate, CandidateId(group_id, moved.index), group)
                core.add_request(request, ANY_WAVE)
        except Exception:
            if group is not None:
                groups.detach(group_id, taken)
            self._scheduler.finished_req_ids |= ids  # so that the workers forget them
            raise
        self._scheduler.finished_req_ids -= ids  # set when they left, if that step has not come

    @staticmethod
    def _request(core: EngineCore, moved: MovedCandidate) -> Request:
        request, _ = core.preprocess_add_request(moved.request)
        if moved.output_token_ids:
            request.append_output_token_ids(moved.output_token_ids)
            request.status = RequestStatus.PREEMPTED
            request.num_preemptions = 1  # for vLLM it means that this is no first prefill
            request.prefill_stats = None  # they were sent with its first token
        return request


def move_refusal(request: Request) -> str | None:
    """Reason why a request cannot leave its engine, or None."""
    if request.status not in MOVABLE_STATUSES:
        return f"a candidate is {request.status!s}"
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.mm_features:
        return "its prompt is more than tokens"
    if request.use_structured_output:
        return "its grammar has a state of its own"
    if request.resumable:
        return "its prompt is not over"
    if request.kv_transfer_params is not None or (
        request.status == RequestStatus.WAITING and request.num_computed_tokens
    ):
        return "its KV cache comes from elsewhere"
    return None


def salt_to_move(request: Request) -> str | None:
    """Salt with which a request continues in another engine. If its blocks depend on KV of several weights, it is a
    salt of its own.

    Blocks that it left there before it was computed again have another salt.
    """
    salt = request.cache_salt
    own = f"{OWN_SALT}{request.request_id}/"
    if not has_own_hashes(request._block_hasher) or (salt is not None and salt.startswith(own)):
        return salt
    return own + (salt or "").removeprefix(OWN_SALT)


def stop(groups: MovableGroups, scheduler: Scheduler, requests: Sequence[Request]) -> None:
    """Take requests out of every queue. Running ones are preempted."""
    running = {request for request in requests if request.status == RequestStatus.RUNNING}
    if running:
        scheduler.running = [request for request in scheduler.running if request not in running]
    for request in running:
        num_events = len(request.events)
        groups.preempt(request)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        del request.events[num_events:]
    scheduler.waiting.remove_requests(requests)
    leave_deferred(scheduler, requests)


def queue_again(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    """Put stopped requests that have not ended back into the queue. They run next."""
    for request in reversed([request for request in requests if not request.is_finished()]):
        scheduler.waiting.prepend_request(request)

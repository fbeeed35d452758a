"""Versions of the weights that sampled a token, and that computed the KV of a block.

At a change, a request that has not begun gets another cache salt: it reads KV of the new weights only. A running
request keeps its KV. Its later blocks are shared with no other request, because they depend on KV of both versions.
`recompute` computes a request's KV again by the new weights only. New weights of a LoRA adapter change nothing for
requests of other adapters and of the base model.

Invariant: a request that begins after a change which concerns it never reads a block from before this change. If the
client has salted a request, the salt stays, and the client is responsible for its blocks. Before the first change
nothing is done.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_rollout.adapter.names import learned_name
from vllm_rollout.adapter.weights import Changes
from vllm_rollout.kernel.rules.types import BASE_MODEL

OWN_SALT = "vllm_rollout/"
FIRST_VERSION = "default"
"""vLLM's name for weights without a name."""


class Weights:
    """The weights of one engine, in its scheduler."""

    def __init__(self, scheduler: Any) -> None:
        """`scheduler`: ours (`GroupSchedulerMixin`)."""
        self._scheduler: Scheduler = scheduler
        self._preempt: Callable[..., None] = scheduler.preempt
        self._known = Changes.num
        """Number of the newest change that is known."""
        self._salted = Changes.num
        """Number of the change after which requests were salted last."""
        self._first = Changes.num
        """Number of the last change before this engine. Another engine of this process may have had some."""
        self._recomputed: int | None = None
        """Number of the change after which all groups were computed again last."""
        self.sampling = Changes.num
        """Number of the change after which the last step that was read was computed."""
        self._names = {self._first: FIRST_VERSION}
        self._changes: defaultdict[str, list[int]] = defaultdict(list, {BASE_MODEL: [self._first]})
        """Changes of single adapters by name. BASE_MODEL has all others, which concern every request."""
        self._newest = {BASE_MODEL: self._first}
        """The newest of these changes that has a name."""
        self._void = self._first
        """Number of the change before which all KV is void, because some of it was not finite."""
        self.workers_count = True
        """True if the workers are ours."""
        self.clean: Callable[[], int] | None = None
        """Lets the workers clean their KV of values that are not finite, and returns 1 if there were any. None if no
        weights have come since the last step."""
        self.is_paused = False
        """True while generation is paused. A server that sleeps has no KV."""

    def have_come(self, adapter: str = BASE_MODEL) -> bool:
        """Note new weights. Returns True if there are any. Requests are salted later, once for several changes.

        `adapter`: the last change is of this adapter only.
        """
        before, self._known = self._known, Changes.num
        if self._known == before:
            return False
        self._changes[BASE_MODEL] += range(before + 1, self._known)
        self._changes[adapter].append(self._known)
        return True

    def look(self) -> None:
        """Salt requests anew if weights have changed. Called between two steps, before a step or a salt is needed."""
        self.have_come()
        if self._salted == self._known:
            return
        self._salted = self._known
        for request in self._scheduler.requests.values():
            if not self._is_ours(request) or not self._may_be_stale(request):
                continue
            has_begun = request.num_computed_tokens > 0  # also one that waits for more of its prompt
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) and not has_begun:
                self._salt(request)
            else:
                self._isolate(request)

    def before_step(self) -> None:
        """Note new weights. If the weights before have left KV that is not finite, compute all requests again.

        Their KV may have such values, which are 0 now.
        """
        self.look()
        if self.clean is None or self.is_paused:
            return
        clean, self.clean = self.clean, None
        if clean():
            self._void, self._salted = self._known, -1
            self.recompute(list(self._scheduler.requests.values()))
            self.all_recomputed()

    def begin(self, request: Request) -> None:
        """Salt a request that comes, for the first time or from another engine."""
        self.look()
        begins = request.cache_salt is None or (self._is_ours(request) and not request.num_output_tokens)
        if begins and self._last(request) != self._first:
            self._salt(request)

    def arrives(self, request: Request) -> bool:
        """Salt a preempted request of another engine anew, if all groups here were computed again by the newest weights
        and it was not. Then its KV is void.

        Returns True if it is void.
        """
        self.look()
        if self._recomputed is None or self._recomputed < self._last(request) or not self._may_be_stale(request):
            return False
        self._leave_kv(request)
        return True

    def all_recomputed(self) -> None:
        """Note that `recompute` was called for all groups here. It holds for groups that arrive later, too."""
        self._recomputed = self._known

    def recompute(self, requests: Iterable[Request]) -> int:
        """Compute requests that have KV of older weights again by the newest ones. Returns the number of these
        requests.

        Running ones are preempted and run next. Their tokens in flight are sampled again. Preempted ones, such as those
        that have just moved, do not find their older KV any more.
        """
        self.look()
        scheduler = self._scheduler
        begun = (RequestStatus.RUNNING, RequestStatus.PREEMPTED)
        stale = {each for each in requests if each.status in begun and self._may_be_stale(each)}
        running = [each for each in scheduler.running if each in stale]
        scheduler.running = [each for each in scheduler.running if each not in stale]
        for request in reversed(running):  # each is put before those that wait
            self._preempt(request, drop_stale_output=True)
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        for request in stale:
            self._leave_kv(request)
        return len(stale)

    def preempted(self, request: Request) -> None:
        """Salt a preempted request anew, because its own blocks depend partly on older weights."""
        if self._may_be_stale(request) and self._is_ours(request):
            self._salt(request)

    def _leave_kv(self, request: Request) -> None:
        """Let a preempted request, which may be stale, find no KV of older weights."""
        self.preempted(request)
        if not self._is_ours(request):  # its client's salt also finds KV of older weights
            request.skip_reading_prefix_cache = True

    def sampled_by(self, change: int) -> bool:
        """Note that a step was computed after this change. Returns True if the change is new."""
        if change == self.sampling:
            return False
        self.sampling = change
        return True

    def name(self, version: str, adapter: str = BASE_MODEL) -> None:
        """Name the newest weights of an adapter. A name for BASE_MODEL also holds for later ones of adapters without a
        name.
        """
        change = self._newest[adapter] = self._changes[adapter][-1]
        self._names[change] = version
        for other, changes in self._changes.items() if adapter == BASE_MODEL else ():
            if changes[-1] > change and changes[-1] not in self._names:
                self._names[changes[-1]], self._newest[other] = version, changes[-1]

    def is_named_otherwise(self, version: str, adapter: str = BASE_MODEL) -> bool:
        """True if a name belongs to weights of an adapter whose arrival was not noticed."""
        changes = self._changes.get(adapter)
        return not changes or self._names.get(changes[-1], version) != version

    def version(self, change: int) -> str:
        """Name of the weights after a change. Without a name: the change's number, which is the same on all ranks."""
        return self._names.get(change) or str(change)

    @property
    def num_changes(self) -> int:
        """Weights changes of this engine."""
        return self._known - self._first

    @property
    def newest(self) -> str:
        """Name of the newest weights."""
        return self.version(self._known)

    def newest_of(self, adapter: str) -> str:
        """The newest name that weights of an adapter were given. Any other name stands for the base model."""
        return self.version(max(self._newest.get(name, self._first) for name in (BASE_MODEL, adapter)))

    def named(self, spans: Iterable[tuple[int, int]], adapter: str = BASE_MODEL) -> list[tuple[int, str]]:
        """Versions of an adapter in place of changes, each with its first token. Neighbours of one name are merged."""
        named: list[tuple[int, str]] = []
        for start, change in spans:
            version = self.version(self._last_of(adapter, change))
            if not named or named[-1][1] != version:
                named.append((start, version))
        return named

    def _last_of(self, adapter: str, change: int) -> int:
        """The last change up to this one that concerns an adapter."""
        if change > self._known:  # a worker's, which the engine core learns later
            return change
        both = [self._changes.get(name, ()) for name in (BASE_MODEL, adapter)]
        return max((its[num - 1] for its in both if (num := bisect_right(its, change))), default=change)

    def _last(self, request: Request) -> int:
        """The last change that concerns the KV of a request."""
        return max(self._void, self._last_of(learned_name(request.lora_request), self._known))

    def _salt(self, request: Request) -> None:
        """Let a request find only KV after the last change that concerns it."""
        salt(request, f"{OWN_SALT}{self._last(request)}")

    @staticmethod
    def _is_ours(request: Request) -> bool:
        return request.cache_salt is None or request.cache_salt.startswith(OWN_SALT)

    def _may_be_stale(self, request: Request) -> bool:
        """True if the request may have begun before the last change. A client's own salt does not show this."""
        last = self._last(request)
        if last == self._first:
            return False
        return not self._is_ours(request) or request.cache_salt != f"{OWN_SALT}{last}"

    def _isolate(self, request: Request) -> None:
        """Give the request's later blocks hashes that no other request can have."""
        hasher = request._block_hasher
        if hasher is None or has_own_hashes(hasher):
            return
        num_computed = request.num_computed_tokens // self._scheduler.kv_cache_manager.block_pool.hash_block_size
        del request.block_hashes[num_computed:]
        request._block_hasher = partial(_own_hashes, hasher, request.request_id.encode())
        request.update_block_hashes()


def salt(request: Request, value: str) -> None:
    """Salt a request: only requests with the same salt find its blocks."""
    request.cache_salt, request.block_hashes = value, []
    if has_own_hashes(hasher := request._block_hasher):
        request._block_hasher = hasher.args[0]
    request.update_block_hashes()


def has_own_hashes(hasher: Callable[[Request], list[BlockHash]] | None) -> bool:
    return isinstance(hasher, partial) and hasher.func is _own_hashes


def _own_hashes(hasher: Callable[[Request], list[BlockHash]], owner: bytes, request: Request) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(each + owner).digest()) for each in hasher(request)]

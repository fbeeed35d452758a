"""Which weights sampled a token, and which computed the KV of a block.

At a change, a request that has not begun gets another cache salt: it reads KV of the new weights only. A request that
runs keeps what it has, and what it computes from then on is shared with nobody, because it rests on KV of both. Whoever
wants KV of the new weights only has it computed again (`recompute`).

Invariant: a request that begins after a change never reads a block from before it. A request whose client has salted it
keeps that salt, and its blocks are its client's affair. Before the first change nothing is done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_rollout.adapter.weights import Changes

OWN_SALT = "vllm_rollout/"
FIRST_VERSION = "default"
"""What vLLM calls weights that nobody has named."""


class Preempting(Protocol):
    """What our schedulers add to vLLM's, as far as weights need it."""

    def preempt(self, request: Request, *, drop_stale_output: bool) -> None: ...


class Weights:
    """The weights of one engine, as its scheduler knows them."""

    def __init__(self, groups: Preempting, scheduler: Scheduler) -> None:
        """`groups`, `scheduler`: the same scheduler, ours and as vLLM's."""
        self._groups = groups
        self._scheduler = scheduler
        self._known = Changes.num
        """The change after which requests were salted last."""
        self._first = Changes.num
        """Of this engine: another one of this process may have had some before."""
        self.sampling = Changes.num
        """The change after which the step was computed that was read last."""
        self._names: dict[int, str] = {}
        self.workers_count = True
        """They are ours."""

    def look(self) -> None:
        """Between two steps: salt requests anew if weights have changed."""
        change = Changes.num
        if change == self._known:
            return
        self._known = change
        for request in self._scheduler.requests.values():
            if not self._is_ours(request):
                continue
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                salt(request, self._salt)
            else:
                self._isolate(request)

    def begin(self, request: Request) -> None:
        """A request comes, for the first time or from another engine."""
        self.look()
        begins = request.cache_salt is None or (self._is_ours(request) and not request.num_output_tokens)
        if begins and self._known != self._first:
            salt(request, self._salt)

    def recompute(self, requests: Iterable[Request]) -> int:
        """Have those that run on KV of older weights computed again by the newest ones. Returns how many do.

        They are preempted, and the next to run. Tokens of theirs that are in flight are sampled again.
        """
        self.look()
        scheduler = self._scheduler
        stale = {each for each in requests if each.status == RequestStatus.RUNNING and self._may_be_stale(each)}
        running = [each for each in scheduler.running if each in stale]
        scheduler.running = [each for each in scheduler.running if each not in stale]
        for request in reversed(running):  # each is put before those that wait
            self._groups.preempt(request, drop_stale_output=True)
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            self.preempted(request)
            if not self._is_ours(request):  # under its client's salt KV of older weights may be found
                request.skip_reading_prefix_cache = True
        return len(running)

    def preempted(self, request: Request) -> None:
        """It is computed again: what it would find of its own under a salt of others rests on older weights in part."""
        if self._may_be_stale(request) and self._is_ours(request):
            salt(request, self._salt)

    def sampled_by(self, change: int) -> bool:
        """A step was computed after this change; whether that is news."""
        if change == self.sampling:
            return False
        self.sampling = change
        return True

    def name(self, version: str) -> None:
        """What the newest weights are called."""
        self._names[self._known] = version

    def is_named_otherwise(self, version: str) -> bool:
        """Whether a name tells of weights whose coming nobody has noticed."""
        known = self._names.get(self._known, FIRST_VERSION if self._known == self._first else None)
        return known is not None and known != version

    def version(self, change: int) -> str:
        """The name of the weights after a change, or its number, which is the same on all ranks."""
        return self._names.get(change) or (FIRST_VERSION if change == self._first else str(change))

    @property
    def num_changes(self) -> int:
        """Of this engine."""
        return self._known - self._first

    @property
    def newest(self) -> str:
        """The name of the weights that came last."""
        return self.version(self._known)

    def named(self, spans: Iterable[tuple[int, int]]) -> list[tuple[int, str]]:
        """Versions in place of changes, each with its first token. Neighbours of one name are one."""
        named: list[tuple[int, str]] = []
        for start, change in spans:
            version = self.version(change)
            if not named or named[-1][1] != version:
                named.append((start, version))
        return named

    @property
    def _salt(self) -> str:
        return f"{OWN_SALT}{self._known}"

    @staticmethod
    def _is_ours(request: Request) -> bool:
        return request.cache_salt is None or request.cache_salt.startswith(OWN_SALT)

    def _may_be_stale(self, request: Request) -> bool:
        """It may have begun before the last change. A client's own salt does not tell."""
        if self._known == self._first:
            return False
        return not self._is_ours(request) or request.cache_salt != self._salt

    def _isolate(self, request: Request) -> None:
        """What it computes from now on has a name that no other request can have."""
        hasher = request._block_hasher
        if hasher is None or _has_own_hashes(hasher):
            return
        num_computed = request.num_computed_tokens // self._scheduler.kv_cache_manager.block_pool.hash_block_size
        del request.block_hashes[num_computed:]
        request._block_hasher = partial(_own_hashes, hasher, request.request_id.encode())
        request.update_block_hashes()


def salt(request: Request, value: str) -> None:
    """Its blocks are found by requests of this salt only."""
    request.cache_salt, request.block_hashes = value, []
    if _has_own_hashes(hasher := request._block_hasher):
        request._block_hasher = hasher.args[0]
    request.update_block_hashes()


def salt_to_move(request: Request) -> str | None:
    """The salt with which it goes on in another engine: its own, where its blocks rest on KV of several weights.

    Blocks that it left there before it was computed again are of another salt.
    """
    salt = request.cache_salt
    own = f"{OWN_SALT}{request.request_id}/"
    if not _has_own_hashes(request._block_hasher) or (salt is not None and salt.startswith(own)):
        return salt
    return own + (salt or "").removeprefix(OWN_SALT)


def _has_own_hashes(hasher: Callable[[Request], list[BlockHash]] | None) -> bool:
    return isinstance(hasher, partial) and hasher.func is _own_hashes


def _own_hashes(hasher: Callable[[Request], list[BlockHash]], owner: bytes, request: Request) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(each + owner).digest()) for each in hasher(request)]

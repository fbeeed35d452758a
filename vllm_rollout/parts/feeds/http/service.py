"""Feeds of all clients. Invariant: a batch is taken once, and its answer is kept before it is sent."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_rollout.background import to_its_end
from vllm_rollout.kernel.http.clients import client_namespace, id_of, owned_name
from vllm_rollout.kernel.http.engine import Engine, RequestError
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.kernel.parts import face
from vllm_rollout.kernel.rules.types import NOT_FINITE
from vllm_rollout.parts.feeds.http.answers import FeedAnswer, FeedsAnswer
from vllm_rollout.parts.feeds.http.batches import Batches, feed_answer
from vllm_rollout.parts.feeds.http.body import BatchRequest, FeedRequest, PutRequest
from vllm_rollout.parts.feeds.http.kept import Kept
from vllm_rollout.parts.feeds.http.live import LiveFeed
from vllm_rollout.parts.feeds.http.metrics import FeedMetrics
from vllm_rollout.parts.feeds.http.queue import WaitingPrompt, as_json
from vllm_rollout.parts.feeds.http.running import GroupRunner, RolloutRunner
from vllm_rollout.parts.feeds.http.store import FeedStore, StoredFeed
from vllm_rollout.parts.feeds.rules.feed import MAX_BYTES

CHECK = {"id": "check", "prompt_token_ids": [0]}
"""Stands for a feed's prompts when its fields are checked."""
LOOK_S = 1.0
"""Seconds after which a request that waits for a batch asks the engine for the name of its weights. Another API process
may have got them."""
MAX_FEEDS = 64
MAX_WAITING_BYTES = 512 << 20
"""Largest sum of the prompts that wait in all feeds, in bytes of memory."""
WAITS = {
    "groups": "{running} groups run or wait for places in the engine ({queued}). {complete} of {batch} are complete.",
    "older_groups": "it would leave running groups behind that are too old for the next batch.",
    "prompts": "{complete} of {batch} groups are complete, and no prompt waits. Since the last batch {dropped} "
    "prompts were dropped, {filtered} filtered, and {failed} failed. Put more, or set drain.",
    "weights": "its places are taken until the weights are updated. They have {now}. Give weights with a new name: "
    "client.give_weights(folder, NAME), or POST /update_weight_version.",
    "old_weights": "the server has started anew. Give the newest weights again, under their old name {name!r} to "
    "continue.",
    "good_weights": "no group may start before weights with a new name come. Under {name!r}, prompt {bad!r} failed: "
    "{not_finite}",
    "trainer": "one is complete, and another request takes it.",
    "harness": "no harness runs its sessions. Start one that reads GET /v1/feeds/{id}/events.",
    "fields": "the server refuses the feed's fields. {refusal}",
}
"""Message for each reason why there is no batch, and for weights that are missing or bad."""


of_sessions: Any = face("feeds", "harnesses")
"""The module `harnesses` of feeds with sessions. None without sessions."""


class FeedService:
    """Serves the endpoints of feeds."""

    def __init__(
        self,
        rollouts: RolloutService,
        engine: Engine,
        metrics: Metrics,
        store: FeedStore | None = None,
        *,
        sessions: Callable[[], Any] = lambda: None,
    ) -> None:
        """`store`: feeds on disk. None: a feed ends with the server. `sessions`: the service of sessions. None: this
        server has none.

        Raises: RuntimeError for feeds that cannot be read.
        """
        self._rollouts, self._engine, self._sessions = rollouts, engine, sessions
        self._metrics = metrics.of(FeedMetrics)
        self._feeds: dict[str, Batches] = {}
        """Feeds by their clients' names for them."""
        self._coming_bytes = 0
        """Bytes of prompts that are being written."""
        self._naming = asyncio.Lock()
        """Held while a name is given or becomes free."""
        self._store = store
        if store is not None:
            for stored in store.load():
                self._take_up(stored, store.path)
        self._share()

    async def create(self, request: FeedRequest) -> tuple[FeedAnswer, bool]:
        """Create a feed. Returns it, and True if it is new. Raises: RequestError, 409 if a feed of that id has other
        terms."""
        id = request.id or f"feed-{uuid.uuid4().hex[:12]}"
        name = _name(id)
        if name not in self._feeds:
            check = await self._check(request)
            version = await self._engine.current_weight_version(check.model)
            async with self._naming:
                if name not in self._feeds:  # another request may have been faster
                    self._check_num_feeds()
                    feed = self._feed(name, request, check.model, version)
                    self._feeds[name] = Batches(feed)
                    self._share()
                    try:
                        await feed.kept.created(feed.created, feed.model, _as_json(request), feed.state)
                    except RequestError:
                        del self._feeds[name]
                        self._share()
                        raise
                    return feed_answer(feed), True
        feed = self._feeds[name].feed
        _check_same(feed, request)
        with suppress(RequestError):  # the feed may say later why its groups do not start
            await feed.check()
        return feed_answer(feed), False

    async def read(self, id: str) -> FeedAnswer:
        """A feed as it is now. Raises: RequestError (404)."""
        found = self._find(id)
        await self._look(found.feed.model)
        return feed_answer(found.feed)

    async def read_all(self) -> FeedsAnswer:
        """The client's feeds as they are now, or as they were if the engine does not answer."""
        await self.hear()
        its = (found.feed for name, found in self._feeds.items() if name == _name(id_of(name)))
        return FeedsAnswer(data=[feed_answer(feed) for feed in its])

    async def delete(self, id: str) -> None:
        """Delete a feed, and stop its groups. Raises: RequestError, 404, 507 if the feed is as it was."""
        await to_its_end(self._delete(id), "the deletion of a feed", refusals=(RequestError,))

    async def put(self, id: str, request: PutRequest) -> FeedAnswer:
        """Add prompts. Raises: RequestError, 409 for the key of other prompts, 507 if too many wait."""
        return await to_its_end(self._put(id, request), "prompts of a feed", refusals=(RequestError,))

    async def _put(self, id: str, request: PutRequest) -> FeedAnswer:
        found = self._find(id)
        await self._look(found.feed.model)
        key = request.idempotency_key
        digest = None if key is None else await asyncio.to_thread(lambda: request.digest)  # many prompts take a while
        async with found.putting:
            self._check_there(id, found)
            await found.feed.try_again()
            if key is not None and key in found.puts:
                _check_repeat(key, digest, found.puts[key])
            else:
                prompts = found.feed.checked(request.prompts)
                with self._room(prompts):
                    await found.feed.kept.put(key, digest, ((each.turn, as_json(each.prompt)) for each in prompts))
                self._check_there(id, found)
                found.feed.put(prompts)
                if key is not None:
                    found.puts.add(key, digest)
        return feed_answer(found.feed)

    async def take(self, id: str, request: BatchRequest) -> list[bytes]:
        """Wait for a batch, and take it. Returns a FeedBatch as JSON, in parts.

        Raises: RequestError, 504 if there is none in time, 410 for the key of an earlier batch. Also 409 if the server
        refuses the feed's fields, and 507 if the disk takes no batch, with the key.
        """
        found, began = self._find(id), time.monotonic()
        key = request.idempotency_key or f"batch-{uuid.uuid4().hex}"
        if (kept := found.kept(key)) is not None:
            await _written(found, key)
            return kept
        async with _in_turn(found, request.timeout_s):
            await _written(found, key)
            await self._look(found.feed.model)
            await found.feed.try_again()
            self._check_there(id, found)
            while (answer := found.take(key, drain=request.drain, waited_s=time.monotonic() - began)) is None:
                if found.feed.refusal is not None:
                    raise _refused(found.feed)
                left_s = began + request.timeout_s - time.monotonic()
                if left_s <= 0:
                    raise _no_batch(found.feed, request.timeout_s)
                await found.feed.changed(min(left_s, LOOK_S))
                await self._look(found.feed.model)
                self._check_there(id, found)
            await _written(found, key)
        self._metrics.waited(time.monotonic() - began)
        return answer

    def events(self, id: str, harness: str | None) -> AsyncGenerator[Any, None]:
        """Events of a feed's sessions for the harness of this name.

        Raises: RequestError, 404, 409 for a feed without sessions, 429 with too many harnesses.
        """
        return self._find(id).feed.runner.events(harness)

    @property
    def live(self) -> list[LiveFeed]:
        """All feeds."""
        return [found.feed for found in self._feeds.values()]

    async def hear(self) -> None:
        """Weights of some model have a new name. Later requests raise what cannot be said now."""
        for model in {feed.model for feed in self.live}:
            with suppress(RequestError):
                await self._look(model)
        for feed in self.live:
            feed.trust_weights()

    async def _delete(self, id: str) -> None:
        async with self._naming:
            found = self._find(id)
            del self._feeds[_name(id)]
            try:
                await found.feed.kept.deleted()
            except RequestError:
                self._feeds[_name(id)] = found
                raise
            finally:
                self._share()
        await found.feed.close()

    async def _look(self, model: str) -> None:
        """Tell a model's feeds the name of its weights. Raises: RequestError."""
        version = await self._engine.current_weight_version(model)
        for feed in [feed for feed in self.live if feed.model == model]:
            feed.weights_named(version)

    def _find(self, id: str) -> Batches:
        if (found := self._feeds.get(_name(id))) is None:
            raise _unknown(id)
        return found

    def _check_there(self, id: str, found: Batches) -> None:
        """Raises: RequestError (404) if the feed was deleted meanwhile."""
        if self._feeds.get(_name(id)) is not found:
            raise _unknown(id)

    def _share(self) -> None:
        """Give each feed an equal share of the bytes of complete groups."""
        for feed in self.live:
            feed.rule.max_bytes = MAX_BYTES // len(self._feeds)

    async def _check(self, request: FeedRequest) -> Rollout:
        """A rollout with the feed's fields, which does not run. Raises: RequestError for fields that the server cannot
        serve."""
        check = await self._rollouts.prepare(_rollout_request(request))
        refusal = check.prompts[0].resume_refusal
        if request.on_update == "stop" and refusal is not None:
            raise RequestError(f'on_update: "stop" {str(refusal).removeprefix("resume: ")}', param="on_update")
        if request.sessions is not None:
            of_sessions.check_room(self._sessions(), request)
        return check

    def _check_num_feeds(self) -> None:
        if len(self._feeds) >= MAX_FEEDS:
            raise RequestError(
                f"this server has {MAX_FEEDS} feeds, and may have no more. DELETE one of them.",
                status=HTTPStatus.CONFLICT,
            )

    def _feed(self, name: str, request: FeedRequest, model: str, version: str | None) -> LiveFeed:
        kept = Kept(self._store, name)
        asks = self._runner, self._check, self._look
        return LiveFeed(id_of(name), request, model, self._engine, *asks, self._metrics, version, kept)

    def _runner(self, feed: LiveFeed) -> GroupRunner:
        if feed.request.sessions is None:
            return RolloutRunner(self._rollouts, feed.id, feed.request)
        runner: GroupRunner = of_sessions.SessionRunner(self._sessions, feed.id, feed.request, feed.admit)
        return runner

    def _take_up(self, stored: StoredFeed, path: Path) -> None:
        """Continue a feed from disk. Raises: RuntimeError."""
        try:
            request = FeedRequest.model_validate(stored.settings)
            feed = self._feed(stored.name, request, stored.model, stored.state["weight_version"])
            found = self._feeds[stored.name] = Batches(feed)
            found.take_up(stored)
            feed.take_up(stored, stored.name.rpartition("/")[0])
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(
                f"{path}: feed {id_of(stored.name)!r} cannot be read ({_why(error)}). If a part of the server is left "
                "out, start with it. Else move the file away."
            ) from error

    @contextmanager
    def _room(self, prompts: Iterable[WaitingPrompt]) -> Iterator[None]:
        """Room for prompts until they are in their feed. Raises: RequestError (507)."""
        waiting = sum(found.feed.queue.num_bytes for found in self._feeds.values()) + self._coming_bytes
        num = sum(prompt.num_bytes for prompt in prompts)
        if waiting + num > MAX_WAITING_BYTES:
            raise RequestError(
                f"prompts: {num} bytes would make {waiting + num} that wait in feeds, at most {MAX_WAITING_BYTES} may. "
                "Put them after the next batch.",
                status=HTTPStatus.INSUFFICIENT_STORAGE,
                param="prompts",
            )
        self._coming_bytes += num
        try:
            yield
        finally:
            self._coming_bytes -= num


@asynccontextmanager
async def _in_turn(found: Batches, timeout_s: float) -> AsyncIterator[None]:
    """Wait for the requests before: trainers of one feed get batches in the order of their requests.

    Raises: RequestError (504).
    """
    try:
        async with asyncio.timeout(timeout_s):
            await found.turn.acquire()
    except TimeoutError:
        raise _no_batch(found.feed, timeout_s) from None
    try:
        yield
    finally:
        found.turn.release()


async def _written(found: Batches, key: str) -> None:
    """Write the newest batch. Raises: RequestError (507) that names the key of the request for a batch."""
    try:
        await found.feed.kept.written(found.feed.state)
    except RequestError as error:
        raise RequestError(f"{error} Its idempotency_key is {key!r}.", status=error.status) from error


def _as_json(request: FeedRequest) -> dict[str, Any]:
    """The request as it was made, without defaults."""
    return request.model_dump(mode="json", exclude_unset=True)


def _name(id: str) -> str:
    """Name of a feed, from the id that the current client has for it."""
    return owned_name(client_namespace(), id)


def _unknown(id: str) -> RequestError:
    return RequestError(
        f"feed {id!r:.140} is not known here: it was deleted, or the server has started anew. Create it by POST "
        "/v1/feeds.",
        status=HTTPStatus.NOT_FOUND,
    )


def _why(error: Exception) -> str:
    """The error in one line."""
    if not isinstance(error, ValidationError):
        return repr(error)
    problem = error.errors(include_url=False)[0]
    return ": ".join([*map(str, problem["loc"]), problem["msg"].removeprefix("Value error, ").removesuffix(".")])


def _rollout_request(request: FeedRequest) -> RolloutRequest:
    return RolloutRequest.model_validate({**request.rollout_fields(), "prompts": [CHECK]})


def _check_same(feed: LiveFeed, request: FeedRequest) -> None:
    """Raises: RequestError (409) that names a field whose value differs."""
    before, now = feed.request.settings, request.settings
    for name in (name for name in now if before[name] != now[name]):
        raise RequestError(
            f"{name}: feed {feed.id!r} has {json.dumps(before[name]):.80}, got {json.dumps(now[name]):.80}. Take "
            "another id, or DELETE the feed.",
            status=HTTPStatus.CONFLICT,
            param=name,
        )


def _check_repeat(key: str, digest: str | None, before: str | None) -> None:
    """Raises: RequestError (409) if the key was given to other prompts. `before`: their digest, or None if unknown."""
    if before not in (None, digest):
        raise RequestError(
            f"idempotency_key: {key!r} has put other prompts into this feed. Repeat them as they were, or take a new "
            "key.",
            status=HTTPStatus.CONFLICT,
            param="idempotency_key",
        )


def _refused(feed: LiveFeed) -> RequestError:
    return RequestError(
        f"feed {feed.id!r} stands still, because the server refuses its fields: {feed.refusal} Then repeat this "
        "request: no prompt is lost.",
        status=HTTPStatus.CONFLICT,
    )


def _no_batch(feed: LiveFeed, timeout_s: float) -> RequestError:
    rule, reason = feed.rule, str(feed.waits_for)
    if reason == "weights" and feed.is_held:
        reason = "old_weights"
    elif reason == "weights" and feed.finite.bad_version == rule.version:
        reason = "good_weights"
    why = WAITS[reason].format(
        running=len(rule.running),
        queued=sum(group.group_id is None for group in feed.running),
        complete=len(rule.complete),
        batch=rule.terms.batch,
        name=feed.versions.name,
        now="no name" if feed.versions.name is None else f"the name {feed.versions.name!r}",
        bad=feed.finite.bad_prompt,
        not_finite=NOT_FINITE,
        id=feed.id,
        refusal=feed.refusal,
        dropped=len(feed.since.dropped),
        filtered=len(feed.since.filtered),
        failed=len(feed.since.failed),
    )
    return RequestError(f"timeout_s: no batch within {timeout_s:g} s: {why}", status=HTTPStatus.GATEWAY_TIMEOUT)

"""Several servers as one client: each call goes to the right servers. There is no process in between.

`rollout.py` splits rollouts. Runs and groups of sessions stay at the server that has them. Their rewards go
to that server. Weights go to all servers.

Invariants: while weights are given, no group begins. A lost server comes back once its weights have the version of the
other servers. Every error names its server.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import unquote

import httpx

from vllm_rollout.kernel.client.calls import Call, EventsCall, typed
from vllm_rollout.kernel.client.connection import HEALTH_TIMEOUT_S, LIMITS, RolloutError, is_healthy, raise_for_error
from vllm_rollout.kernel.client.groups import GroupStream
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.kernel.http.answers import DoneEvent, Event, RolloutAnswer, RolloutSummary
from vllm_rollout.kernel.http.rewards import EXPLANATIONS, NamedRewardsAnswer, RewardCounts, RewardResult, RewardsAnswer
from vllm_rollout.parts.fleet.loop import LoopThread
from vllm_rollout.parts.fleet.rollout import GONE, FleetRollout, Part, is_loss
from vllm_rollout.parts.fleet.rules import NoServerLeft, Servers
from vllm_rollout.parts.moving.http.body import EngineAnswer, EnginesAnswer
from vllm_rollout.parts.weights.client import GivenWeights, give_weights

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_S = 1.0
"""Shortest interval between two requests for the servers' load, in seconds."""
RETRY_S = 10.0
"""Seconds until a lost server is tried again."""
MAX_ROLLOUTS = 1024
"""Rollouts whose groups' servers are remembered, so that rewards go to the right server."""
KEEPALIVE = (
    [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ]
    if hasattr(socket, "TCP_KEEPIDLE")
    else []
)
"""Socket options. A failed host closes no connection: with these, the kernel detects it after a minute."""
BEGINS_GROUPS = re.compile(r"/v1/(rollouts|runs/[^/]+/rounds|groups)")
REWARDS = re.compile(r"/v1/rollouts/([^/]+)/rewards")
OF_ENGINE = re.compile(r"/v1/engines/(\d+)/(drain|restore)")
TO_ALL = {
    "POST": {"/pause", "/resume", "/collective_rpc", "/update_weight_version", "/v1/weights/recompute"}
    | {"/v1/load_lora_adapter", "/v1/weights/adapter_version"},
    "PUT": {"/v1/quality_head"},
}
TO_ANY = {"/v1/models", "/v1/votes"}
LISTS = {"/v1/runs", "/v1/feeds"}


class FleetEngine(EngineAnswer):
    """One engine of one of several servers. `rank` counts through all servers."""

    server: str
    server_rank: int


class Member(Sender):
    """Client of one of several servers. Overrides: __init__, _attempt, _open, _events."""

    def __init__(self, url: str, gate: asyncio.Lock, **settings: Any) -> None:
        """`gate`: held while no group may begin."""
        if settings.get("transport") is None:
            settings["transport"] = httpx.AsyncHTTPTransport(limits=LIMITS, socket_options=KEEPALIVE)
        super().__init__(url, **settings)
        self._gate = gate

    def named(self, error: RolloutError) -> RolloutError:
        if self.base_url in error.message:
            return error
        message = f"{self.base_url}: {error.message}"
        return RolloutError(error.status, message, error.type, error.param, error.retry_after_s)

    async def _attempt(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST" and BEGINS_GROUPS.fullmatch(request.url.path):
            async with self._gate:
                pass
        return await super()._attempt(request)

    async def _open(
        self,
        method: str,
        path: str,
        body: object = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        response = await super()._open(method, path, body, timeout, headers)
        if not response.is_success:
            try:
                await response.aread()
                raise_for_error(response)
            except RolloutError as error:
                raise self.named(error) from None
            finally:
                await response.aclose()
        return response

    async def _events(self, call: EventsCall) -> AsyncGenerator[Event, None]:
        try:
            async with aclosing(super()._events(call)) as events:
                async for event in events:
                    yield event
        except RolloutError as error:
            raise self.named(error) from error


class Fleet(Sender):
    """Sends calls to the right servers. Overrides: __init__, send, _events, _placed, give_weights, health, close."""

    def __init__(self, base_url: Sequence[str], **settings: Any) -> None:
        urls = [url.rstrip("/").removesuffix("/v1") for url in base_url]
        if not urls or len(set(urls)) < len(urls):
            raise ValueError(f"base_url must be a URL, or a list of different ones, got {list(base_url)!r}.")
        self._gate = asyncio.Lock()
        self._members = [Member(url, self._gate, **settings) for url in urls]
        self.base_url, self.key_headers = ", ".join(urls), self._members[0].key_headers
        self._servers = Servers(len(urls), random.randrange(len(urls)))
        self._engines: list[list[EngineAnswer]] = [[] for _ in urls]
        """Engines of each server, as of the last look."""
        self._reasons: dict[int, str] = {}
        """Reasons for lost servers, by number."""
        self._versions: set[str] = set()
        """Weight versions of the servers that are not lost, as of the last look."""
        self._unsure: frozenset[int] = frozenset()
        """Servers that were lost during a weights update. They may be paused, or have old weights under the new name.
        """
        self._looking = asyncio.Lock()
        self._looked_s = -float("inf")
        self._tried_s = -float("inf")
        self._rollouts: OrderedDict[str, Mapping[str, Part]] = OrderedDict()
        """Part that returned each prompt, by rollout id."""

    def new_loop(self) -> LoopThread:
        """A loop in which the sync client runs the coroutines of this one."""
        return LoopThread()

    @property
    def _alive(self) -> list[int]:
        return [number for number in range(len(self._members)) if number not in self._servers.out]

    def _lose(self, number: int, error: RolloutError) -> None:
        if number not in self._servers.out:
            logger.warning("%s is out: %s", self._members[number].base_url, error.message)
            self._tried_s = time.monotonic()
            self._servers.leaves(number)
        self._reasons[number] = error.message

    async def _look(self, *, any_weights: bool = False) -> None:
        """Update the servers' state and load, unless that was done in the last `LOOK_S` seconds. Raises: RolloutError
        if no server is left.

        `any_weights`: also take back lost servers with other weights.
        """
        async with self._looking:
            now = time.monotonic()
            if now - self._looked_s > LOOK_S or any_weights or not self._alive:
                tries_lost = any_weights or now - self._tried_s > RETRY_S or not self._alive
                numbers = range(len(self._members)) if tries_lost else self._alive
                if tries_lost:
                    self._tried_s = now
                seen = dict(zip(numbers, await asyncio.gather(*map(self._seen, numbers)), strict=True))
                self._looked_s = time.monotonic()
                self._take(seen, any_weights)
        if not self._alive:
            raise self._none_left()

    def _take(self, seen: Mapping[int, list[EngineAnswer] | RolloutError | None], any_weights: bool) -> None:
        for number, its in seen.items():
            if isinstance(its, RolloutError):
                self._lose(number, its)
            elif its is not None:
                if _has_begun_anew(self._engines[number], its):
                    url = self._members[number].base_url
                    self._lose(number, RolloutError(None, f"{url} has begun anew, with its first weights", "Restarted"))
                self._engines[number] = its
        versions = {name for number in self._alive for name in _versions(self._engines[number])}
        self._versions = versions or self._versions
        for number in self._servers.out & seen.keys():
            its = seen[number]
            if isinstance(its, list):
                has = _versions(its)
                is_right = not self._versions or has <= self._versions
                if any_weights or (is_right and number not in self._unsure and not self._gate.locked()):
                    self._servers.comes(number)
                    logger.warning("%s is back", self._members[number].base_url)
                    continue
                self._reasons[number] = (
                    f"{self._members[number].base_url} answers, with weights {', '.join(sorted(has))} and not "
                    f"{', '.join(sorted(self._versions))}: give it the weights (give_weights goes to all)"
                )
        counts = [
            None if seen.get(number) is None or number in self._servers.out
            else sum(each.num_running + each.num_waiting for each in self._engines[number])
            for number in range(len(self._members))
        ]  # fmt: skip
        sizes = [sum(each.state == "active" for each in its) for its in self._engines]
        self._servers.saw(counts, sizes, self._looked_s)

    def _none_left(self) -> RolloutError:
        return RolloutError(None, f"no server is left: {'; '.join(self._reasons.values())}", "ConnectError")

    async def _seen(self, number: int) -> list[EngineAnswer] | RolloutError | None:
        """The server's engines. An error if the server is gone. None if it did not answer in time.

        Raises: RolloutError if the server is not one of ours.
        """
        member = self._members[number]
        try:
            response = await member._http.get("/v1/engines", timeout=HEALTH_TIMEOUT_S)
        except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout):
            return None
        except httpx.TransportError as error:
            return RolloutError(None, f"{member.base_url}: {error or type(error).__name__}", type(error).__name__)
        try:
            raise_for_error(response)
            engines = typed(EnginesAnswer)(response).engines
        except RolloutError as error:
            if response.status_code in GONE:
                return member.named(error)
            raise member.named(error) from None
        if all(each.state == "dead" for each in engines):
            return RolloutError(None, f"{member.base_url}: all its engines are dead", "ConnectError")
        return engines

    async def send(self, call: Call[T]) -> T:
        path = call.path.partition("?")[0]
        answer: Any
        if path in TO_ALL.get(call.method, ()):
            answer = await self._to_all(call)
        elif path in TO_ANY:
            answer = await self._to_any(call)
        elif path == "/v1/rollouts":
            answer = await self._rollout(EventsCall(self._body(call), call.timeout))
        elif path == "/v1/engines":
            answer = await self._all_engines()
        elif path == "/v1/rewards":
            answer = await self._post_named_rewards(call)
        elif path in LISTS and call.method == "GET":
            await self._look()
            lists: Call[Any] = call
            found = await asyncio.gather(*(self._ask(number, lists) for number in self._alive))
            answer = [each for its in found for each in its or ()]
        elif (rewards := REWARDS.fullmatch(path)) is not None:
            answer = await self._post_rewards(unquote(rewards[1]), call)
        elif (engine := OF_ENGINE.fullmatch(path)) is not None:
            answer = await self._of_engine(int(engine[1]), engine[2], call)
        else:
            raise TypeError(
                f"{call.method} {path} concerns one server, and this client has several: use RolloutClient(url) with "
                f"one of {self.base_url}."
            )
        return answer  # type: ignore[no-any-return]

    @staticmethod
    def _body(call: Call[Any]) -> Mapping[str, Any]:
        assert isinstance(call.body, Mapping)
        return call.body

    async def _to_all(self, call: Call[T]) -> T:
        """Send a call to all servers and return the first answer. Servers that are gone are left out.

        Raises: RolloutError of a server, once all have answered, or if no server is left.
        """
        numbers = self._alive
        sent = (self._members[number].send(call) for number in numbers)
        answers = await asyncio.gather(*sent, return_exceptions=True)
        for number, answer in zip(numbers, answers, strict=True):
            if isinstance(answer, RolloutError) and is_loss(answer):
                self._lose(number, answer)
            elif isinstance(answer, BaseException):
                raise answer
        if not self._alive:
            raise self._none_left()
        return next(answer for answer in answers if not isinstance(answer, BaseException))

    async def _to_any(self, call: Call[T]) -> T:
        await self._look()
        for number in self._alive:
            if (answer := await self._ask(number, call)) is not None:
                return answer
        raise self._none_left()

    async def _ask(self, number: int, call: Call[T]) -> T | None:
        """Send a call to one server. Returns None, and marks the server as lost, if it is gone."""
        try:
            return await self._members[number].send(call)
        except RolloutError as error:
            if not is_loss(error):
                raise
            self._lose(number, error)
            return None

    async def _rollout(self, call: EventsCall) -> RolloutAnswer:
        rollout, stream, groups = await self._new_rollout(call), GroupStream(), {}
        async with aclosing(self._events_of(rollout)) as events:
            async for event in events:
                if (group := stream.take(event)) is not None:
                    groups[group.prompt_id] = group
        said = {name: getattr(stream.summary, name) for name in RolloutSummary.model_fields}
        return RolloutAnswer.model_construct(**said, groups=[groups[id] for id in rollout.positions])

    async def _events(self, call: EventsCall) -> AsyncGenerator[Event, None]:
        async with aclosing(self._events_of(await self._new_rollout(call))) as events:
            async for event in events:
                yield event

    async def _new_rollout(self, call: EventsCall) -> FleetRollout:
        await self._look()
        return FleetRollout(self._members, self._servers, call, self._lose_amid)

    async def _lose_amid(self, number: int, error: RolloutError) -> None:
        """Mark a server as lost during a rollout, before its prompts begin elsewhere. Raises: RolloutError if none is
        left.
        """
        self._lose(number, error)
        await self._look()

    async def _events_of(self, rollout: FleetRollout) -> AsyncGenerator[Event, None]:
        try:
            async with aclosing(rollout.events()) as events:
                async for event in events:
                    if isinstance(event, DoneEvent):
                        self._rollouts[rollout.id] = rollout.part_of
                        if len(self._rollouts) > MAX_ROLLOUTS:
                            self._rollouts.popitem(last=False)
                    yield event
        except NoServerLeft:
            raise self._none_left() from None

    async def _post_rewards(self, id: str, call: Call[Any]) -> RewardsAnswer:
        body = self._body(call)
        parts = self._rollouts.get(id)
        if parts is None:  # a rollout of a round, or of another client
            return await self._of_finder(replace(call, read=typed(RewardsAnswer)))
        entries = body["rewards"]
        places: dict[tuple[int, str], list[int]] = {}
        for position, entry in enumerate(entries):
            part = parts.get(entry.get("prompt_id"))
            if part is not None and part.done is not None and part.server not in self._servers.out:
                places.setdefault((part.server, part.done.id), []).append(position)
        results = [
            RewardResult(prompt_id=str(entry.get("prompt_id")), index=entry.get("index", 0), status="unknown",
                         message=EXPLANATIONS["unknown"])
            for entry in entries
        ]  # fmt: skip
        answers = []
        for (server, its_id), positions in places.items():
            path = f"/v1/rollouts/{its_id}/rewards"
            mine = {**body, "rewards": [entries[position] for position in positions]}
            try:
                answer = await self._ask(server, Call("POST", path, typed(RewardsAnswer), mine))
            except RolloutError as error:
                if error.status != HTTPStatus.NOT_FOUND:  # else it has forgotten the rollout
                    raise
                continue
            if answer is None:
                continue
            answers.append(answer)
            for position, result in zip(positions, answer.results, strict=True):
                results[position] = result
        if not answers:
            raise RolloutError(HTTPStatus.NOT_FOUND, f"no server that is left has a group of {id}", "NotFound")
        return answers[0].model_copy(
            update={
                "id": id,
                "results": results,
                "counts": RewardCounts.of(result.status for result in results),
                "num_training": sum(answer.num_training for answer in answers),
                "head_version": max(answer.head_version for answer in answers),
                "filtered": [prompt for answer in answers for prompt in answer.filtered],
            }
        )

    async def _of_finder(self, call: Call[T]) -> T:
        """Answer of the server that has the requested object. Raises: RolloutError, 404 if no server has it."""
        await self._look()
        found = await self.found(call)
        if isinstance(found, RolloutError):
            raise found
        return found[1]

    async def found(self, call: Call[T]) -> tuple[int, T] | RolloutError:
        """The server that has the requested object, with its answer. Otherwise an error: a server's 404, or that none
        is left.
        """
        missing: RolloutError | None = None
        for number in self._alive:
            try:
                answer = await self._ask(number, call)
            except RolloutError as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
                missing = error
            else:
                if answer is not None:
                    return number, answer
        return missing or self._none_left()

    async def _post_named_rewards(self, call: Call[Any]) -> NamedRewardsAnswer:
        """Post named rewards to all servers. Each takes the rewards of its own candidates."""
        await self._look()
        sent = replace(call, read=typed(NamedRewardsAnswer))
        said = await asyncio.gather(*(self._ask(number, sent) for number in self._alive))
        answers: list[NamedRewardsAnswer] = [answer for answer in said if answer is not None]
        if not answers:
            raise self._none_left()
        per_entry = zip(*(answer.results for answer in answers), strict=True)
        results = [next((each for each in its if each.status != "unknown"), its[0]) for its in per_entry]
        return answers[0].model_copy(
            update={
                "results": results,
                "counts": RewardCounts.of(result.status for result in results),
                "num_training": sum(answer.num_training for answer in answers),
            }
        )

    async def _all_engines(self) -> list[FleetEngine]:
        """Engines of all servers. Engines of lost servers have the state "dead"."""
        await self._look()
        found: list[FleetEngine] = []
        for number, member in enumerate(self._members):
            for each in self._engines[number]:
                state = "dead" if number in self._servers.out else each.state
                said = each.model_dump() | {"state": state, "rank": len(found)}
                found.append(FleetEngine(**said, server=member.base_url, server_rank=each.rank))
        return found

    async def _of_engine(self, rank: int, what: str, call: Call[T]) -> T:
        engines = await self._all_engines()
        if rank >= len(engines):
            raise RolloutError(HTTPStatus.NOT_FOUND, f"there is no rank {rank}, there are {len(engines)}", "NotFound")
        its = engines[rank]
        member = next(member for member in self._members if member.base_url == its.server)
        answer = await member.send(replace(call, path=f"/v1/engines/{its.server_rank}/{what}"))
        self._looked_s = -float("inf")
        return answer.model_copy(update={"rank": rank})  # type: ignore[attr-defined,no-any-return]

    @asynccontextmanager
    async def _placed(self, num_candidates: int) -> AsyncIterator[Sender]:
        await self._look()
        group = self._servers.place("sessions", num_candidates)
        try:
            yield self._members[group.server]
        finally:
            self._servers.over(group)

    async def give_weights(self, *args: Any, **options: Any) -> GivenWeights:
        async with self._gate:
            await self._look(any_weights=True)
            took_part = frozenset(self._alive)
            try:
                given = await give_weights(self, *args, **options)
            except BaseException:
                # if one server refused a pause, others may have begun theirs
                with suppress(RolloutError):
                    await self._to_all(Call("POST", "/resume", lambda _: None))
                raise
            finally:
                self._unsure = (self._unsure - took_part) | (took_part - frozenset(self._alive))
            self._looked_s = -float("inf")
            return given

    async def health(self) -> bool:
        """True if all servers answer and their engines are alive."""
        return all(await asyncio.gather(*map(self._is_healthy, self._members)))

    @staticmethod
    async def _is_healthy(member: Member) -> bool:
        try:
            return is_healthy(await member._http.get("/health", timeout=HEALTH_TIMEOUT_S))
        except httpx.TransportError:
            return False
        except RolloutError as error:
            raise member.named(error) from error

    async def close(self) -> None:
        await asyncio.gather(*(member._http.aclose() for member in self._members))


def _versions(engines: Iterable[EngineAnswer]) -> set[str]:
    """Weights of the ranks that are alive. Those of a dead one are unknown."""
    return {each.weight_version for each in engines if each.state != "dead"}


def _has_begun_anew(before: Sequence[EngineAnswer], now: Sequence[EngineAnswer]) -> bool:
    """True if a rank has seen fewer weights updates than before."""
    ranks = [pair for pair in zip(before, now, strict=False) if "dead" not in (pair[0].state, pair[1].state)]
    return any(new.num_weight_changes < old.num_weight_changes for old, new in ranks)

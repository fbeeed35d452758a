"""Groups of agents from Python: one call of a user's function per session, cancelled once the session has lost.

Invariant: no call outlives the generator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from typing import Any, TypedDict

from typing_extensions import Unpack

from vllm_rollout.background import cancelled
from vllm_rollout.kernel.client.body import option_fields, takes_options
from vllm_rollout.kernel.client.methods import ClientPart
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.parts.sessions.client.agent_group import AgentGroup, RunAgent, RunningGroup, Shared
from vllm_rollout.parts.sessions.http.body import SessionGroupRequest

MAX_CONCURRENT = 512
"""Default limit of concurrent sessions. Each session has a connection during a turn. Each group has one for its events.
"""


class AgentOptions(TypedDict, total=False):
    """Options of `agents`. They are fields of `POST /v1/groups`."""

    early_stop: bool
    selection: str
    max_sessions: int | None
    pruning: Mapping[str, Any] | None
    pruning_turn: int
    audit_ratio: float | None
    reward: str | Mapping[str, Any] | None
    data: Any
    max_turns: int | None
    max_tokens: int | None
    idle_timeout_s: float | None
    cut_turn: str | None
    history: str | None


async def _groups(its: Shared, prompts: Iterable[Any]) -> AsyncGenerator[AgentGroup, None]:
    """Yield each group when it is over. A group is declared once a place is free for one of its sessions."""
    waiting: Iterator[tuple[int, Any]] = enumerate(prompts)
    running: set[asyncio.Task[Any]] = set()
    place: asyncio.Task[Any] | None = asyncio.create_task(its.places.acquire())
    try:
        while place is not None or running:
            over, _ = await asyncio.wait(
                {*running, *([] if place is None else [place])}, return_when=asyncio.FIRST_COMPLETED
            )
            if place in over:
                over.remove(place)
                position, prompt = next(waiting, (None, None))
                if position is None:
                    its.places.release()
                    place = None
                else:
                    group = RunningGroup(its, position, prompt)
                    running.add(asyncio.create_task(group.result()))
                    place = asyncio.create_task(_place_after(its, group))
            for task in over:
                running.remove(task)
                yield task.result()
    finally:
        await cancelled([*running, *([] if place is None else [place])])
        await cancelled(its.calls)


async def _place_after(its: Shared, group: RunningGroup) -> None:
    """Acquire a place after the sessions of that group have queued for theirs."""
    await group.has_begun.wait()
    await its.places.acquire()


@takes_options(AgentOptions, SessionGroupRequest)
def agents(
    client: Sender,
    prompts: Iterable[Any],
    group_size: int,
    redundancy: int = 0,
    *,
    run: RunAgent,
    max_concurrent: int = MAX_CONCURRENT,
    **options: Unpack[AgentOptions],
) -> AsyncGenerator[AgentGroup, None]:
    """Run one group of sessions for each of `prompts`, which are values of any kind. Yields each result when it is
    over.

    `run` is an async function. It is called with an `AgentSession` for each of the `group_size + redundancy` sessions
    of a prompt, and for sessions that replace others. It returns the session's reward. None: no reward, or the reward
    of the server's `reward` function.

    If a session has lost, its call is cancelled: it gets an asyncio.CancelledError, so that its `finally` blocks close
    sandboxes. If the call raises `Void` or another exception, the session becomes void. The exception is the `error` of
    its result. A warning is logged unless it is `Void`.

    `max_concurrent`: calls of `run` at the same time. A group is declared once a place is free for one of its sessions.
    `data` may be a function of the prompt.

    Leaving the generator early (`contextlib.aclosing`) cancels all calls and deletes groups that are not over. The sync
    client has no such method, because its caller has no event loop. Call `asyncio.run` with a function that uses this
    method.

    Raises: RolloutError if the server refuses a group, or cannot be reached. TypeError for a single prompt. ValueError
    if `max_concurrent` is less than 1.
    """
    if isinstance(prompts, str | Mapping):
        raise TypeError(f"prompts must be a list of prompts, got one {type(prompts).__name__}. Write [prompt].")
    body = {"group_size": group_size, "redundancy": redundancy, **option_fields(options, AgentOptions)}
    return _groups(Shared(client, run, body, max_concurrent), prompts)


class AsyncAgentCalls(Sender):
    """Methods of the async client."""

    agents = agents


CLIENT = ClientPart(AsyncAgentCalls)

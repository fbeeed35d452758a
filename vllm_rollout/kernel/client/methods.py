"""Methods of the async client, made from descriptions of calls, and the face `client`, by which a part adds methods."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, get_args, get_type_hints

from vllm_rollout.kernel.client.blocking import Blocked
from vllm_rollout.kernel.client.calls import Call, EventsCall
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.kernel.http.answers import Event

T = TypeVar("T")
P = ParamSpec("P")
Method = TypeVar("Method", bound=Callable[..., Any])


class ClientPart(NamedTuple):
    """Methods that a part adds to the clients: its face `client`."""

    awaited: type[Sender]
    """Methods of the async client."""
    blocking: type[Blocked] = Blocked
    """Methods of the sync client."""


def awaited(describe: Callable[P, Call[T]]) -> Callable[Concatenate[Sender, P], Coroutine[Any, Any, T]]:
    """A method of the async client that sends the described call."""
    (answer,) = get_args(get_type_hints(describe)["return"])

    @_described_by(describe, answer)
    async def method(self: Sender, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(describe(*args, **kwargs))

    return method


def async_streamed(describe: Callable[P, EventsCall]) -> Callable[Concatenate[Sender, P], AsyncGenerator[Event, None]]:
    """A method of the async client that reads the described call's events."""

    @_described_by(describe, AsyncGenerator[Event, None])
    def method(self: Sender, /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[Event, None]:
        return self._events(describe(*args, **kwargs))

    return method


def _described_by(describe: Callable[..., Any], returns: object) -> Callable[[Method], Method]:
    """Decorator: gives a method the name, docstring and signature of the call's description."""

    def decorate(method: Method) -> Method:
        wraps(describe)(method)
        described = signature(describe)
        own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [own, *described.parameters.values()]
        bound = described.replace(parameters=parameters, return_annotation=returns)
        method.__signature__ = bound  # type: ignore[attr-defined]  # no type has it; `inspect` reads it
        return method

    return decorate

"""Methods of `vllm_rollout.LLM` and `vllm_rollout.AsyncLLM`, made from the descriptions of our clients' calls.

Invariant: a method has the name, arguments and docstring of the clients' method.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from contextlib import aclosing
from functools import wraps
from typing import Any, TypeVar

from vllm.lora.request import LoRARequest

from vllm_rollout.kernel.client.calls import Call, EventsCall
from vllm_rollout.kernel.http.answers import Event
from vllm_rollout.parts.in_process.api.rollouts import Rollouts

T = TypeVar("T")


def awaited(describe: Callable[..., Call[T]]) -> Callable[..., Coroutine[Any, Any, T]]:
    """A method of the async LLM that sends the described call."""

    @wraps(describe)
    async def method(self: Any, *args: Any, lora_request: LoRARequest | None = None, **options: Any) -> T:
        rollouts = await self.rollouts()
        return await rollouts.ask(describe(*args, **_named(rollouts, lora_request, options)))

    return method


def async_streamed(describe: Callable[..., EventsCall]) -> Callable[..., AsyncGenerator[Event, None]]:
    """A method of the async LLM that yields the events of the described call."""

    @wraps(describe)
    async def method(
        self: Any, *args: Any, lora_request: LoRARequest | None = None, **options: Any
    ) -> AsyncGenerator[Event, None]:
        rollouts: Rollouts = await self.rollouts()
        body = describe(*args, **_named(rollouts, lora_request, options)).body
        async with aclosing(rollouts.events(body)) as events:
            async for event in events:
                yield event

    return method


def done(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    """Sync version of a method, for `LLM`."""

    @wraps(method)
    def waiting(self: Any, *args: Any, **options: Any) -> T:
        return self.run_to_its_end(method(self, *args, **options))

    return waiting


def streamed(method: Callable[..., AsyncGenerator[Event, None]]) -> Callable[..., Generator[Event, None, None]]:
    """Sync version of a streaming method, for `LLM`. The engine works while the next event is asked for."""

    @wraps(method)
    def waiting(self: Any, *args: Any, **options: Any) -> Generator[Event, None, None]:
        events = method(self, *args, **options)
        try:
            while (event := self.run_to_its_end(anext(events, None))) is not None:
                yield event
        finally:
            self.end(events)

    return waiting


def _named(rollouts: Rollouts, lora: LoRARequest | None, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options with the adapter as their `model`, by its name."""
    return options if lora is None else {**options, "model": rollouts.know(lora)}

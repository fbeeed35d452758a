"""What our ASGI middleware reads of a request. Invariant: who comes after it reads the same messages again."""

from __future__ import annotations

from starlette.types import Message, Receive, Scope

from vllm_rollout.server.paths import path_of


def is_for(scope: Scope, method: str, path: str) -> bool:
    """Whether a request is for that path of vLLM's app, wherever a proxy has it."""
    return scope["type"] == "http" and scope["method"] == method and path_of(scope) == path


async def read_body(receive: Receive) -> tuple[bytes, Receive]:
    """The whole body, and a `receive` that begins with it once more."""
    messages = [await receive()]
    while messages[-1].get("more_body"):
        messages.append(await receive())
    remaining = iter(messages)

    async def receive_again() -> Message:
        message = next(remaining, None)
        return await receive() if message is None else message

    return b"".join(message.get("body", b"") for message in messages), receive_again

"""The clients that users import: those of the kernel, with the methods of every part that is there.

`vllm_rollout/__init__.pyi` has their types. Write it anew by `python -m docs_tools.stub --write`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import update_wrapper
from inspect import signature
from typing import Any, Self

from vllm_rollout.kernel.client.blocking import Blocked
from vllm_rollout.kernel.client.client import AsyncClient, BlockingSender, Client
from vllm_rollout.kernel.client.connection import DEFAULT_URL
from vllm_rollout.kernel.client.methods import ClientPart
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.kernel.parts import WITHOUT, faces

PARTS: list[ClientPart] = [part for _, part in faces("client")]
SEVERAL: list[type[Sender]] = [methods for _, methods in faces("several_servers")]
"""Methods that differ for a client of several servers. Later ones replace earlier ones."""


class OneServer(Sender):
    """Refuses several servers. Overrides: __init__."""

    def __init__(self, base_url: Sequence[str], **settings: Any) -> None:
        raise ValueError(
            f"base_url must be one URL, got {list(base_url)!r}: the part fleet, for several servers, is not there. "
            f"Give one URL, or take fleet out of {WITHOUT}."
        )


class AsyncRolloutClient(*(part.awaited for part in PARTS), AsyncClient):  # type: ignore[misc]  # see __init__.pyi
    """Async client of a server, or of several. Use as an async context manager, or await `close`."""

    def __new__(cls, base_url: str | Sequence[str] = DEFAULT_URL, *args: Any, **settings: Any) -> Self:
        is_one = isinstance(base_url, str) or issubclass(cls, _OfSeveral)
        client: Self = super().__new__(cls if is_one else _OfSeveral)
        return client

    __new__.__signature__ = signature(Sender.__init__)  # type: ignore[attr-defined]  # as `help` is to show it


class _OfSeveral(*(reversed(SEVERAL or [OneServer])), AsyncRolloutClient):  # type: ignore[misc]
    """Async client of several servers."""


class _OfOne(BlockingSender, AsyncRolloutClient):
    """Client of one server whose coroutines never wait."""


class RolloutClient(*(part.blocking for part in PARTS if part.blocking is not Blocked), Client):  # type: ignore[misc]
    """Sync client. Use as a context manager, or call `close`. Safe to share between threads."""

    def __init__(self, base_url: str | Sequence[str] = DEFAULT_URL, **settings: Any) -> None:
        if isinstance(base_url, str):
            super().__init__(_OfOne(base_url, **settings))
        else:
            client = _OfSeveral(base_url, **settings)
            super().__init__(client, client.new_loop())

    update_wrapper(__init__, AsyncRolloutClient.__init__)

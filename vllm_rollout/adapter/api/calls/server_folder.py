"""A folder that all processes of one server know, and nobody else. It goes when the server ends.

Invariant: the path of a socket in it is short enough wherever those of vLLM's own sockets are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm import envs

VARIABLE = "ROLLOUT_SERVER_FOLDER"
"""Environment variable with its path. (Of one that begins with VLLM_ vLLM would say that it knows no such.)"""

SOCKETS = "VLLM_RPC_BASE_PATH"
MAX_SOCKET_PATH, NAME_BYTES = 107, 37
"""Bytes of a socket's path, and of the name that vLLM gives one."""


@contextmanager
def of_a_server() -> Iterator[None]:
    """Around the first process of a server, before it starts others."""
    with TemporaryDirectory(prefix="vllm-rollout-", dir=envs.VLLM_RPC_BASE_PATH, ignore_cleanup_errors=True) as folder:
        before = {name: os.environ.get(name) for name in (VARIABLE, SOCKETS)}
        os.environ[VARIABLE] = folder
        if len(os.fsencode(folder)) + NAME_BYTES <= MAX_SOCKET_PATH:
            os.environ[SOCKETS] = folder  # vLLM's sockets, too, are where nobody else comes in
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def of_this_server() -> Path | None:
    """None in a trainer's own process."""
    path = os.environ.get(VARIABLE)
    return None if path is None else Path(path)

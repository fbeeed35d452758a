"""A folder shared by all processes of one server, and by no others. It is deleted when the server ends.

Invariant: the path of a socket in it is short enough if the paths of vLLM's own sockets are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm import envs

VARIABLE = "ROLLOUT_SERVER_FOLDER"
"""Environment variable with the folder's path. (For an unknown name with the prefix VLLM_, vLLM would log a warning.)
"""

SOCKETS = "VLLM_RPC_BASE_PATH"
MAX_SOCKET_PATH, NAME_BYTES = 107, 37
"""Longest path of a socket, and length of vLLM's socket names, in bytes."""


@contextmanager
def of_a_server() -> Iterator[None]:
    """Create the folder around the first process of a server, before it starts others."""
    with TemporaryDirectory(prefix="vllm-rollout-", dir=envs.VLLM_RPC_BASE_PATH, ignore_cleanup_errors=True) as folder:
        before = {name: os.environ.get(name) for name in (VARIABLE, SOCKETS)}
        os.environ[VARIABLE] = folder
        if len(os.fsencode(folder)) + NAME_BYTES <= MAX_SOCKET_PATH:
            os.environ[SOCKETS] = folder  # vLLM's sockets, too, are not open to other users
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def sessions_mark() -> Path:
    """A file in the server's folder that is there once a session exists, for all processes of the server."""
    folder = of_this_server()
    assert folder is not None  # `vllm-rollout serve` has made it
    return folder / "sessions"


def of_this_server() -> Path | None:
    """Path of the server's folder. None in a trainer's own process."""
    path = os.environ.get(VARIABLE)
    return None if path is None else Path(path)

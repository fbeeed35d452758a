"""Messages between a grader and its processes: four bytes of length, then MessagePack.

Neither side trusts the other: a frame that is too long or no message ends the connection.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Self, TypeVar

import msgspec

from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.grading.values import Trajectory

LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 256 << 20

Message = TypeVar("Message")


class BrokenFrame(Exception):
    """The other side ended, or sent an invalid message."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Order to load a reward function under the name that later jobs use."""

    name: str
    place: str | None = None
    """`package.module:function`."""
    pickled: bytes | None = None
    """A function that has no `place`, pickled by cloudpickle."""


class GradingJob(msgspec.Struct, frozen=True, tag=True):
    name: str
    trajectory: Trajectory
    """The trajectory without its data."""
    data: bytes
    """The trajectory's data as JSON, which has integers of any size."""

    @classmethod
    def of(cls, name: str, trajectory: Trajectory) -> Self:
        """A job for one trajectory. Raises: TypeError or ValueError for data that is no JSON."""
        return cls(name, msgspec.structs.replace(trajectory, data=None), msgspec.json.encode(trajectory.data))

    @property
    def asked(self) -> Trajectory:
        return msgspec.structs.replace(self.trajectory, data=msgspec.json.decode(self.data))


class GradedJob(msgspec.Struct, frozen=True):
    grade: Grade
    left_children: bool = False
    """True if the function left children. They were ended, so a pool that the function keeps is of no use any more."""


def encode(message: Any) -> bytes:
    """A message as a frame. Raises: ValueError for a message that is too long."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a trajectory and its data may have {MAX_FRAME_BYTES >> 20} MiB, got {len(body) >> 20}")
    return LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader, kind: type[Message]) -> Message:
    """Read one message. Raises: BrokenFrame."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise BrokenFrame(f"it announced {length} bytes")
        return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise BrokenFrame(str(error)) from error


def receive(connection: socket.socket, kind: Any) -> Any:
    """Read one message from a socket, and block meanwhile. Raises: BrokenFrame."""
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return msgspec.msgpack.decode(_exactly(connection, length), type=kind)


def _exactly(connection: socket.socket, num_bytes: int) -> bytearray:
    gathered = bytearray()
    while len(gathered) < num_bytes:
        part = connection.recv(min(1 << 20, num_bytes - len(gathered)))
        if not part:
            raise BrokenFrame("the other side ended")
        gathered += part
    return gathered

"""One client in a process of its own: `python -m benchmarks.front_end.clients WAY PORT GROUPS SEED` prints JSON.

  rollouts  one POST /v1/rollouts: 8 of 16
  wait      one request of n=16 per group, all awaited
  stream    16 streams per group; when 8 have ended the others are closed
  close     16 plain requests per group; when 8 have ended the others' sockets are closed
  join      16 plain requests per group that name their group; the engine ends 8 of them

The last three are as cheap as a client can be: raw sockets, and nothing is parsed but the end.
"""

from __future__ import annotations

import http.client
import json
import os
import resource
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from benchmarks.common import raise_file_limit
from benchmarks.front_end.workload import (
    FIRST_SEED,
    GROUP_SIZE,
    MAX_TOKENS,
    NUM_CANDIDATES,
    lengths_of,
    prompts_of,
    seed_of,
)

Way = Literal["rollouts", "wait", "stream", "close", "join"]
WAYS: tuple[Way, ...] = get_args(Way)
TIMEOUT_S = 1800
TAIL_BYTES = 1024
READ_BYTES = 1 << 18
NAP_S = 0.005
"""Seconds between two reads of the sockets, so that one wake-up serves many messages."""
END = b'"completion_tokens":'
JOIN = {"rollout_group_size": GROUP_SIZE, "rollout_num_candidates": NUM_CANDIDATES}
LOST = b'"finish_reason":"abort"'


class Got(NamedTuple):
    """One group at the client: its seconds, and the length of each candidate, by index where the index is known."""

    seconds: float
    lengths: list[int]


def main() -> None:
    way, port, num_groups, seed = sys.argv[1:]
    print(json.dumps(run(_way(way), int(port), prompts_of(int(num_groups), int(seed)))))


def _way(name: str) -> Way:
    if name not in WAYS:
        raise ValueError(f"way must be one of {', '.join(WAYS)}, got {name!r}")
    return name


def run(way: Way, port: int, prompts: list[list[int]]) -> dict[str, Any]:
    raise_file_limit(NUM_CANDIDATES * len(prompts) + 256)
    started = time.perf_counter()
    if way == "rollouts":
        got = rollouts(port, prompts)
    else:
        got = Sockets(way, port, prompts).race()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    expected = [sorted(lengths)[:GROUP_SIZE] for lengths in lengths_of(prompts)]
    return {
        "wall_s": max(group.seconds for group in got) - started,
        "client_cpu_s": usage.ru_utime + usage.ru_stime,
        "groups_of_shortest": sum(
            sorted(group.lengths)[:GROUP_SIZE] == wanted for group, wanted in zip(got, expected, strict=True)
        ),
    }


def rollouts(port: int, prompts: list[list[int]]) -> list[Got]:
    body = {
        "prompts": [{"prompt_token_ids": prompt} for prompt in prompts],
        "group_size": GROUP_SIZE,
        "redundancy": NUM_CANDIDATES - GROUP_SIZE,
        "sampling_params": {"seed": FIRST_SEED, "max_tokens": MAX_TOKENS},
        "include": [],
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("POST", "/v1/rollouts", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    ended = time.perf_counter()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {answer[:500]!r}")
    groups = json.loads(answer)["groups"]
    return [Got(ended, [trajectory["num_tokens"] for trajectory in group["trajectories"]]) for group in groups]


@dataclass(slots=True)
class _Open:
    socket: socket.socket
    group: int
    tail: bytes = b""


@dataclass(slots=True)
class _Group:
    sockets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    ended: float = 0.0


class Sockets:
    """Many requests at once, each on a socket of its own."""

    def __init__(self, way: Way, port: int, prompts: list[list[int]]) -> None:
        self._way = way
        self._port = port
        self._run = os.urandom(4).hex()
        self._poll = select.epoll()
        self._open: dict[int, _Open] = {}
        self._groups = [_Group() for _ in prompts]
        for group, prompt in enumerate(prompts):
            for index in range(1 if way == "wait" else NUM_CANDIDATES):
                self._send(group, self._body(prompt, group, index))

    def race(self) -> list[Got]:
        left = len(self._groups)
        while left:
            for fd, _ in self._poll.poll(1.0):
                if fd in self._open and self._has_ended(fd):
                    left -= self._end(fd)
            time.sleep(NAP_S)
        return [Got(group.ended, group.lengths) for group in self._groups]

    def _body(self, prompt: list[int], group: int, index: int) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "seed": seed_of(group) + index, "return_token_ids": True}
        if self._way == "wait":
            return {**body, "n": NUM_CANDIDATES}
        if self._way == "stream":
            return {**body, "stream": True, "stream_options": {"include_usage": True}}
        if self._way == "join":
            return {**body, "vllm_xargs": {"rollout_group_id": f"{self._run}-{group}", **JOIN}}
        return body

    def _send(self, group: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
        )
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.sendall(head.encode() + data)
        sock.setblocking(False)
        self._open[sock.fileno()] = _Open(sock, group)
        self._groups[group].sockets.append(sock.fileno())
        self._poll.register(sock, select.EPOLLIN)

    def _has_ended(self, fd: int) -> bool:
        """Read what has arrived. Returns True if the request has ended. Ways `wait` and `join` keep all of it."""
        item = self._open[fd]
        try:
            while data := item.socket.recv(READ_BYTES):
                item.tail += data
                if self._way not in ("wait", "join"):
                    item.tail = item.tail[-TAIL_BYTES:]
        except BlockingIOError:
            return self._way == "stream" and b"data: [DONE]" in item.tail
        if END not in item.tail:
            raise RuntimeError(f"a connection was closed without an answer: {item.tail[-300:]!r}")
        return True

    def _end(self, fd: int) -> bool:
        """Take an answer. Returns True if its group is complete now."""
        item = self._open[fd]
        self._close(fd)
        group = self._groups[item.group]
        if self._way == "wait":
            choices = json.loads(item.tail.split(b"\r\n\r\n", 1)[1])["choices"]
            group.lengths = [len(choice["token_ids"]) for choice in choices]
        elif LOST in item.tail:
            return False
        else:
            number = item.tail.rsplit(END, 1)[1]
            group.lengths.append(int(number.split(b",")[0].split(b"}")[0]))
            if len(group.lengths) < GROUP_SIZE:
                return False
            for other in group.sockets if self._way != "join" else ():
                if other in self._open:
                    self._close(other)
        group.ended = time.perf_counter()
        return True

    def _close(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._open.pop(fd).socket.close()


if __name__ == "__main__":
    main()

"""Aborts by name reach every API process of a server, and no process waits for another one."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.waiting import eventually
from vllm_rollout.parts.front_ends.api.abort_broadcast import AbortBroadcast
from vllm_rollout.parts.front_ends.api.part import FrontEndsApi

MANY = {f"rollout-{number:060}" for number in range(4096)}
"""More than a socket takes at once."""


async def listening(folder: Path, num: int) -> tuple[list[AbortBroadcast], list[set[str]]]:
    """Processes of one server, and the names that each of them has heard."""
    heard: list[set[str]] = [set() for _ in range(num)]
    processes = [AbortBroadcast(folder, number, heard[number].update) for number in range(num)]
    for process in processes:
        await process.listen()
    return processes, heard


async def test_each_process_hears_of_every_abort(tmp_path: Path) -> None:
    processes, heard = await listening(tmp_path, 3)
    processes[1].send({"a"})
    assert heard[1] == {"a"}
    processes[2].send(MANY)
    await eventually(lambda: heard == [{"a", *MANY}] * 3)


@pytest.mark.parametrize("any_moves", [True, False])
async def test_a_process_aborts_what_was_between_two_ranks_when_it_heard(any_moves: bool) -> None:
    aborted, heard = [], []

    async def abort_groups(names: set[str]) -> None:
        aborted.append(names)

    client = SimpleNamespace(routes=SimpleNamespace(any_moves=any_moves), abort_groups=abort_groups)
    part = FrontEndsApi(SimpleNamespace(client=client))
    part._abort_here = heard.append
    part._heard({"a"})
    await asyncio.sleep(0)
    assert (heard, aborted) == ([{"a"}], [{"a"}] if any_moves else [])


async def test_a_process_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    processes, heard = await listening(tmp_path, 2)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "aborts2.sock"))
        deaf.listen()
        processes[0].send(MANY)
        await eventually(lambda: heard == [MANY] * 2)


async def test_a_process_that_has_ended_is_passed_over_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    processes, heard = await listening(tmp_path, 2)
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(tmp_path / "aborts2.sock"))
    with caplog.at_level(logging.ERROR):
        processes[0].send({"a"})
        await eventually(lambda: "abort for another process failed" in caplog.text)
    await eventually(lambda: heard == [{"a"}] * 2)


async def test_after_a_process_that_ends_amid_its_message_the_next_abort_is_heard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    processes, heard = await listening(tmp_path, 2)
    _, writer = await asyncio.open_unix_connection(tmp_path / "aborts1.sock")
    with caplog.at_level(logging.ERROR):
        writer.write(b'["a"')
        writer.close()
        await eventually(lambda: "abort of another process failed" in caplog.text)
    processes[0].send({"b"})
    await eventually(lambda: heard == [{"b"}] * 2)

"""Tasks beside the one that begins them: none dies unheard, and no loop ends by an exception."""

from __future__ import annotations

import ast
import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from vllm_rollout import background
from vllm_rollout.background import begin, heard, spawn, survived, to_its_end

PACKAGE = Path(__file__).parents[1] / "vllm_rollout"
BEGIN = {"create_task", "ensure_future"}


class Refused(Exception):
    """An answer."""


@pytest.fixture
def counted() -> Iterator[list[str]]:
    names: list[str] = []
    before = background._count
    background.count_with(names.append)
    background.num_errors.clear()
    yield names
    background._count = before
    background.num_errors.clear()


async def fails(error: Exception, ready: asyncio.Event | None = None) -> None:
    if ready is not None:
        await ready.wait()
    raise error


async def test_what_nobody_awaits_is_logged_and_counted(counted, caplog):
    await spawn(fails(ValueError("this")), "work")
    assert counted == ["work"]
    (record,) = caplog.records
    assert "work failed" in record.getMessage()
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "this"


async def test_a_loop_goes_on_and_does_not_fill_the_log(counted, caplog):
    num_turns = 0

    async def loop() -> None:
        nonlocal num_turns
        while num_turns < 100:
            with survived("loop"):
                num_turns += 1
                raise KeyError(num_turns)

    await spawn(loop(), "loop")
    assert (num_turns, len(counted)) == (100, 100)
    assert len(caplog.records) == 7, "of 1, 2, 4, … 64"


async def test_one_that_is_cancelled_is_no_error(counted, caplog):
    task = spawn(asyncio.Event().wait(), "work")
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert (task.cancelled(), counted, caplog.records) == (True, [], [])


async def test_who_awaits_hears_it_and_nobody_else(counted, caplog):
    with pytest.raises(ValueError, match="this"):
        await to_its_end(fails(ValueError("this")), "work")
    with pytest.raises(ValueError, match="that"):
        await heard(begin(fails(ValueError("that"))), "work")
    assert (counted, caplog.records) == ([], [])


@pytest.mark.parametrize(("error", "num"), [(ValueError("this"), 1), (Refused("rank 0 is the last one"), 0)])
async def test_the_end_of_work_whose_client_has_left_is_said_once(error, num, counted, caplog):
    """Not as asyncio says it, when the task is collected."""
    ready = asyncio.Event()
    waiter = asyncio.create_task(to_its_end(fails(error, ready), "a drain", refusals=(Refused,)))
    await asyncio.sleep(0)
    waiter.cancel()
    with suppress(asyncio.CancelledError):
        await waiter
    ready.set()
    await eventually(lambda: bool(caplog.records), every_s=0.001)
    for _ in range(3):
        await asyncio.sleep(0)
    (record,) = caplog.records
    assert record.getMessage().startswith("vllm_rollout: a drain")
    assert record.levelno == (logging.ERROR if num else logging.WARNING)
    assert len(counted) == num


def unheard(source: str) -> list[int]:
    """Lines that begin a task by asyncio's own means which the same function does not await."""
    found = []

    def visit(node: ast.AST, function: ast.AST | None) -> None:
        for child in ast.iter_child_nodes(node):
            if is_beginning(child) and not (function is not None and is_awaited(child, function)):
                found.append(child.lineno)
            inner = child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else function
            visit(child, inner)

    visit(ast.parse(source), None)
    return found


def is_beginning(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="asyncio"), attr=name)) | ast.Call(func=ast.Name(id=name)):
            return name in BEGIN
    return False


def is_awaited(beginning: ast.AST, function: ast.AST) -> bool:
    """It stands in an `await`, or in a statement that gives it to a local name which stands in one."""
    awaits = [node for node in ast.walk(function) if isinstance(node, ast.Await)]
    if any(beginning in ast.walk(each) for each in awaits):
        return True
    in_awaits = {node.id for each in awaits for node in ast.walk(each) if isinstance(node, ast.Name)}
    for statement in ast.walk(function):
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr) and beginning in ast.walk(statement):
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    return name in in_awaits
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="add" | "append"))):
                    return name in in_awaits
    return False


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("asyncio.create_task(work())", [2]),
        ("self.task = asyncio.create_task(work())", [2]),
        ("task = asyncio.create_task(work())\n    self.task = task", [2]),
        ("task = ensure_future(work())\n    task.add_done_callback(tell)", [2]),
        ("return lambda: asyncio.ensure_future(work())", [2]),
        ("task = asyncio.create_task(work())\n    await asyncio.wait([task])", []),
        ("tasks = [asyncio.ensure_future(each) for each in work]\n    await asyncio.gather(*tasks)", []),
        ("tasks.add(asyncio.create_task(work()))\n    await asyncio.wait(tasks)", []),
        ("await asyncio.shield(asyncio.create_task(work()))", []),
    ],
)
def test_a_task_that_its_function_does_not_await_is_found(body, lines):
    assert unheard(f"async def f(self):\n    {body}\n") == lines


def test_tasks_that_nobody_awaits_are_begun_by_one_helper():
    """`background.begin` where its owner awaits it, else `spawn`, `heard` or `to_its_end`."""
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "background.py"]
    assert {f"{path.relative_to(PACKAGE)}:{line}" for path in files for line in unheard(path.read_text())} == set()

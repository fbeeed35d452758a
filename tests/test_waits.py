"""Every test ends: waits have bounds, and a test that hangs all the same ends the run with its name."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import WAIT_S

TESTS = Path(__file__).parent
HANGS = {
    "sleeps": "import time\ndef test_hangs(): time.sleep(1000)",
    "waits for a thread": (
        "import concurrent.futures as f, time\n"
        "def test_hangs(): f.ThreadPoolExecutor().submit(time.sleep, 1000).result()"
    ),
    "waits in a loop": (
        "import asyncio, pytest\n@pytest.mark.anyio\nasync def test_hangs(): await asyncio.Event().wait()"
    ),
    "holds the lock": "import ctypes\ndef test_hangs(): ctypes.PyDLL(None).sleep(1000)",
}
"""Modules with a test that hangs."""


def unbounded_waits(source: str) -> list[int]:
    """Lines of loops that only sleep outside of `asyncio.timeout`, and of waits for processes and threads without one.

    Tests use `eventually` and `wait_until` of tests/support/waiting.py.
    """
    nodes = list(ast.walk(ast.parse(source)))
    blocks = [node for node in nodes if isinstance(node, ast.AsyncWith) and "timeout(" in ast.unparse(node.items[0])]
    bounded = {loop for block in blocks for loop in ast.walk(block)}
    return [node.lineno for node in nodes if (is_only_sleep(node) and node not in bounded) or is_unbounded_call(node)]


def is_only_sleep(node: ast.AST) -> bool:
    return isinstance(node, ast.While) and all(
        isinstance(statement, ast.Expr) and "sleep(" in ast.unparse(statement) for statement in node.body
    )


def is_unbounded_call(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name, named = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
    is_join = name.endswith(".join") and not node.args
    return (name == "subprocess.run" or is_join) and "timeout" not in named


def test_no_test_waits_without_a_bound():
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in unbounded_waits(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("while not done:\n    time.sleep(1)", [1]),
        ("async def f():\n    while True:\n        await asyncio.sleep(0)", [2]),
        ("async def f():\n    async with asyncio.timeout(9):\n        while True:\n            await sleep(0)", []),
        ("while not done:\n    assert clock() < deadline\n    time.sleep(1)", []),
        ("subprocess.run(command)", [1]),
        ("subprocess.run(command, timeout=9)", []),
        ("thread.join()", [1]),
        ("thread.join(9), ', '.join(words)", []),
    ],
)
def test_the_rule_tells_bounded_waits_from_others(source: str, lines: list[int]):
    assert unbounded_waits(source) == lines


@pytest.mark.thorough
@pytest.mark.parametrize("hang", HANGS)
def test_a_test_that_hangs_ends_the_run_with_its_name(tmp_path: Path, hang: str):
    (tmp_path / "test_planted.py").write_text(HANGS[hang])
    setting = "faulthandler_timeout=1" if hang == "holds the lock" else "timeout=1"
    settings = ["-c", "pyproject.toml", "-p", "tests.conftest", "-o", setting]
    command = [sys.executable, "-m", "pytest", *settings, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, timeout=WAIT_S)
    assert done.returncode == 1
    assert "test_hangs" in done.stdout + done.stderr

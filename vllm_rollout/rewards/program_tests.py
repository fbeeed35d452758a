"""One test of a program in the sandbox, as a grading process runs it.

Two kinds are compared outside of the sandbox, where the program cannot lie: `{"input", "output"}`, and Python that is
only `assert EXPRESSION == LITERAL`: the program's side says what the expression is, and never sees the literal. Any
other Python runs beside the program and ends with a word that was read before the program began.
"""

from __future__ import annotations

import ast
import secrets
from typing import Any, NamedTuple

import msgspec

from vllm_rollout.rewards.sandbox import Bubblewrap, ProgramRun, RunEnd, Sandbox, SandboxBounds

MAX_SHOWN = 16
"""Times as long as what is wanted what a program says instead may be, beyond `SHOWN_BYTES`: longer is not equal."""
SHOWN_BYTES = 4096


class InputOutput(msgspec.Struct, frozen=True):
    input: str
    output: str


class TestJob(msgspec.Struct, frozen=True, tag=True):
    """One run of a program."""

    __test__ = False

    program: str
    test: str | InputOutput
    limit_s: float
    bounds: SandboxBounds


class TestRun(msgspec.Struct, frozen=True):
    __test__ = False

    end: RunEnd
    has_passed: bool
    seconds: float
    failure: str | None = None
    """Why the program was not started, which is not its fault."""


class _Asked(NamedTuple):
    """`assert EXPRESSION == LITERAL`, once or several times."""

    expression: str
    wanted: Any


PREPARE = """
import os, sys, types
def prepared():
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with open("/program/answer.py") as file: answer = file.read()
    sys.modules["answer"] = module = types.ModuleType("answer")
    exec(compile(answer, "answer.py", "exec"), vars(module))
    return vars(module)
"""
WITH_WORD = """
def run():
    word = sys.stdin.readline()
    exec(compile(TEST, "test.py", "exec"), prepared())
    print("\\n" + word, end="")
run()
"""
"""Prints the word from its standard input when the test has passed: a program that ends itself early has not."""
WITH_VALUE = """
def plain(value):
    if hasattr(value, "tolist"): value = value.tolist()
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind): return kind(value)
    if isinstance(value, dict): return {plain(name): plain(each) for name, each in value.items()}
    for kind in (tuple, list, set, frozenset):
        if isinstance(value, kind): return set(map(plain, value)) if kind is frozenset else kind(map(plain, value))
    return value
value = plain(eval(compile(TEST, "test.py", "eval"), prepared()))
print("\\n" + repr(value))
"""
"""Prints the value; numpy's, and subclasses, as what they are equal to."""


async def run_test(job: TestJob) -> TestRun:
    run, has_passed = await _run(Sandbox(Bubblewrap(), job.bounds), job)
    return TestRun(run.end, has_passed and run.end == "exited" and run.code == 0, run.seconds)


async def _run(sandbox: Sandbox, job: TestJob) -> tuple[ProgramRun, bool]:
    """Whether what it printed is right, however it ended."""
    if isinstance(job.test, InputOutput):
        run = await sandbox.run({"main.py": job.program}, job.test.input.encode(), job.limit_s)
        return run, same_output(run.output.decode(errors="replace"), job.test.output)
    asked = _compared_outside(job.test)
    word = secrets.token_hex(16)
    test, harness = (asked.expression, WITH_VALUE) if asked else (job.test, WITH_WORD)
    files = {"main.py": f"TEST = {test!r}\n{PREPARE}{harness}", "answer.py": job.program}
    run = await sandbox.run(files, f"{word}\n".encode(), job.limit_s)
    printed = run.output.decode(errors="replace").rstrip()
    return run, same_value(printed.rpartition("\n")[2], asked.wanted) if asked else printed.endswith(word)


def _compared_outside(test: str) -> _Asked | None:
    """What to ask of the program and what it must be, if all that the test does is to compare with literals."""
    expressions, wanted = [], []
    try:
        for statement in ast.parse(test).body:
            match statement:
                case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
                    wanted.append(ast.literal_eval(right))
                    expressions.append(ast.unparse(left))
                case _:
                    return None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return _Asked(f"[{', '.join(expressions)}]", wanted) if expressions else None


def same_value(printed: str, wanted: Any) -> bool:
    """Whether that is a literal, and equal. A long one is not read: a parser can be made to take all memory."""
    if len(printed) > SHOWN_BYTES + MAX_SHOWN * len(repr(wanted)):
        return False
    try:
        return bool(ast.literal_eval(printed) == wanted)
    except Exception:  # the text is a stranger's: whatever reading it raises, it is not equal
        return False


def same_output(printed: str, wanted: str) -> bool:
    """Line by line, spaces at the ends of lines and empty lines at the end apart."""
    return [line.rstrip() for line in printed.rstrip().splitlines()] == [
        line.rstrip() for line in wanted.rstrip().splitlines()
    ]

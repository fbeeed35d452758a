"""One test of a program in the sandbox, as a grading process runs it.

Two kinds of test are compared outside of the sandbox, where the program cannot lie. One is `{"input", "output"}`. The
other is Python that is only `assert EXPRESSION == LITERAL`: the sandbox prints the expression's value and never gets
the literal.

Any other Python runs beside the program. At its end it prints a word that it read before the program began.
"""

from __future__ import annotations

import ast
import secrets
from typing import Any, NamedTuple

import msgspec

from vllm_rollout.parts.rewards.grading.sandbox import Bubblewrap, ProgramRun, RunEnd, Sandbox, SandboxBounds

MAX_SHOWN = 16
"""Factor on the wanted text's length: printed text longer than that, plus `SHOWN_BYTES`, is not equal."""
SHOWN_BYTES = 4096


class InputOutput(msgspec.Struct, frozen=True):
    input: str
    output: str


class TestJob(msgspec.Struct, frozen=True, tag=True):
    """One test of a program."""

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
    """Reason why the program was not started, which is not the program's fault."""


class _Asked(NamedTuple):
    """Expressions of `assert EXPRESSION == LITERAL` as one list, and the wanted values."""

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
    print("\\n" + word, end="", flush=True)
run()
os._exit(0)
"""
"""Prints the word from standard input if the test has passed. A program that ends itself early does not pass."""
WITH_VALUE = """
import collections.abc, numbers
def plain(value):
    if hasattr(value, "tolist"): value = value.tolist()
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind): return kind(value)
    if isinstance(value, dict): return {plain(name): plain(each) for name, each in value.items()}
    for kind in (tuple, list, set, frozenset):
        if isinstance(value, kind): return set(map(plain, value)) if kind is frozenset else kind(map(plain, value))
    if isinstance(value, collections.abc.Set): return set(map(plain, value))
    if isinstance(value, numbers.Number):
        for kind in (int, float):
            if kind(value) == value: return kind(value)
    return value
value = plain(eval(compile(TEST, "test.py", "eval"), prepared()))
print("\\n" + repr(value), flush=True)
os._exit(0)
"""
"""Prints the value. Values of numpy, of subclasses and fractions are printed as the plain values that they are equal
to."""


async def run_test(job: TestJob) -> TestRun:
    run, has_passed = await _run(Sandbox(Bubblewrap(), job.bounds), job)
    return TestRun(run.end, has_passed and run.end == "exited" and run.code == 0, run.seconds)


async def _run(sandbox: Sandbox, job: TestJob) -> tuple[ProgramRun, bool]:
    """Run a test. Returns the run, and True if its output is right, however it ended."""
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
    """Expressions and wanted values of a test that only compares with literals. None for other tests."""
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
    """True if the text is a literal equal to `wanted`. A long text is not parsed, since parsing could take all
    memory."""
    if len(printed) > SHOWN_BYTES + MAX_SHOWN * len(repr(wanted)):
        return False
    try:
        return bool(ast.literal_eval(printed) == wanted)
    except Exception:  # the text is a program's: if reading it fails, it is not equal
        return False


def same_output(printed: str, wanted: str) -> bool:
    """True if all lines are equal. Spaces at the ends of lines and empty lines at the end do not count."""
    return [line.rstrip() for line in printed.rstrip().splitlines()] == [
        line.rstrip() for line in wanted.rstrip().splitlines()
    ]

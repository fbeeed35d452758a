"""The reward `code`: the program in an answer, run against the tests of its prompt in a sandbox.

`data` is `{"tests": [...]}`. A test is Python that raises when it fails, or `{"input": "…", "output": "…"}`: what the
program reads and prints. The reward is 1 when all pass, else 0; with `"partial": true` the share that passes.

Invariant: each test is a run of its own, with the time limit of its own test case.
"""

from __future__ import annotations

import re
import secrets

import msgspec

from vllm_rollout.group.rewards.time_limits import TimeLimits
from vllm_rollout.rewards.sandbox import ProgramRun, RunEnd, Sandbox
from vllm_rollout.rewards.values import Grade, Trajectory, case_of, failed

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
MAX_TESTS = 1000
HARNESS = """
import os, sys
def run():
    word = sys.stdin.readline()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with open("/program/answer.py") as file: answer = file.read()
    exec(compile(answer, "answer.py", "exec"), scope := {"__name__": "answer"})
    exec(compile(TEST, "test.py", "exec"), scope)
    print("\\n" + word, end="")
run()
"""
"""Prints the word from its standard input when the test has passed: a program that ends itself early has not."""


HOW_IT_ENDED: dict[RunEnd, str] = {
    "exited": "it raised, printed something else or ended itself",
    "timeout": "it took too long",
    "memory": "it used too much memory",
    "output": "it printed too much",
}


class InputOutput(msgspec.Struct, frozen=True):
    input: str
    output: str


class Tests(msgspec.Struct, frozen=True):
    tests: list[str | InputOutput]
    partial: bool = False


class CodeReward:
    """Grades programs, one test after the other."""

    def __init__(self, sandbox: Sandbox, limits: TimeLimits) -> None:
        self._sandbox, self._limits = sandbox, limits

    async def grade(self, trajectory: Trajectory, longest_s: float) -> Grade:
        try:
            tests = msgspec.convert(trajectory.data, Tests)
            if not 1 <= len(tests.tests) <= MAX_TESTS:
                raise ValueError(f"it has {len(tests.tests)} tests; allowed are 1 to {MAX_TESTS}")
        except (msgspec.ValidationError, ValueError) as error:
            return failed(f'`code` needs "data": {{"tests": [...]}}: {error}')
        program = program_of(trajectory.text)
        if program is None:
            return Grade("ok", 0.0, reason="there is no program in the answer")
        num_passed, seconds, reason = 0, 0.0, None
        for test in tests.tests:
            case = case_of(trajectory, msgspec.json.encode(test))
            limit_s = min(self._limits.limit_s(case), longest_s)
            run, passed = await self._run(program, test, limit_s)
            seconds += run.seconds
            self._limits.observe(case, run.seconds, is_correct=passed)
            if run.end == "timeout" and not tests.partial:
                return Grade("timeout", 0.0, f"a test took more than {limit_s:.3g} s", seconds=seconds)
            num_passed += passed
            if not passed:
                reason = reason or f"a test failed: {HOW_IT_ENDED[run.end]}"
                if not tests.partial:
                    break
        share = num_passed / len(tests.tests)
        reward = share if tests.partial else float(share == 1)
        return Grade("ok", reward, reason, {"passed": share}, seconds)

    async def _run(self, program: str, test: str | InputOutput, limit_s: float) -> tuple[ProgramRun, bool]:
        if isinstance(test, InputOutput):
            run = await self._sandbox.run({"main.py": program}, test.input.encode(), limit_s)
            passed = (
                run.end == "exited" and run.code == 0 and same_output(run.output.decode(errors="replace"), test.output)
            )
            return run, passed
        word = secrets.token_hex(16)
        harness = f"TEST = {test!r}\n{HARNESS}"
        run = await self._sandbox.run({"main.py": harness, "answer.py": program}, f"{word}\n".encode(), limit_s)
        return run, run.end == "exited" and run.code == 0 and run.output.rstrip().endswith(word.encode())


def program_of(text: str) -> str | None:
    """The last fenced block, else the whole text when it compiles as Python."""
    if blocks := FENCED.findall(text):
        return str(blocks[-1])
    try:
        compile(text, "answer.py", "exec")
    except (SyntaxError, ValueError):
        return None
    return text


def same_output(printed: str, wanted: str) -> bool:
    """Line by line, spaces at the ends of lines and empty lines at the end apart."""
    return [line.rstrip() for line in printed.rstrip().splitlines()] == [
        line.rstrip() for line in wanted.rstrip().splitlines()
    ]

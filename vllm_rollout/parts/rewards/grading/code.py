"""The reward `code`: the program in an answer, run against the tests of its prompt in a sandbox.

`data` is `{"tests": [...]}`. A test is Python that raises if it fails, or `{"input": "…", "output": "…"}`: the
program's input and output. The reward is 1 if all tests pass, else 0. With `"partial": true` it is the share of tests
that pass.

Invariant: each test is a run of its own, with the time limit of its own test case.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import msgspec

from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.grading.program_tests import InputOutput, TestJob, TestRun
from vllm_rollout.parts.rewards.grading.sandbox import RunEnd, SandboxBounds
from vllm_rollout.parts.rewards.grading.values import Trajectory, case_of, failed
from vllm_rollout.parts.rewards.rules.time_limits import TimeLimits

FENCED = re.compile(r"^[^\n`]*```[ \t]*([\w+.-]*+)[^\n`]*+\n(.*?)```", re.DOTALL | re.MULTILINE)
"""A block with its language. All blocks are found, so that the end of a block is not taken for a beginning."""
PYTHON = re.compile(r"(?:py|python)?[\d.]*", re.IGNORECASE)
MAX_TESTS = 1000

HOW_IT_ENDED: dict[RunEnd, str] = {
    "exited": "it raised, printed something else or ended itself",
    "timeout": "it took too long",
    "memory": "it used too much memory",
    "output": "it printed too much",
    "lost": "the process that watched it ended, twice",
}


class Tests(msgspec.Struct, frozen=True):
    tests: list[str | InputOutput]
    partial: bool = False


class CodeReward:
    """Grades programs, one test after the other."""

    def __init__(self, run: Callable[[TestJob], Awaitable[TestRun]], limits: TimeLimits, bounds: SandboxBounds) -> None:
        self._run, self._limits, self._bounds = run, limits, bounds

    async def grade(self, trajectory: Trajectory, longest_s: float) -> Grade:
        try:
            tests = msgspec.convert(trajectory.data, Tests)
            if not 1 <= len(tests.tests) <= MAX_TESTS:
                raise ValueError(f"it has {len(tests.tests)} tests; allowed are 1 to {MAX_TESTS}")
        except (msgspec.ValidationError, ValueError) as error:
            return failed(f'`code` needs "data": {{"tests": [...]}}: {error}')
        program, prompt_case = program_of(trajectory.text), case_of(trajectory)
        num_passed, seconds, reason = 0, 0.0, None
        for test in tests.tests:
            case = case_of(Trajectory(prompt_case, ""), msgspec.json.encode(test))
            limit_s = min(self._limits.limit_s(case), longest_s)
            run = await self._run(TestJob(program, test, limit_s, self._bounds))
            seconds += run.seconds
            self._limits.observe(case, run.seconds, is_correct=run.has_passed)
            if run.end == "timeout" and not tests.partial:
                return Grade("timeout", 0.0, f"a test took more than {limit_s:.3g} s", seconds=seconds)
            num_passed += run.has_passed
            if not run.has_passed:
                reason = reason or f"a test failed: {HOW_IT_ENDED[run.end]}"
                if not tests.partial:
                    break
        share = num_passed / len(tests.tests)
        reward = share if tests.partial else float(share == 1)
        return Grade("ok", reward, reason, {"passed": share}, seconds)


def program_of(text: str) -> str:
    """The last fenced block of Python, or of no language. Without one, the whole text, which may be a program."""
    blocks = FENCED.findall(text.replace("\r\n", "\n"))
    return next((program for language, program in reversed(blocks) if PYTHON.fullmatch(language)), text)

"""Programs whose results are drawn, for answers of an emulated device, whose text is no program.

Each answer stands for a program that names a digest of the answer's text. The test draws from its own name and that
digest how long the run takes, whether it hangs, and whether it is right. All else is the built-in `code`: its sandbox,
its processes, its time limits.

`python -m benchmarks.rewards.fated serve MODEL …` is `vllm-rollout serve` with such programs.

Invariant: a run has the same result and duration wherever, whenever and however often it is graded.
"""

from __future__ import annotations

import inspect
import random
from hashlib import blake2b
from typing import NamedTuple

from vllm_rollout.parts.rewards.grading import code

FOREVER_S = 86_400
TEST = """
import random, time
{source}
kind, seconds = fate_of({name!r}, answer, {median_s!r}, {sigma!r}, {hanging!r}, {right!r})
time.sleep({forever} if kind == "hangs" else seconds)
assert kind == "right"
"""


class TestCase(NamedTuple):
    """A test of a prompt, and the distribution of its runs."""

    __test__ = False

    name: str
    median_s: float
    sigma: float
    """Standard deviation of a run's log seconds."""
    hanging: float
    """Share of runs that never end."""
    right: float
    """Share of runs that pass, among those that end."""

    @property
    def source(self) -> str:
        """Source of the test, for the field `tests` of the prompt's data."""
        return TEST.format(source=inspect.getsource(fate_of), forever=FOREVER_S, **self._asdict())

    def fate(self, text: str) -> tuple[str, float]:
        """`right`, `wrong` or `hangs`, and the seconds of the run, for the answer with this text."""
        return fate_of(self.name, name_of(text), *self[1:])


def fate_of(name: str, answer: str, median_s: float, sigma: float, hanging: float, right: float) -> tuple[str, float]:
    chance = random.Random(f"{name}/{answer}")
    hangs, is_right = chance.random() < hanging, chance.random() < right
    seconds = median_s * chance.lognormvariate(0, sigma)
    return "hangs" if hangs else "right" if is_right else "wrong", seconds


def name_of(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


def stand_for_programs() -> None:
    """Make `code` take every answer for the program of its digest, from now on in this process."""
    code.program_of = lambda text: f"answer = {name_of(text)!r}"


if __name__ == "__main__":
    from vllm_rollout.cli import app

    stand_for_programs()
    app()

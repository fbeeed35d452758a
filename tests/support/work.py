"""Work as lines of our code that run: it grows as a program does, whatever the host does meanwhile."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from math import log
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).parents[2] / "vllm_rollout")
SLACK_LINES = 300
"""Allowance for work that happens once, or seldom."""


def lines_run(work: Callable[[], object]) -> Counter[str]:
    """By `file::function` of our package. A loop within one line counts each time around."""
    lines: Counter[Any] = Counter()

    def in_function(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            lines[frame.f_code] += 1
        return in_function

    def at_call(frame: FrameType, event: str, argument: object) -> Any:
        return in_function if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        work()
    finally:
        sys.settrace(before)
    named: Counter[str] = Counter()
    for code, num in lines.items():
        named[f"{code.co_filename.removeprefix(PACKAGE)[1:]}::{code.co_qualname}"] += num
    return named


def faster_than_linear(work: Callable[[int], object], small: int, large: int) -> dict[str, tuple[int, int]]:
    """Functions whose lines grow faster than the size by more than a logarithm, with their lines at both sizes."""
    few, many = (lines_run(lambda size=size: work(size)) for size in (small, large))
    assert many, "nothing of ours has run"
    most = 1.5 * (large * log(large)) / (small * log(small))
    return {name: (few[name], num) for name, num in many.items() if num > most * few[name] + SLACK_LINES}

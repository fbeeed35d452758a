"""Rewards without a user's code: `exact`, `regex` and `math`. Each is a plain `f(text, data)`.

`data` is the answer itself, or an object with the answer under `answer` (or `ground_truth`, as in verl's data sets).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from vllm_rollout.checks import shown

ANSWERS = ("answer", "ground_truth")
AN_OBJECT = re.compile(r"""\s*\{\s*["']""")
"""Beginning of a text that is meant as an object. Other texts, such as [0, 1), may be an answer."""


def exact(text: str, data: Any) -> float:
    """1 if the text is the answer. Spaces around it do not count."""
    return float(text.strip() == answer_of(data).strip())


def regex(text: str, data: Any) -> float:
    """1 if the pattern is found. If it has a group `answer` and `data` has an answer, the group must be that answer."""
    if not isinstance(data, Mapping) or not isinstance(data.get("pattern"), str):
        raise ValueError('`regex` needs "data": {"pattern": "…"}, and may have an "answer" for the group ?P<answer>')
    found = re.search(data["pattern"], text)
    if found is None:
        return 0.0
    named = found.groupdict().get("answer")
    return 1.0 if named is None else float(named.strip() == answer_of(data).strip())


def math(text: str, data: Any) -> float:
    """1 if text and answer have the same number or expression (`pip install math-verify`).

    The package's own time limits are off: they need a main thread, and the process that runs this has a limit anyway.
    """
    from math_verify import parse, verify  # an optional package

    gold = answer_of(data)
    boxed = gold if "\\boxed" in gold or "$" in gold else f"${gold}$"
    wanted = parse(boxed, parsing_timeout=None)
    if not wanted:
        raise ValueError(f"math-verify finds no answer in {shown(gold)}")
    return float(verify(wanted, parse(text, parsing_timeout=None), timeout_seconds=None))


def answer_of(data: Any) -> str:
    """The answer in `data`. Raises: ValueError if there is none."""
    is_object = isinstance(data, str) and AN_OBJECT.match(data)
    if isinstance(data, Mapping):
        data = next((data[name] for name in ANSWERS if name in data), None)
    if isinstance(data, bool) or not isinstance(data, str | int | float) or is_object:
        raise ValueError(f'the prompt needs "data": {{"answer": "…"}}, got {shown(data)}')
    return format(Decimal(repr(data)), "f") if isinstance(data, float) else str(data)  # never 1e-05

"""verl's reward functions, graded by our grader. Runs in verl's environment."""

from __future__ import annotations

import json
from typing import Any

from conformance.checks import Kit, check
from conformance.grading import Case, assert_same
from vllm_rollout.rewards import Trajectory

SCORES = "verl.utils.reward_score"
DOUBLE = json.dumps({"inputs": ["1\n", "4\n"], "outputs": ["2\n", "8\n"]})
ANSWERS: dict[str, tuple[Any, list[str]]] = {
    "openai/gsm8k": ("42", ["so #### 42", "#### 41", "42"]),
    "lighteval/MATH": ("\\frac{1}{3}", ["\\boxed{\\frac13}", "\\boxed{0.5}", "no"]),
    "math_dapo": ("42", ["Answer: 42", "Answer: 41", "no"]),
    "numina_olympiads": ("42", ["\\boxed{42}", "\\boxed{41}", "no"]),
    "searchR1_nq": ({"target": ["Paris"]}, ["<answer>Paris</answer>", "<answer>Rome</answer>", "Paris"]),
    "codecontests": (DOUBLE, ["```python\nprint(int(input()) * 2)\n```", "```python\nprint(2)\n```", "no"]),
    "of a user": ("42", ["42"]),
}
"""Data source -> true answer, and answers of a policy."""


def case(place: str, text: str, row: dict[str, Any], **arguments: Any) -> Case:
    return Case(place, Trajectory([{"role": "user", "content": "How many?"}], text, row), arguments)


@check("unmodified")
def compute_score_grades_as_it_is(kit: Kit) -> dict[str, Any]:
    """`default_compute_score` with rows as verl's data sets have them, and the functions of each data source."""
    extra: dict[str, Any] = {"extra_info": {"index": 3}}
    cases = [
        case(
            f"{SCORES}:default_compute_score",
            text,
            {"data_source": source, "reward_model": {"style": "rule", "ground_truth": truth}, **extra},
            data_source=source,
            solution_str=text,
            ground_truth=truth,
            **extra,
        )
        for source, (truth, texts) in ANSWERS.items()
        for text in texts
    ]
    cases += [
        case(f"{SCORES}.{module}:compute_score", text, {"ground_truth": "42"}, solution_str=text, ground_truth="42")
        for module in ("gsm8k", "math_reward", "math_dapo")
        for text in ("#### 42", "\\boxed{42}", "Answer: 42", "no")
    ]
    return {
        "detail": f"{assert_same(cases)}. The error is verl's, of a data source that it does not know; the rewards of "
        "math_dapo are the `score` of its dictionaries"
    }

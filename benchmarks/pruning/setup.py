"""Questions and sizes of `benchmarks.pruning`. Invariant: no evaluated question was learned from."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from benchmarks.long_run import size
from benchmarks.tasks import EARLY, FAMILIES, Problem, check, make_problems
from vllm_rollout.kernel.http.answers import Trajectory

Phase = Literal["learn", "evaluate", "compare", "sweep", "fewer"]
PHASES: tuple[Phase, ...] = get_args(Phase)

REAL = "qwen2.5-coder-0.5b-instruct"
TINY = "tiny-random"
TINY_PROMPT_TOKENS = 12
TINY_SAMPLING = {"allowed_token_ids": [2, *range(16, 24)], "min_tokens": 32}
"""Eight tokens and the end: few enough for a head to learn their parity from hundreds of labels (AUC about 0.8, and
0.55 from the state of the step before or after).
"""


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def family_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(FAMILIES):
        raise argparse.ArgumentTypeError(f"must be some of {','.join(FAMILIES)}, got {','.join(sorted(unknown))}")
    return names


class Question(NamedTuple):
    """One prompt, and the function that judges its answers."""

    text: str
    """Identity of the question: questions with the same text are the same."""
    prompt: Mapping[str, Any]
    judge: Callable[[Trajectory], bool]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the model, the phases and the groups, which are also options of the command line."""

    model: str = size(REAL, "a name of `vllm-rollout models list`, a Hugging Face name or a directory")
    families: tuple[str, ...] = size(EARLY, "problem families of benchmarks/tasks.py, comma-separated", family_names)
    seed: int = size(7, "seed of problems and sampling")
    max_tokens: int = size(256, "length cap of an answer", positive)
    temperature: float = size(1.0, "temperature of sampling")
    detection_length: int = size(8, "tokens after which a candidate is scored", positive)
    at_once: int = size(96, "candidates that run at once: the server's --max-num-seqs", positive)
    labels: int = size(4000, "learn: accepted rewards after which it ends", positive)
    learn_group_size: int = size(8, "learn and evaluate: candidates per prompt", positive)
    learn_prompts: int = size(6, "learn: prompts per request; requests overlap", positive)
    window: int = size(500, "learn: labels per point of the learning curve", positive)
    evaluate_prompts: int = size(120, "evaluate: prompts", positive)
    vote_prompts: int = size(24, "evaluate: prompts of larger groups", positive)
    vote_candidates: int = size(32, "evaluate: candidates of each larger group", positive)
    group_size: int = size(16, "compare, sweep: candidates per prompt", positive)
    blocks: int = size(8, "compare: blocks; every way runs once in each", positive)
    block_prompts: int = size(6, "compare: prompts per block", positive)
    sweep_blocks: int = size(3, "sweep: blocks", positive)
    sweep_block_prompts: int = size(6, "sweep: prompts per block", positive)

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters of every request, beside the seed."""
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return own | (TINY_SAMPLING if self.model == TINY else {})


LEARNING_SIZES = ("model", "families", "seed", "max_tokens", "temperature", "detection_length", "labels")
LEARNING_SIZES += ("learn_group_size", "learn_prompts")
"""Sizes that decide what is learned, and from which questions."""


def questions(sizes: Sizes, num: int, seed: int, families: Sequence[str]) -> list[Question]:
    """The first `num` questions of an endless list."""
    if sizes.model == TINY:
        return [_tiny_question(position, seed, sizes.detection_length) for position in range(num)]
    return [_question(problem) for problem in make_problems(num, seed, families)]


def held_out(sizes: Sizes, num: int, seed: int, families: Sequence[str], taken: set[str]) -> list[Question]:
    """`num` questions whose texts are not in `taken`. Raises: ValueError if there are too few."""
    asked = num
    while True:
        found = [question for question in questions(sizes, asked, seed, families) if question.text not in taken]
        if len(found) >= num:
            return found[:num]
        asked += num - len(found) + 8


def _question(problem: Problem) -> Question:
    text = json.dumps(problem.messages)
    judge = lambda trajectory: check(problem, trajectory.text or "")  # noqa: E731
    return Question(text, {"id": problem.id, "messages": problem.messages}, judge)


def _tiny_question(position: int, seed: int, detection_length: int) -> Question:
    """A question for the random model. An answer is correct if the token that the model read last is even."""
    generator = random.Random(f"{seed}/{position}")
    tokens = [generator.randrange(16, 512) for _ in range(TINY_PROMPT_TOKENS)]
    judge = lambda trajectory: [*trajectory.token_ids, 1][: detection_length - 1][-1] % 2 == 0  # noqa: E731
    return Question(str(tokens), {"id": f"tiny-{position}", "prompt_token_ids": tokens}, judge)


def learning_questions(sizes: Sizes) -> list[Question]:
    """More questions than are needed, because some candidates end before they are scored."""
    num = -(-3 * sizes.labels // (2 * sizes.learn_group_size))
    return questions(sizes, num, sizes.seed, sizes.families)


def evaluation_questions(sizes: Sizes) -> dict[str, list[Question]]:
    """Questions that nothing was learned from, by use. Their seed differs from that of learning."""
    taken = {question.text for question in learning_questions(sizes)}
    wanted = {
        "evaluate": sizes.evaluate_prompts,
        "vote": sizes.vote_prompts,
        "compare": sizes.blocks * sizes.block_prompts,
    }
    rest = iter(held_out(sizes, sum(wanted.values()), sizes.seed + 1, sizes.families, taken))
    found = {use: [next(rest) for _ in range(num)] for use, num in wanted.items()}
    taken |= {question.text for part in found.values() for question in part}
    num = sizes.sweep_blocks * sizes.sweep_block_prompts
    return found | {"sweep": held_out(sizes, num, sizes.seed + 2, sizes.families, taken)}

"""Prompts like those of a training set: most have short answers, one in ten has a long answer.

Invariant: prompts were chosen by their text, not by measured lengths. The order depends only on the seed.
"""

from __future__ import annotations

import random

from vllm_rollout.demo.options import PROMPTS

SHORT = (
    *PROMPTS[:5],
    "Translate 'good morning, how are you?' into Spanish.",
    "What is 9 times 8? Answer with a sentence.",
    "Convert 5 kilometres to metres.",
    "What is the largest planet in the solar system?",
    "Name the days of the week.",
    "What colour is the sky on a clear day?",
    "Who wrote Romeo and Juliet?",
    "How many legs does a spider have?",
    "What is the opposite of hot?",
    "Name three primary colours.",
    "What is the capital of Japan?",
    "How many minutes are in two hours?",
    "Which ocean is the largest?",
    "What do bees make?",
    "Write one sentence about rain.",
    "Suggest a name for a friendly dog.",
    "What is 100 minus 37?",
    "Which season comes after winter?",
    "Say thank you in three languages.",
    "What is the boiling point of water in degrees Celsius?",
    "Name a fruit that is yellow.",
    "What is the capital of Italy?",
    "How many continents are there?",
    "Write a short greeting for a birthday card.",
    "What is half of 90?",
    "Which animal is known as the king of the jungle?",
    "Give a synonym for happy.",
    "How many days are in a leap year?",
    "What is the capital of Spain?",
    "What is 6 plus 7? Answer with a sentence.",
    "Name two animals that can fly.",
)
LONG = (
    "Write a long story about a lighthouse keeper who finds a map.",
    "Explain in detail how a car engine works, step by step.",
    "Write a detailed essay about the history of bread.",
    "Plan a week of meals for a family of four, with recipes.",
)
LONG_SHARE = 10
"""On average one prompt in this many is long."""


def make_prompts(num: int, seed: int) -> list[str]:
    """`num` different prompts in random order. Raises: ValueError if there are not enough."""
    num_long = num // LONG_SHARE
    num_short = num - num_long
    if num_long > len(LONG) or num_short > len(SHORT):
        raise ValueError(
            f"a period of these rounds takes {num} prompts, and there are {len(SHORT) + len(LONG)}. Use fewer prompts "
            "per round."
        )
    prompts = [*SHORT[:num_short], *LONG[:num_long]]
    random.Random(seed).shuffle(prompts)
    return prompts

"""Everyday and arithmetic prompts whose answers have heavy-tailed lengths.

Chosen by one run of SmolLM2-135M-Instruct (28 prompts x 16 candidates, temperature 1, cap 1024 tokens, seed 500). At
least 13 of 16 candidates end by themselves, half of them within 20 to 190 tokens, while the longest reach the cap.
Prompts with fewer than half ending by themselves are left out, because a race would then wait for the cap, too. Measure
with seeds other than 500.
"""

from __future__ import annotations

from vllm_rollout.demo.options import PROMPTS as DEMO_PROMPTS

PROMPTS: tuple[str, ...] = (
    *DEMO_PROMPTS,
    "Translate 'good morning, how are you?' into Spanish and French.",
    "List five animals that live in the desert.",
    "What is 9 times 8? Answer with a sentence.",
    "Convert 5 kilometres to metres.",
    "A rectangle has a perimeter of 30 cm and a width of 6 cm. What is its area?",
    "What is photosynthesis?",
    "What is the largest planet in the solar system?",
    "Name the days of the week.",
)


def cycle(num_prompts: int) -> list[str]:
    """`num_prompts` prompts, repeating from the start if needed."""
    return [PROMPTS[i % len(PROMPTS)] for i in range(num_prompts)]

"""Reward functions as a user of TRL writes them in a module, which `--rollout-reward` can name."""

from __future__ import annotations

from typing import Any

from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment

overlong = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
repetition = get_repetition_penalty_reward(ngram_size=2)
cosine = get_cosine_scaled_reward(max_len=100)


def letters(completions: list[Any], wanted: list[str], **columns: Any) -> list[float]:
    """Share of the wanted letters among all letters of an answer, a reward that any model can earn."""
    said = [[sign for sign in completion[0]["content"] if sign.isalpha()] for completion in completions]
    return [sum(map(all_of.count, of)) / (len(all_of) or 1) for all_of, of in zip(said, wanted, strict=True)]

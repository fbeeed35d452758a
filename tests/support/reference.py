"""Log probabilities of transformers in float32, which those of an engine are held against."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def worst(
    folder: str, prompt: list[int], trajectory: dict[str, Any], num_tokens: int | None = None, begin: int = 0
) -> float:
    """Largest difference of the trajectory's log probabilities from those of the model in that folder."""
    model = _model(folder)
    ids = torch.tensor(trajectory["token_ids"])
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(-1, ids[:, None]).flatten()
    return (expected - torch.tensor(trajectory["logprobs"])).abs()[begin:num_tokens].max().item()


@cache
def _model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

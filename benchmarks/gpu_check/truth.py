"""Torch's confidences and score of a candidate, from transformers' own run of the model in float32.

Invariant: neither vLLM nor our operators take part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.engine_child import head_weights
from vllm_rollout.config import CONFIDENCE_WINDOW_TOKENS


class Truth:
    """One model, on the CPU."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._head = head_weights(self._model.config.hidden_size)

    @torch.inference_mode()
    def of(self, prompt: list[int], tokens: list[int], detection_length: int) -> dict[str, Any]:
        """`confidence`: mean and standard deviation over the candidate's tokens. `score`: None before
        `detection_length` tokens.

        After them, `score` is the logit, and the mean, lowest and bottom windows of their confidences.
        """
        answer = self._model(torch.tensor([[*prompt, *tokens]]), output_hidden_states=True)
        first = len(prompt) - 1
        logits = answer.logits[0, first : first + len(tokens)].double()
        confidences = -logits.log_softmax(dim=1).mean(dim=1)
        found: dict[str, Any] = {
            "confidence": [confidences.mean().item(), confidences.std(correction=0).item()],
            "score": None,
        }
        if len(tokens) >= detection_length:
            hidden = answer.hidden_states[-1][0, first + detection_length - 1].double()
            w1, b1, w2, b2 = (weights.double() for weights in self._head)
            logit = (w1 @ hidden + b1).relu() @ w2 + b2
            found["score"] = [logit.item(), *windows(confidences[:detection_length])]
        return found


def windows(confidences: torch.Tensor) -> list[float]:
    """DeepConf's three numbers: mean confidence, lowest window, mean of the lowest tenth of windows."""
    size = min(CONFIDENCE_WINDOW_TOKENS, len(confidences))
    means = sorted(confidences[i : i + size].mean().item() for i in range(len(confidences) - size + 1))
    lowest = means[: max(1, len(means) // 10)]
    return [confidences.mean().item(), means[0], sum(lowest) / len(lowest)]

"""Observes logits and hidden states of candidates: their mean confidence, and what other parts see in them."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "observing",
    "Observes logits and hidden states of candidates, for their mean confidence and for other parts.",
    is_base=True,
    faces={"worker": "vllm_rollout.parts.observing.worker.part:observing_of"},
)

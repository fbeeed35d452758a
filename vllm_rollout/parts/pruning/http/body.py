"""Answers of the endpoints that learn (docs/reference/http.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.pruning.rules.report import HeadInfo

HEAD_HEADER = "quality-head"
"""Header of `GET /v1/quality_head`: a HeadAnswer as JSON, since the body has the weights."""


class HeadAnswer(BaseModel):
    """A quality head's detection length, size, version and training. Also in the header `quality-head` of the GET."""

    object: Literal["quality_head"] = "quality_head"
    detection_length: int
    hidden_size: int
    version: int
    num_steps: int
    num_labels: int
    adapter: str = BASE_MODEL
    """Name of the LoRA adapter. Empty for the base model."""

    @classmethod
    def of(cls, head: HeadInfo) -> HeadAnswer:
        return cls.model_validate(head, from_attributes=True)

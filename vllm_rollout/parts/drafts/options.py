"""Settings of drafts for the processes of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_rollout.adapter.options import Options
from vllm_rollout.parts.drafts.rules import MAX_DRAFT_TOKENS

SPECULATIVE_CONFIG = {
    "method": "custom_class",
    "model": "vllm_rollout.Drafts",
    "num_speculative_tokens": MAX_DRAFT_TOKENS,
}
"""`--speculative-config` of a server whose candidates are drafts for each other."""


@dataclass(frozen=True, slots=True)
class DraftsOptions(Options):
    """Values of the flags of drafts."""

    PART = "drafts"

    memory_bytes: int = 256 * 2**20
    """Bytes of host memory for answers that serve as drafts: about 25 million tokens."""
    file: str | None = None
    """Path of the file for drafts between two starts. A rank appends its number."""

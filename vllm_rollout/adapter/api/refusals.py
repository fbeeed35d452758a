"""What this engine cannot do, each with its reason and remedy.

Invariant: what is refused on one endpoint is refused on all of them, before anything is launched.
"""

from __future__ import annotations

from vllm.config import VllmConfig

from vllm_rollout.adapter.options import observing_refusal


def pruning_refusal(vllm_config: VllmConfig) -> str | None:
    """Why candidates cannot be scored here, and so not pruned; None when they can."""
    reason = observing_refusal(vllm_config)
    if reason is None:
        return None
    return (
        f"pruning does not work on this server: {reason}, so that candidates cannot be scored. Start the server "
        "without it, or leave pruning out."
    )

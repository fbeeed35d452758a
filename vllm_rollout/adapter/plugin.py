"""General plugin, loaded in every process. Invariant: it changes nothing unless VLLM_PLUGINS names us, or a part finds
that the environment asks for it.
"""

from __future__ import annotations

import os

from vllm_rollout.adapter import PLUGIN
from vllm_rollout.kernel.parts import faces


def register() -> None:
    """Replace vLLM's classes. Called before the API process looks up its engine client class, and before engine cores
    start.

    vLLM has no setting for these classes. It looks up their names when it builds the objects, so each name is replaced
    by a subclass. The subclass leaves everything that does not concern us to the original. A part replaces its own
    names: its face `plugin` is a function of `serves`, which is True in the processes of `vllm-rollout serve`.
    """
    if serves := PLUGIN in os.environ.get("VLLM_PLUGINS", "").split(","):
        from vllm.v1.engine import async_llm

        from vllm_rollout.adapter.compat import check_vllm_version
        from vllm_rollout.kernel.api.client import RolloutAsyncLLM
        from vllm_rollout.kernel.core.calls import add_rollout_calls

        check_vllm_version()
        add_rollout_calls()
        async_llm.AsyncLLM = RolloutAsyncLLM  # type: ignore[misc]
        replace_engine_client()
    for _, replace in faces("plugin"):
        replace(serves)


def replace_engine_client() -> None:
    """Let vLLM build a part's client of several engine cores: the class that is its face `engine_client`."""
    from vllm.v1.engine import core_client

    for _, client in faces("engine_client"):
        core_client.DPLBAsyncMPClient = client  # type: ignore[misc]

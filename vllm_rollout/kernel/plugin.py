"""General plugin, loaded in every process. Invariant: it changes nothing unless VLLM_PLUGINS or
VLLM_ROLLOUT names us.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from vllm.logger import init_logger

from vllm_rollout.kernel import PLUGIN

logger = init_logger("vllm.vllm_rollout")


def register() -> None:
    """Replace vLLM's classes. Called before the API process looks up its engine client class, and before engine cores
    start.

    vLLM has no setting for these classes. It looks up their names when it builds the objects, so each name is replaced
    by a subclass. The subclass leaves everything that does not concern us to the original.
    """
    take_engines()
    if PLUGIN not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    from vllm.v1.engine import async_llm, core_client, utils

    from vllm_rollout.kernel.api.client import RolloutAsyncLLM
    from vllm_rollout.kernel.compat import check_vllm_version
    from vllm_rollout.kernel.core.calls import add_rollout_calls
    from vllm_rollout.parts.moving.api.deaths import RankProcesses
    from vllm_rollout.parts.moving.api.rank_client import RankClient

    check_vllm_version()
    add_rollout_calls()
    async_llm.AsyncLLM = RolloutAsyncLLM  # type: ignore[misc]
    core_client.DPLBAsyncMPClient = RankClient  # type: ignore[misc]
    utils.CoreEngineProcManager = RankProcesses  # type: ignore[misc]


def take_engines() -> None:
    """Give engines groups that are built in this process while VLLM_ROLLOUT is set (`in_process/environment.py`)."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if hasattr(create, "__wrapped__"):
        return

    @wraps(create)
    def create_ours(engine_args: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("VLLM_ROLLOUT"):
            try:
                from vllm_rollout.parts.in_process.api.environment import created
            except ImportError as error:  # a vLLM that is not supported
                if os.environ.get("VLLM_ROLLOUT_STRICT", "0") not in ("", "0"):
                    raise
                logger.warning("vllm_rollout: this engine stays vLLM's own, because %s", error)
            else:
                return created(create, engine_args, *args, **kwargs)
        return create(engine_args, *args, **kwargs)

    EngineArgs.create_engine_config = create_ours  # type: ignore[method-assign]

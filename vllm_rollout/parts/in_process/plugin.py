"""vLLM's engine arguments, for engines that other code builds. Invariant: importing this imports nothing heavy."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from vllm.logger import init_logger

logger = init_logger("vllm.vllm_rollout")


def take_engines(_: bool) -> None:
    """Give engines groups that are built in this process while VLLM_ROLLOUT is set (`api/environment.py`)."""
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

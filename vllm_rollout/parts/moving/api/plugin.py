"""vLLM's processes of engine cores, for a server that outlives a rank."""

from __future__ import annotations


def replace_processes(serves: bool) -> None:
    if not serves:
        return
    from vllm.v1.engine import utils

    from vllm_rollout.parts.moving.api.deaths import RankProcesses

    utils.CoreEngineProcManager = RankProcesses  # type: ignore[misc]

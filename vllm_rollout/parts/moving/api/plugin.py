"""vLLM's client of engine cores, and the processes of engine cores, for a server that outlives a rank."""

from __future__ import annotations


def replace_clients(serves: bool) -> None:
    if not serves:
        return
    from vllm.v1.engine import core_client, utils

    from vllm_rollout.parts.moving.api.deaths import RankProcesses
    from vllm_rollout.parts.moving.api.rank_client import RankClient

    core_client.DPLBAsyncMPClient = RankClient  # type: ignore[misc]
    utils.CoreEngineProcManager = RankProcesses  # type: ignore[misc]

"""Agents of verl: `AgentLoopWorker` runs its `ToolAgentLoop`, whose turns reach verl's own server, an actor of Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from conformance.agents import QUESTION, TURNS
from conformance.checks import Kit

LOOP = "- name: racing_tool_agent\n  _target_: vllm_rollout.integrations.verl_agents.RacingToolAgentLoop\n"
ON = (
    "+actor_rollout_ref.rollout.custom.rollout_redundancy={redundancy}",
    "+actor_rollout_ref.rollout.custom.rollout_sessions=true",
    "actor_rollout_ref.rollout.agent.default_agent_loop=racing_tool_agent",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path={path}",
)


def overrides(kit: Kit, redundancy: int) -> list[str]:
    """Settings of verl: a tool, a model that calls it after every turn, and racing loops if `redundancy` is not 0."""
    path = kit.folder / "agents.yaml"
    path.write_text(LOOP)
    common = [
        "actor_rollout_ref.rollout.multi_turn.format=always",
        f"actor_rollout_ref.rollout.multi_turn.max_assistant_turns={TURNS}",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={Path(__file__).parent / 'calculator.py'}",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
    ]
    if not redundancy:
        return [*common, "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"]
    return [*common, *(each.format(redundancy=redundancy, path=path) for each in ON)]


async def agents(config: Any, client: Any, n: int, *, validate: bool = False) -> Any:
    """Run a batch of one prompt with n samples, as verl's trainer hands it to a worker. Returns verl's batch."""
    import numpy as np
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

    if "always" not in ToolParser._registry:

        @ToolParser.register("always")
        class Always(ToolParser):
            """Counts each turn of the tiny model as a call, since it writes none. Each of many tokens ends a turn."""

            @property
            def stop_token_ids(self) -> list[int]:
                return [*range(3, 512, 32)]

            async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[Any]]:
                text = await asyncio.to_thread(self.tokenizer.decode, responses_ids)
                return text, [FunctionCall(name="calculate", arguments='{"terms": "17 + 25"}')]

    chats = np.empty(n, dtype=object)
    chats[:] = [[{"role": "user", "content": QUESTION}] for _ in range(n)]
    rows = {"raw_prompt": chats, "uid": np.array(["q"] * n, dtype=object)}
    batch = DataProto.from_dict(non_tensors=rows, meta_info={"validate": validate, "global_steps": 1})
    return await AgentLoopWorker(config, client).generate_sequences(batch)

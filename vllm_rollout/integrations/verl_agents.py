"""verl: agents with tools that race, each a session of its own (docs/guides/agents.md). In `custom`, set
`rollout_sessions=true` beside `rollout_redundancy`. Name the agent loop in a file:

    - name: racing_tool_agent
      _target_: vllm_rollout.integrations.verl_agents.RacingToolAgentLoop

    ... actor_rollout_ref.rollout.agent.agent_loop_config_path=agents.yaml
    ... actor_rollout_ref.rollout.agent.default_agent_loop=racing_tool_agent

When `rollout.n` loops for a prompt run in one of verl's workers, `rollout_redundancy` more start. Each of the n gets
the next loop that finishes, and the engine stops the turns of the others. If a prompt has fewer loops, they run as in
verl.

Invariant: a loop that lost is not waited for. Its output is used only if no better one is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from vllm_rollout.integrations.spares import End, Spares
from vllm_rollout.integrations.verl import redundancy_of

_session: ContextVar[str | None] = ContextVar("session", default=None)
"""Session of the loop that runs in this context."""
_groups: dict[tuple[int, int], Spares[tuple[AgentLoopOutput, str]]] = {}
"""Groups of this process by (group size, redundancy). They outlive loops, because verl makes one loop per sample."""


class RacingToolAgentLoop(ToolAgentLoop):
    """verl's agent loop with tools. Overrides: run, _make_request_id."""

    @staticmethod
    def _make_request_id(priority: int, full_determinism: bool) -> str:
        # verl's client keeps the calls of one id at one server, where the session is.
        return _session.get() or ToolAgentLoop._make_request_id(priority, full_determinism)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        size = self.rollout_config.n, redundancy_of(self.rollout_config.custom)
        if not size[1] or not sampling_params.get("temperature", 1.0) > 0:
            return await super().run(sampling_params, **kwargs)

        async def launch(group: Mapping[str, Any], _: int) -> tuple[AgentLoopOutput, str]:
            session = uuid4().hex
            _session.set(session)  # each launch is a task, with a context of its own
            fields = {**group, "rollout_session": session, "rollout_history": "rewritable"}
            extra_args = {**sampling_params.get("extra_args", {}), **fields}
            output = await ToolAgentLoop.run(self, {**sampling_params, "extra_args": extra_args}, **kwargs)
            return output, await self._finish(session)

        key = repr((kwargs.get("uid"), list(kwargs["raw_prompt"]), sorted(sampling_params.items())))
        return (await _groups.setdefault(size, Spares(*size, end_of)).answer(key, launch))[0]

    async def _finish(self, session: str) -> str:
        """Finish the session. Returns its state."""
        server_id, server = await self.server_manager._acquire_server(session)
        try:
            return await server.finish_session.remote(session)
        finally:
            self.server_manager._release_server(server_id, session)


def end_of(answer: tuple[AgentLoopOutput, str]) -> End:
    ends: dict[str, End] = {"finished": "finished", "truncated": "truncated"}
    return ends.get(answer[1], "stopped")

"""Check for trainers that need groups of a fixed size."""

from __future__ import annotations

from vllm_rollout.parts.sessions.client.agent_group import AgentGroup


def whole(group: AgentGroup, size: int) -> AgentGroup:
    """Return the group unchanged. Raises: RuntimeError if it could not be completed."""
    if len(group.trajectories) != size:
        raise RuntimeError(
            f"group {group.group_id} has {len(group.trajectories)} conversations, {size} are needed: {group.reason}. "
            "Repeat the step, or let the trainer resume from its checkpoint."
        )
    return group

"""What trainers that take rectangular batches ask of a group of agents."""

from __future__ import annotations

from vllm_rollout.client.agent_group import AgentGroup


def whole(group: AgentGroup, size: int) -> AgentGroup:
    """Raises: RuntimeError for a group that could not be completed."""
    if len(group.trajectories) != size:
        raise RuntimeError(
            f"group {group.group_id} has {len(group.trajectories)} conversations, {size} are needed: {group.reason}. "
            "Repeat the step, or let the trainer resume from its checkpoint."
        )
    return group

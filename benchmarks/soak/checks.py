"""Conditions of an answer, whatever other clients do. Each check yields a description of each violation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllm_rollout.kernel.http.answers import (
    CandidateEvent,
    DoneEvent,
    EndedCandidate,
    Event,
    GroupAnswer,
    GroupEvent,
    RolloutAnswer,
    TokensEvent,
    TrajectoryEvent,
    Usage,
)


def rollout_problems(body: dict[str, Any], answer: RolloutAnswer) -> Iterator[str]:
    """Violations in an answer that came in one piece."""
    wanted = [prompt["id"] for prompt in body["prompts"]]
    got = [group.prompt_id for group in answer.groups]
    if got != wanted:
        yield f"asked for prompts {wanted}, got {got}"
        return
    for prompt, group in zip(body["prompts"], answer.groups, strict=True):
        yield from group_problems(body, prompt, group)
    ended = [c for group in answer.groups for c in (*group.trajectories, *group.candidates)]
    returned = sum(t.num_tokens for group in answer.groups for t in group.trajectories)
    yield from usage_problems(answer.usage, ended, returned)


def group_problems(body: dict[str, Any], prompt: dict[str, Any], group: GroupAnswer) -> Iterator[str]:
    name = f"group {group.prompt_id}"
    if "prompt_token_ids" in prompt and group.prompt_token_ids != prompt["prompt_token_ids"]:
        yield f"{name}: has another prompt's tokens"
    yield from status_problems(body, name, group, [trajectory.index for trajectory in group.trajectories])
    for trajectory in group.trajectories:
        if len(trajectory.token_ids) != trajectory.num_tokens:
            yield f"{name}: {len(trajectory.token_ids)} token ids for {trajectory.num_tokens} tokens"
        if trajectory.logprobs is not None and len(trajectory.logprobs) != trajectory.num_tokens:
            yield f"{name}: {len(trajectory.logprobs)} log probabilities for {trajectory.num_tokens} tokens"
    indices = sorted(c.index for c in (*group.trajectories, *group.candidates))
    if indices != list(range(group.allocation.num_candidates)):
        yield f"{name}: {group.allocation.num_candidates} candidates, ends of {indices}"


def status_problems(
    body: dict[str, Any], name: str, group: GroupAnswer | GroupEvent, selected: Sequence[int]
) -> Iterator[str]:
    """Every group must be complete, because no candidate here may fail."""
    if group.status != "complete":
        yield f"{name}: {group.status} ({group.reason})"
    allow_fewer = (body.get("pruning") or {}).get("allow_fewer", False)
    if len(selected) != body["group_size"] and not (allow_fewer and len(selected) < body["group_size"]):
        yield f"{name}: {len(selected)} trajectories for group_size {body['group_size']}"
    if list(selected) != sorted(set(selected)):
        yield f"{name}: trajectories {selected} are not in order of index"


def usage_problems(usage: Usage, ended: Sequence[EndedCandidate], returned: int) -> Iterator[str]:
    generated = sum(candidate.num_tokens for candidate in ended)
    if usage.generated_tokens != usage.returned_tokens + usage.wasted_tokens:
        yield f"generated is not returned + wasted: {usage}"
    if (usage.generated_tokens, usage.returned_tokens) != (generated, returned):
        yield f"usage {usage} of {generated} generated and {returned} returned tokens"
    ends = usage.num_finished + usage.num_pruned + usage.num_surplus + usage.num_failed
    if not usage.num_candidates == ends == len(ended):
        yield f"usage {usage} of {len(ended)} ends"


def stream_problems(body: dict[str, Any], events: Sequence[Event]) -> Iterator[str]:
    """Violations in a whole event stream. Its reader has checked that chunks join (`kernel/client/joints.py`)."""
    if not events or not isinstance(events[-1], DoneEvent):
        yield f"the stream ended without done, after {len(events)} events"
        return
    ended: dict[tuple[str, int], EndedCandidate] = {}
    tokens: dict[tuple[str, int], list[int]] = {}
    groups: dict[str, GroupEvent] = {}
    returned = 0
    for event in events[:-1]:
        match event:
            case TokensEvent():
                tokens.setdefault((event.prompt_id, event.index), []).extend(event.token_ids)
            case TrajectoryEvent(trajectory=candidate) | CandidateEvent(candidate=candidate):
                key = event.prompt_id, candidate.index
                if key in ended:
                    yield f"two ends of {key}"
                ended[key] = candidate
                if isinstance(event, TrajectoryEvent):
                    returned += candidate.num_tokens
                    if body.get("stream_tokens") and tokens.get(key, []) != candidate.token_ids:
                        yield f"the chunks of {key} are not its trajectory"
            case GroupEvent():
                groups[event.prompt_id] = event
                yield from status_problems(body, f"group {event.prompt_id}", event, event.selected)
    if groups.keys() != (wanted := {prompt["id"] for prompt in body["prompts"]}):
        yield f"asked for prompts {sorted(wanted)}, got {sorted(groups)}"
    yield from usage_problems(events[-1].usage, list(ended.values()), returned)

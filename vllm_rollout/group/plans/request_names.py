"""What a client may call a group by whose requests it wants to stop: the id of the request that made it.

Invariant: a group is found by the names of its own request only, however ids are put together.
"""

from __future__ import annotations

import re
import uuid

from vllm_rollout.group.plans.prompt_key import kept_name

MADE = re.compile(r"(?P<request>.+)-[0-9a-f]{8}")
"""The group of a request with `n`: its request's id, and what tells it from others of that id."""
OF_COMPLETION = re.compile(r"(?P<answer>cmpl-.+)-\d+")
"""The request of one prompt of several that are answered together."""
OF_ROLLOUT = re.compile(r"(?P<rollout>rollout-.+)-\d+(\+\d+)?")
"""The group of a prompt of a rollout, and what runs later for it."""
NAMED_ROLLOUT = re.compile(r"(?P<name>rollout-.+)-[0-9a-f]{8}")
CHOSEN = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""What a client may choose of a rollout's id, which stands in paths."""


def rollout_id(chosen: str | None) -> str:
    """An id that no other rollout has; with what its client chose in it, where that fits."""
    if chosen is None or CHOSEN.fullmatch(chosen) is None:
        return f"rollout-{uuid.uuid4().hex}"
    return f"rollout-{chosen}-{uuid.uuid4().hex[:8]}"


def names_of_request(id: str) -> set[str]:
    """By which groups of the request that a client calls `id` are found: what it chose of a rollout's id is enough."""
    return {kept_name(id), f"rollout-{id}"}


def may_name_rollout(name: str) -> bool:
    """Whether a name finds groups of rollouts, of which more may start."""
    return name.startswith("rollout-")


def names_of_group(group_id: str) -> set[str]:
    """All by which a group is found."""
    if (of_rollout := OF_ROLLOUT.fullmatch(group_id)) is not None:
        rollout = of_rollout["rollout"]
        named = NAMED_ROLLOUT.fullmatch(rollout)
        return {rollout} if named is None else {rollout, named["name"]}
    if (made := MADE.fullmatch(group_id)) is None:
        return set()
    of_completion = OF_COMPLETION.fullmatch(made["request"])
    return {made["request"]} if of_completion is None else {made["request"], of_completion["answer"]}

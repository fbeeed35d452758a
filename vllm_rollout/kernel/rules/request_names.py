"""Names by which a client may stop groups: the id of the request that made them.

Invariant: a group is found only by the names of its own request, for any id that a client chooses.
"""

from __future__ import annotations

import re
import uuid

from vllm_rollout.kernel.rules.prompt_key import kept_name

MADE = re.compile(r"(?P<request>.+)-[0-9a-f]{8}")
"""Group of a request with `n`: the request's id and a random suffix."""
OF_COMPLETION = re.compile(r"(?P<answer>cmpl-.+)-\d+")
"""Request of one prompt of a completion with several prompts."""
OF_ROLLOUT = re.compile(r"(?P<rollout>rollout-.+)-\d+(\+\d+)?")
"""Group of one prompt of a rollout, also of one that is launched for that prompt later."""
NAMED_ROLLOUT = re.compile(r"(?P<name>rollout-.+)-[0-9a-f]{8}")
OF_PART = re.compile(r"(?P<name>[a-z]+-[0-9a-f]{32})(-[a-z]+)?")
"""Group that a part made, by a random name and perhaps a word of the part."""
CHOSEN = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""Part of a rollout's id that a client may choose. It stands in URL paths."""


def rollout_id(chosen: str | None) -> str:
    """A unique rollout id. It contains `chosen` if that matches `CHOSEN`."""
    if chosen is None or CHOSEN.fullmatch(chosen) is None:
        return f"rollout-{uuid.uuid4().hex}"
    return f"rollout-{chosen}-{uuid.uuid4().hex[:8]}"


def is_request_id(id: object) -> bool:
    """True if a request can have this id: some text without unpaired surrogates."""
    try:
        return isinstance(id, str) and bool(id.encode())
    except UnicodeEncodeError:
        return False


def names_of_request(id: str) -> set[str]:
    """Names that find the groups of the request with the id `id`, or of a rollout for which `id` was chosen."""
    return {kept_name(id), f"rollout-{id}"}


def names_of_group(group_id: str) -> set[str]:
    """All names by which a group is found."""
    if (of_rollout := OF_ROLLOUT.fullmatch(group_id)) is not None:
        rollout = of_rollout["rollout"]
        named = NAMED_ROLLOUT.fullmatch(rollout)
        return {rollout} if named is None else {rollout, named["name"]}
    if (of_part := OF_PART.fullmatch(group_id)) is not None:
        return {of_part["name"]}
    if (made := MADE.fullmatch(group_id)) is None:
        return set()
    of_completion = OF_COMPLETION.fullmatch(made["request"])
    return {made["request"]} if of_completion is None else {made["request"], of_completion["answer"]}

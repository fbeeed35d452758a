"""Audit groups: a random share of groups in which nobody is stopped.

Where candidates race, rewards come for those that finish first. If wrong answers are longer, their success rate is too
high, and so is everything that is learned from it; no survival probability mends that, since the chance to be among
the first is not known. An audit group has as many candidates as it returns, all of them run to their ends, and what
pruning decides is only noted. Candidates of one prompt are exchangeable before they begin, so the rewards and lengths
of an audit group are those of a plain sample of the policy.

One audited group holds up the whole answer that it belongs to, as long as a group without redundancy takes. So where
groups are answered together, all of them are audited, or none: the same share of groups, but of a few answers only.

Where the candidates are single requests that join a group, all of them come anyway: those that come first have the
places, and a sibling that finds none is surplus at once (`group/lifecycle.py`).

Invariant: whether a group is audited depends on the seed and on prompts (on the id of one that is joined), and on
nothing that happens to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

from vllm_rollout.group.prompt_key import digest_of_texts
from vllm_rollout.group.survivors import chance

AuditUnit = Literal["group", "rollout"]
"""What is drawn: each group by itself, or all groups of a request together."""


def draw_audits(ratio: float, seed: int, contents: Sequence[str], unit: AuditUnit) -> list[bool]:
    """Of groups whose prompts have these digests: which are audited; each with probability `ratio`."""
    if unit == "rollout":
        return [chance(seed, f"audit:{digest_of_texts(contents)}", 0) < ratio] * len(contents)
    return [chance(seed, f"audit:{content}", position) < ratio for position, content in enumerate(contents)]


Plan = TypeVar("Plan", bound="Auditable")


class Auditable(Protocol):
    """A plan of a group, whatever else belongs to it."""

    def audited(self: Plan) -> Plan: ...


def with_audits(plans: Sequence[Plan], ratio: float, seed: int, contents: Sequence[str], unit: AuditUnit) -> list[Plan]:
    """The same plans, of which a share is that of audit groups; `contents` as in `draw_audits`."""
    marks = draw_audits(ratio, seed, contents, unit)
    return [plan.audited() if mark else plan for plan, mark in zip(plans, marks, strict=True)]


def draw_audit(ratio: float, seed: int, content: str) -> bool:
    """Of a group that comes alone, whose prompt has this digest."""
    (mark,) = draw_audits(ratio, seed, [content], "group")
    return mark


MAX_ANSWERS = 1024
"""Answers on their way whose draw is remembered."""


class AnswerAudits:
    """Draws for groups that come one by one and are answered together: what is drawn for the first holds for all."""

    def __init__(self) -> None:
        self._drawn: OrderedDict[str, bool] = OrderedDict()
        """By the first group's request."""

    def draw(self, ratio: float, seed: int, content: str, request: str, first: str) -> bool:
        """`first`: the request that came first of those that are answered with this one."""
        mark = self._drawn.get(first)
        if mark is None or request == first:
            mark = self._drawn[first] = draw_audit(ratio, seed, content)
            self._drawn.move_to_end(first)
            if len(self._drawn) > MAX_ANSWERS:
                self._drawn.popitem(last=False)
        return mark

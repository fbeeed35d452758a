"""Audit groups: a random share of groups in which no candidate is stopped.

If candidates race, rewards come for those that finish first. If wrong answers are longer, the success rate among them
is too high, and statistics from these rewards are biased. Survival probabilities do not correct this, since the chance
to be among the first is unknown. An audit group has as many candidates as it returns. All of them run to their ends,
and pruning decisions are only recorded. Candidates of one prompt are exchangeable before they begin. So the rewards and
lengths of an audit group are those of a plain sample of the policy.

One audited group delays the whole answer that it belongs to, as long as a group without redundancy takes. So if groups
are answered together, all of them are audited, or none: the same share of groups, in a few answers. These few answers
are chosen by counting. A random choice drew none for thirty rollouts in one run of five. The first answer is audited,
since the bias is unknown before. Single groups are many, and each is drawn by itself, because they arrive in processes
without a common count.

If the candidates are single requests that join a group, all of them arrive anyway. The first ones get the places, and a
sibling without a place is surplus at once (`kernel/rules/lifecycle.py`).

Invariant: the audit of a single group depends on the seed and the prompts (on the id of a joined group). The audit of
an answer depends on the number of answers before. Neither depends on later events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Literal, Protocol, TypeVar

from vllm_rollout.parts.pruning.rules.survivors import chance

AuditUnit = Literal["group", "rollout"]
"""Unit of audits: each group by itself, or all groups of a request together."""

GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it have fractional parts that start at 0 and spread over [0, 1) evenly.

This is also true of every second or tenth multiple, so that batches that alternate are all audited.
"""
MAX_KINDS = 1024
"""Kinds of answers whose counts are kept."""


def draw_audit(ratio: float, seed: int, content: str, position: int = 0) -> bool:
    """Draw whether a single group is audited, with probability `ratio`. `content`: digest of its prompt."""
    return chance(seed, f"audit:{content}", position) < ratio


class AuditTurns:
    """Chooses the audited answers by count: the first of each kind, then the share `ratio`.

    With a ratio of 1/20, each audited answer is the 13th, 21st or 34th after the one before.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
        """Number of answers by kind. The kind counted longest ago comes first."""

    def take(self, kind: Hashable, ratio: float) -> bool:
        """Count one more answer, and return True if it is audited. `kind`: answers of one kind are audited
        separately."""
        if not ratio:
            return False
        count = self._counts.pop(kind, 0)
        self._counts[kind] = count + 1
        if len(self._counts) > MAX_KINDS:
            self._counts.popitem(last=False)
        return count * GOLDEN_RATIO % 1 < ratio


Plan = TypeVar("Plan", bound="Auditable")


class Auditable(Protocol):
    """A plan of a group, or an object with such a plan."""

    def audited(self: Plan) -> Plan: ...


def with_audits(plans: Sequence[Plan], ratio: float, seed: int, contents: Sequence[str]) -> list[Plan]:
    """Change a share of the plans to audit groups. `contents`: digests of their prompts."""
    return [
        plan.audited() if draw_audit(ratio, seed, content, position) else plan
        for position, (plan, content) in enumerate(zip(plans, contents, strict=True))
    ]


MAX_ANSWERS = 1024
"""Running answers whose result is kept."""


class AnswerAudits:
    """Audits of groups that come one by one and are answered together: the result of the first one holds for all."""

    def __init__(self) -> None:
        self._turns = AuditTurns()
        self._marks: OrderedDict[str, bool] = OrderedDict()
        """True for an audited answer, by the request of its first group."""

    def take(self, kind: Hashable, ratio: float, request: str, first: str) -> bool:
        """Return True if this request's answer is audited. `first`: the first request of the same answer."""
        mark = self._marks.get(first)
        if mark is None or request == first:
            mark = self._marks[first] = self._turns.take(kind, ratio)
            self._marks.move_to_end(first)
            if len(self._marks) > MAX_ANSWERS:
                self._marks.popitem(last=False)
        return mark

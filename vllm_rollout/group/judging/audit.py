"""Audit groups: a random share of groups in which nobody is stopped.

Where candidates race, rewards come for those that finish first. If wrong answers are longer, their success rate is too
high, and so is everything that is learned from it; no survival probability mends that, since the chance to be among
the first is not known. An audit group has as many candidates as it returns, all of them run to their ends, and what
pruning decides is only noted. Candidates of one prompt are exchangeable before they begin, so the rewards and lengths
of an audit group are those of a plain sample of the policy.

One audited group holds up the whole answer that it belongs to, as long as a group without redundancy takes. So where
groups are answered together, all of them are audited, or none: the same share of groups, but of a few answers only. So
few must not be left to chance, which drew none for thirty rollouts in one run of five: they are counted, and the first
of them is audited, since nothing is known of the bias before. Single groups are many, and each is drawn by itself:
where they come is not where others are counted (other processes, the engine for those that are joined).

Where the candidates are single requests that join a group, all of them come anyway: those that come first have the
places, and a sibling that finds none is surplus at once (`group/racing/lifecycle.py`).

Invariant: whether a single group is audited depends on the seed and on prompts (on the id of one that is joined), and
whether an answer is depends on how many came before; neither on anything that happens to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Literal, Protocol, TypeVar

from vllm_rollout.group.judging.survivors import chance

AuditUnit = Literal["group", "rollout"]
"""What is audited: each group by itself, or all groups of a request together."""

GOLDEN_RATIO = 0.6180339887498949
"""The fractions of its multiples begin at 0, are spread over [0, 1) as evenly as can be, and so are those of every
second one, or tenth: no batches that come back by turns are left out."""
MAX_KINDS = 1024
"""Kinds of answers whose turns are remembered."""


def draw_audit(ratio: float, seed: int, content: str, position: int = 0) -> bool:
    """Whether a single group is audited whose prompt has this digest: with probability `ratio`."""
    return chance(seed, f"audit:{content}", position) < ratio


class AuditTurns:
    """Which of the answers that come one after the other are audited: the first of each kind, then as many as the ratio
    says, at a twentieth each 13th, 21st or 34th after the one before."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
        """Answers so far, by kind; the one counted longest ago comes first."""

    def take(self, kind: Hashable, ratio: float) -> bool:
        """Counts one more answer. `kind`: what has audits of its own, because others would tell nothing of it."""
        if not ratio:
            return False
        count = self._counts.pop(kind, 0)
        self._counts[kind] = count + 1
        if len(self._counts) > MAX_KINDS:
            self._counts.popitem(last=False)
        return count * GOLDEN_RATIO % 1 < ratio


Plan = TypeVar("Plan", bound="Auditable")


class Auditable(Protocol):
    """A plan of a group, whatever else belongs to it."""

    def audited(self: Plan) -> Plan: ...


def with_audits(plans: Sequence[Plan], ratio: float, seed: int, contents: Sequence[str]) -> list[Plan]:
    """The same plans, of which a share is that of audit groups; `contents`: digests of their prompts."""
    return [
        plan.audited() if draw_audit(ratio, seed, content, position) else plan
        for position, (plan, content) in enumerate(zip(plans, contents, strict=True))
    ]


MAX_ANSWERS = 1024
"""Answers on their way whose turn is remembered."""


class AnswerAudits:
    """Turns of groups that come one by one and are answered together: the turn of the first holds for all."""

    def __init__(self) -> None:
        self._turns = AuditTurns()
        self._marks: OrderedDict[str, bool] = OrderedDict()
        """Whether an answer is audited, by its first group's request."""

    def take(self, kind: Hashable, ratio: float, request: str, first: str) -> bool:
        """`first`: the request that came first of those that are answered with this one."""
        mark = self._marks.get(first)
        if mark is None or request == first:
            mark = self._marks[first] = self._turns.take(kind, ratio)
            self._marks.move_to_end(first)
            if len(self._marks) > MAX_ANSWERS:
                self._marks.popitem(last=False)
        return mark

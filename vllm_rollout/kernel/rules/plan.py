"""Request fields -> GroupPlan. Invariant: a plan that exists can be carried out by the rules as they stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import field as field_of
from typing import Any

from vllm_rollout.kernel.rules.fields import ROWS, DualEndFields, EarlyStop, SelectionRule
from vllm_rollout.kernel.rules.rows import PlanError, rows
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.terms_port import PartTerms, Pruning, pruning_of

MAX_BUDGET_RATIO = 2
"""Most candidates per wanted trajectory: M_up = 2 M of DARTS Eq. 5 and Eq. 9."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The plan of one prompt's group."""

    group_size: int
    """Trajectories to return, M of DARTS."""
    redundancy: int = 0
    """Spare candidates, M' - M of DARTS."""
    early_stop: bool = True
    selection: SelectionRule = "first"
    num_longest: int = 0
    """Longest trajectories of a dual-end selection, L. The other group_size - L are the shortest."""
    parts: Mapping[str, PartTerms] = field_of(default_factory=dict, hash=False)
    """Terms with parts, by part."""
    patience: float | None = None
    """Once `group_size` valid candidates have finished, the others may have this many times the tokens of the longest
    of them. None: the whole pool runs to its end."""
    num_replaceable: int = 0
    """Lost candidates that may be replaced."""
    audit: bool = False
    """True if no candidate is stopped, so that statistics of the group are true of the policy
    (`parts/pruning/rules/audit.py`)."""

    @property
    def pruning(self) -> Pruning | None:
        """Fields by which candidates are scored and stopped. None: no part does that."""
        return pruning_of(self.parts)

    @property
    def num_candidates(self) -> int:
        """All candidates, M' of DARTS."""
        return self.group_size + self.redundancy

    @property
    def terms(self) -> GroupTerms:
        """Terms that every candidate of the group is launched with."""
        return GroupTerms(
            self.group_size, self.num_candidates, self.early_stop, self.patience, self.num_replaceable, self.parts
        )

    @property
    def returns_all(self) -> bool:
        """True if every candidate that survives pruning is returned.

        The chance to be returned is then the survival probability. In a race that chance is unknown.
        """
        return self.redundancy == 0

    def audited(self) -> GroupPlan:
        """Return the plan of the same prompt as an audit group."""
        parts = {name: terms.audited(races=not self.returns_all) for name, terms in self.parts.items()}
        return GroupPlan(self.group_size, parts=parts, num_replaceable=self.num_replaceable, audit=True)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The plan of one prompt, and the reasons for it."""

    group: GroupPlan
    key: str
    """The prompt's name across rollouts (`kernel/rules/prompt_key.py::history_key`)."""
    lengths: Any = None
    """Expected lengths of its answers, as a part knows them. None if unknown or not needed."""
    allocation: Any = None
    """Reasons for its number of candidates: a dataclass with fields of `Allocation`. None if the request sets it."""

    def audited(self) -> PromptPlan:
        """A copy of this plan for an audit group."""
        return replace(self, group=self.group.audited())


@dataclass(frozen=True, slots=True)
class GroupJoin(GroupTerms):
    """The terms of a group that several requests of a client form, as one of these requests states them."""

    name: str | None = None
    """Name of the group within its namespace and prompt. None: the open group of its prompt
    (`kernel/rules/prompt_groups.py`)."""
    namespace: str = ""
    """Name of the client's run. Two runs may use the same group names."""

    def with_audits(self, ratio: float) -> GroupJoin:
        """These terms, of which this share of groups is audited if they prune."""
        return replace(self, parts={name: terms.with_audits(ratio) for name, terms in self.parts.items()})


def make_plan(
    group_size: int,
    redundancy: int = 0,
    early_stop: EarlyStop = None,
    selection: SelectionRule = "first",
    num_longest: int | None = None,
    parts: Mapping[str, PartTerms] | None = None,
    patience: float | None = None,
    *,
    max_candidates: int,
    names: Mapping[str, str] | None = None,
) -> GroupPlan:
    """Check the fields of one group and return its plan.

    `max_candidates` is the engine's `max_num_seqs`. If a group's candidates could not all run at once, the queue would
    decide its race. `names` maps field names to those that the user wrote (`rollout_redundancy` in xargs).

    Raises: PlanError with field, value, allowed range and remedy.
    """
    named, parts = names or {}, parts or {}

    def name(field: str) -> str:
        return named.get(field, field)

    said = {
        "group_size": group_size,
        "redundancy": redundancy,
        "early_stop": early_stop,
        "selection": selection,
        "num_longest": num_longest,
        "patience": patience,
    }
    said = {field: value for field, value in said.items() if value is not None}
    for field, value in said.items():
        ROWS[field].read(value, name(field))
    num_candidates = group_size + redundancy
    if num_candidates > max_candidates:
        raise PlanError(
            name("redundancy") if redundancy else name("group_size"),
            f"{name('group_size')} + {name('redundancy')} must be at most the server's max_num_seqs "
            f"({max_candidates}), got {group_size} + {redundancy} = {num_candidates}. "
            f"Ask for fewer candidates or start the server with --max-num-seqs {num_candidates}.",
        )
    for terms in parts.values():
        terms.check(group_size, num_candidates, name("redundancy"), named)
    if selection != "dual_end":
        for field in rows(DualEndFields):
            if field in said:
                raise PlanError(name(field), f"only applies to selection dual_end, got selection {selection!r}.")
        return GroupPlan(group_size, redundancy, early_stop is not False, selection, parts=parts)
    num_longest = default_num_longest(group_size) if num_longest is None else num_longest
    if num_longest >= group_size:
        raise PlanError(
            name("num_longest"),
            f"must be below {name('group_size')} ({group_size}), got {num_longest}: the other "
            f"{name('group_size')} - {name('num_longest')} trajectories are the shortest, and of those a dual-end "
            f"selection needs one. Leave it out for {default_num_longest(group_size)}.",
        )
    if early_stop is True:
        raise PlanError(
            name("early_stop"),
            "cannot be true with selection dual_end: the longest of the pool are known only when the whole pool has "
            'ended. Set it to "auto" (stop early where redundancy "auto" finds an extreme tail) or to false, bound '
            f"the wait with {name('patience')}, or select first or shortest.",
        )
    return GroupPlan(group_size, redundancy, False, selection, num_longest, parts, patience)


def make_join(join: GroupJoin, *, max_candidates: int, names: Mapping[str, str] | None = None) -> GroupJoin:
    """Check the group fields of a request that joins a group. `max_candidates` and `names` are those of `make_plan`.

    Raises: PlanError with field, value, allowed range and remedy.
    """
    named = names or {}
    size, number = named.get("group_size", "group_size"), named.get("num_candidates", "num_candidates")
    ROWS["group_size"].check(join.group_size, size)
    ROWS["num_candidates"].check(join.num_candidates, number)
    if not join.group_size <= join.num_candidates <= max_candidates:
        raise PlanError(
            number if join.group_size <= max_candidates else size,
            f"{number} counts all siblings and must be between {size} ({join.group_size}) and the server's "
            f"max_num_seqs ({max_candidates}), got {join.num_candidates}. Send fewer or start the server with a larger "
            "--max-num-seqs.",
        )
    for terms in join.parts.values():
        terms.check(join.group_size, join.num_candidates, number, named)
    return join


def upper_bound(group_size: int, max_candidates: int) -> int:
    """Most candidates of one prompt: M_up of DARTS Eq. 5, but at most `max_candidates`."""
    return min(MAX_BUDGET_RATIO * group_size, max_candidates)


def default_num_longest(group_size: int) -> int:
    """L of a dual-end selection: one, or zero if `group_size` is 1."""
    return min(1, group_size - 1)

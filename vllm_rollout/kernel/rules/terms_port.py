"""The port of parts in the terms of groups: the face `terms`.

A part makes its terms from the fields of a request (`kernel/part_terms.py`). Plans and tags carry them, by part.

    TermsPart  given         fields of the part's table are in a request, with values not read yet
               terms         the values of these fields are read
               audits        a group of an answer is about to start
    PartTerms  check         the group's plan is made
               audited       the group becomes an audit group
               with_audits   the audit is drawn when the group's first candidate arrives
               said          a candidate outside a rollout is about to start
               resumed       a candidate goes on with tokens of an earlier round
               pruning, scored_lengths: at any time

Invariant: the kernel asks terms by these names only.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

from vllm_rollout.kernel.rules.rewards import AnswerName


class Origin(NamedTuple):
    """The origin of a candidate outside a rollout: a group of one request, or a request that joins a group."""

    group_id: str
    content: str
    """Digest of its prompt."""
    seed: int | None
    """Seed of the request. None: it has none."""
    answer: AnswerName | None = None
    """Name of a candidate that is an answer itself."""
    parent: AnswerName | None = None
    """Second name of a candidate that may be one of several choices of a request, by the name of that request."""


class Pruning(Protocol):
    """Fields by which candidates are scored and stopped."""

    @property
    def detection_length(self) -> int:
        """Output tokens after which a candidate is scored."""

    @property
    def mode(self) -> Literal["active", "shadow"]:
        """In mode "shadow" no candidate is stopped."""

    @property
    def allow_fewer(self) -> bool:
        """True if so many candidates may be stopped that fewer than `group_size` are left."""


class PartTerms:
    """Terms of a group with one part. They travel on tags, in the type that the face `wire` has for them."""

    __slots__ = ()

    @property
    def pruning(self) -> Pruning | None:
        """Fields by which candidates are scored and stopped. None: the part does not do that."""
        return None

    @property
    def scored_lengths(self) -> Sequence[int]:
        """All detection lengths at which a candidate is scored, ascending."""
        return ()

    def check(self, group_size: int, num_candidates: int, spare_field: str, names: Mapping[str, str]) -> None:
        """Check the terms against a plan. `spare_field`: the field of spare candidates, as the user wrote it.

        Raises: PlanError.
        """

    def audited(self, races: bool) -> Self:
        """The terms of an audit group. `races`: the group would race without the audit."""
        return self

    def with_audits(self, ratio: float) -> Self:
        """These terms, of which this share of groups is audited."""
        return self

    def said(self, origin: Origin) -> Any | None:
        """The value of a candidate outside a rollout for the part."""
        return None

    def resumed(self, said: Any, num_tokens: int, survival: float) -> Any:
        """The value of a candidate that goes on. `num_tokens`, `survival`: those of its earlier rounds."""
        return said


class TermsPart:
    """A part that has terms with groups. An engine client keeps one of its own, since `audits` counts."""

    table: ClassVar[type]
    """Table of the fields that the part reads."""

    def given(self, fields: Collection[str], names: Mapping[str, str]) -> None:
        """Check which fields are given. Raises: PlanError if they need another one."""

    def terms(self, fields: Mapping[str, Any], names: Mapping[str, str]) -> PartTerms:
        """The terms of these fields. `names`: field -> name as the user wrote it. Raises: PlanError."""
        raise NotImplementedError

    def audits(self, kind: Hashable, ratio: float, request: str, first: str) -> bool:
        """True if the groups of an answer are audited, a share `ratio` of its kind. All groups of an answer get the
        same result.

        `request`: the request of one group. `first`: the first request of the same answer.
        """
        return False


def pruning_of(parts: Mapping[str, PartTerms]) -> Pruning | None:
    """Fields by which candidates are scored and stopped, in the terms with parts. None: no part does that."""
    return next((pruning for terms in parts.values() if (pruning := terms.pruning) is not None), None)


def said_of(parts: Mapping[str, PartTerms], origin: Origin) -> dict[str, Any]:
    """The values of a candidate outside a rollout for parts, by part."""
    said = {name: terms.said(origin) for name, terms in parts.items()}
    return {name: value for name, value in said.items() if value is not None}


def resumed_of(
    parts: Mapping[str, PartTerms], said: Mapping[str, Any], num_tokens: int, survival: float
) -> dict[str, Any]:
    """The values of a candidate that goes on, by part."""
    return {name: parts[name].resumed(value, num_tokens, survival) for name, value in said.items() if name in parts}

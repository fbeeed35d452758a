"""The field, the terms of a group, and the rule in an engine's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_rollout.kernel.rules.keys import Key
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.rows import Number, PlanError, row
from vllm_rollout.kernel.rules.step import Phase, Step, StepPart
from vllm_rollout.kernel.rules.terms_port import PartTerms, TermsPart
from vllm_rollout.kernel.rules.types import CandidateId

NAME = "stragglers"


@dataclass(frozen=True)
class StragglerFields:
    straggler_factor: float | None = row(
        Number(1, 100),
        "Whenever a candidate ends, spare siblings that have this many times the tokens of the longest ended one stop.",
        default=None,
    )


@dataclass(frozen=True, slots=True)
class StragglerTerms(PartTerms):
    """Terms of a group with the field. Overrides: check."""

    factor: float

    def check(self, group_size: int, num_candidates: int, spare_field: str, names: Mapping[str, str]) -> None:
        if num_candidates == group_size:
            field = names.get("straggler_factor", "straggler_factor")
            raise PlanError(field, f"only spare candidates stop, and there are none. Ask for some ({spare_field}).")


class StragglerRequests(TermsPart):
    """Requests with the field. Overrides: terms."""

    table = StragglerFields

    def terms(self, fields: Mapping[str, Any], names: Mapping[str, str]) -> StragglerTerms:
        return StragglerTerms(fields["straggler_factor"])


TERMS: Key[StragglerTerms] = Key(NAME)
ON_THE_WIRE = {"terms": StragglerTerms}


class StragglerStep(StepPart):
    """The rule for all groups of one engine. Overrides: phases."""

    name = NAME

    def phases(self) -> Mapping[Phase, Callable[[Step], None]]:
        return {"settled": self._decide}

    def _decide(self, step: Step) -> None:
        for group_id in {ended.id.group_id for ended in step.ended}:
            step.alone(group_id, _stop_stragglers, step, group_id)


def _stop_stragglers(step: Step, group_id: str) -> None:
    group = step.touched[group_id]
    terms = TERMS.of(group.terms.parts)
    if terms is None or not group.longest:
        return
    lengths = {index: step.num_tokens(CandidateId(group_id, index)) for index in group.running}
    too_long = [index for index, length in lengths.items() if length >= terms.factor * group.longest]
    too_long.sort(key=lambda index: lengths[index], reverse=True)
    if stopped := too_long[: num_spare(group)]:
        step.rule_out(group_id, stopped, "surplus")


def num_spare(group: Group) -> int:
    """Running candidates without which the group can still be complete."""
    return max(0, group.num_finished + group.num_running + group.num_to_come - group.terms.group_size)

"""The field in the body of a rollout."""

from __future__ import annotations

from stragglers.rules import StragglerFields
from vllm_rollout.kernel.http.body import PartFields, of_table
from vllm_rollout.kernel.part_terms import terms_of
from vllm_rollout.kernel.rules.terms_port import PartTerms


@of_table
class StragglerBody(PartFields, StragglerFields):
    straggler_factor: float | None

    def part_terms(self) -> dict[str, PartTerms]:
        fields = {} if self.straggler_factor is None else {"straggler_factor": self.straggler_factor}
        return {**super().part_terms(), **terms_of(StragglerFields, fields, {})}

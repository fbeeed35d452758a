"""The field of pruning in the body of a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from vllm_rollout.kernel.http.body import Body, PartFields, of_table
from vllm_rollout.kernel.part_terms import terms_of
from vllm_rollout.kernel.rules.terms_port import PartTerms
from vllm_rollout.parts.pruning.rules.fields import PruningFields, RolloutPruningFields


@of_table
class Pruning(Body, PruningFields):
    """Score each candidate at `detection_length` and stop those that will not help training."""

    @model_validator(mode="before")
    @classmethod
    def _several_lengths_are_compared(cls, said: Any) -> Any:
        """Make shadow mode the default for several lengths. It is written out here, since a run also stores fields
        with their defaults."""
        if isinstance(said, dict) and isinstance(lengths := said.get("detection_length"), list) and len(lengths) > 1:
            return {"mode": "shadow", **said}
        return said


@of_table
class PrunedFields(PartFields, RolloutPruningFields):
    pruning: Pruning | None

    example: ClassVar[Mapping[str, Any]] = {
        **PartFields.example,
        "pruning": {"detection_length": 64, "keep_ratio": 0.5},
    }

    def part_terms(self) -> dict[str, PartTerms]:
        if self.pruning is None:
            return super().part_terms()
        names = {field: f"pruning.{field}" for field in Pruning.model_fields}
        terms = terms_of(PruningFields, self.pruning.model_dump(exclude_unset=True), names)
        return {**super().part_terms(), **terms}

    @property
    def allows_fewer_by(self) -> str | None:
        allows = self.pruning is not None and self.pruning.allow_fewer
        return "pruning.allow_fewer" if allows else super().allows_fewer_by

"""Terms of groups with pruning, from the fields of a request to the tags of its candidates."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_rollout.kernel.rules.prompt_key import KEY_OF_TOKENS, digest_of, seed_for
from vllm_rollout.kernel.rules.rows import PlanError
from vllm_rollout.kernel.rules.terms_port import Origin, PartTerms, TermsPart
from vllm_rollout.parts.pruning.rules.audit import AnswerAudits
from vllm_rollout.parts.pruning.rules.fields import PruningFields
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan, make_pruning_plan


@dataclass(frozen=True, slots=True)
class PruningTerms(PartTerms):
    """Terms of a group with pruning.

    Overrides: pruning, scored_lengths, check, audited, with_audits, said, resumed."""

    plan: PruningPlan
    audit_ratio: float = 0.0
    """Share of such groups that are audited, if the audit is drawn when the first candidate arrives."""

    @property
    def pruning(self) -> PruningPlan:
        return self.plan

    @property
    def scored_lengths(self) -> Sequence[int]:
        return self.plan.scored_lengths

    def check(self, group_size: int, num_candidates: int, spare_field: str, names: Mapping[str, str]) -> None:
        """Raises: PlanError if no candidate could ever be pruned."""
        plan = self.plan
        if plan.mode == "shadow" or plan.keep_ratio == 1 or plan.allow_fewer or num_candidates != group_size:
            return
        allow_field = names.get("allow_fewer", "allow_fewer")
        raise PlanError(
            allow_field,
            f"nothing could ever be pruned: all {num_candidates} candidates are needed for a group of {group_size}. "
            f"Ask for spare candidates ({spare_field}), or set {allow_field} to true for smaller groups.",
        )

    def audited(self, races: bool) -> PruningTerms:
        return PruningTerms(self.plan.audited(races))

    def with_audits(self, ratio: float) -> PruningTerms:
        return PruningTerms(self.plan, ratio)

    def said(self, origin: Origin) -> Scoring:
        """In the ledger the group counts as a rollout of its own. A seeded request gets the same verdicts each time,
        others do not."""
        group_id, content, seed, answer, parent = origin
        seed = secrets.randbits(62) if seed is None else seed_for(seed, content)
        return Scoring(group_id, content, seed, answer, parent, _key_of_content(content))

    def resumed(self, said: Scoring, num_tokens: int, survival: float) -> Scoring:
        return replace(said, num_resumed=num_tokens, survival_before=survival)


class PruningRequests(TermsPart):
    """Requests with fields of pruning. Overrides: given, terms, audits."""

    table = PruningFields

    def __init__(self) -> None:
        self._audits = AnswerAudits()

    def given(self, fields: Collection[str], names: Mapping[str, str]) -> None:
        if "detection_length" not in fields:
            raise PlanError(
                names[next(iter(fields))],
                f"needs {names['detection_length']}, which turns pruning on: output tokens after which a candidate is "
                "scored.",
            )

    def terms(self, fields: Mapping[str, Any], names: Mapping[str, str]) -> PruningTerms:
        return PruningTerms(make_pruning_plan(fields, names))

    def audits(self, kind: Hashable, ratio: float, request: str, first: str) -> bool:
        return self._audits.take(kind, ratio, request, first)


def _key_of_content(content: str) -> str:
    """The name, over all groups, of a prompt with this content name. Empty for a prompt without token ids.

    They cannot be distinguished. If the prompt has images or other parts, these are part of its name.
    """
    tokens, _, rest = content.partition("/")
    if tokens == digest_of(()) or len(tokens) != len(digest_of(())):
        return ""
    return f"{KEY_OF_TOKENS}{digest_of([*map(ord, content)]) if rest else tokens}"

"""The `pruning` object of `POST /v1/rollouts`. Invariant: its defaults are those of PruningPlan."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, StrictBool, StrictFloat, StrictInt, Tag

from vllm_rollout.config import MAX_DETECTION_LENGTH, MAX_TRIAL_LENGTHS, TRIAL_LENGTHS
from vllm_rollout.group.pruning_plan import (
    MAX_MIN_LABELS,
    MAX_STRENGTH,
    PruningMode,
    PruningPlan,
    PruningRule,
    make_pruning_plan,
)
from vllm_rollout.group.types import Signal
from vllm_rollout.server.body import Body

DEFAULTS = PruningPlan(detection_length=1)


def _form(value: object) -> str:
    return "<name>" if isinstance(value, str) else "<list>" if isinstance(value, list) else "<number>"


_Length = Annotated[StrictInt, Field(ge=1, le=MAX_DETECTION_LENGTH)]
DetectionLength = Annotated[
    Annotated[_Length, Tag("<number>")]
    | Annotated[list[_Length], Field(min_length=1, max_length=MAX_TRIAL_LENGTHS), Tag("<list>")]
    | Annotated[Literal["auto"], Tag("<name>")],
    Discriminator(_form),
]


class Pruning(Body):
    """Score each candidate at `detection_length` and stop those that will not help training."""

    detection_length: DetectionLength = Field(
        description="Output tokens after which a candidate is scored, L_detect: an integer from 1 to "
        f"{MAX_DETECTION_LENGTH}. One that ends before is not scored and is kept. A list of up to "
        f"{MAX_TRIAL_LENGTHS} of them scores at each and stops nobody (mode shadow), for GET "
        '/v1/quality_head/detection_lengths to compare. "auto" is the length that is recommended there; until there is '
        f"one it compares {', '.join(map(str, TRIAL_LENGTHS))}.",
    )
    rule: PruningRule = Field(
        default=DEFAULTS.rule,
        description='All keep keep_ratio of the candidates. "gradient" steers where a group would end without reward '
        'variance and prunes at random elsewhere; "balance" steers survivors towards target_positive_ratio; "paper" is '
        "ARRoL's Eq. 2 as printed.",
    )
    keep_ratio: Annotated[StrictFloat, Field(gt=0, le=1)] = Field(
        default=DEFAULTS.keep_ratio,
        description="Share of scored candidates to keep on average, a number in (0, 1] that min_survival and "
        "max_survival allow; 1 scores and keeps everything.",
    )
    target_positive_ratio: Annotated[StrictFloat, Field(gt=0, lt=1)] = Field(
        default=DEFAULTS.target_positive_ratio,
        description="Success rate wanted among survivors by balance and paper, a number in (0, 1).",
    )
    strength: Annotated[StrictFloat, Field(ge=0, le=MAX_STRENGTH)] = Field(
        default=DEFAULTS.strength,
        description="Lambda of the paper's rule, a number in [0, 1000]; the other rules find their own.",
    )
    min_survival: Annotated[StrictFloat, Field(gt=0, le=1)] = Field(
        default=DEFAULTS.min_survival,
        description="No candidate is kept with a smaller probability, a number in (0, max_survival].",
    )
    max_survival: Annotated[StrictFloat, Field(gt=0, le=1)] = Field(
        default=DEFAULTS.max_survival,
        description="No candidate is kept with a larger probability, a number in [min_survival, 1].",
    )
    mode: PruningMode = Field(
        default=DEFAULTS.mode,
        description='"active", or "shadow": decide and report (would_prune), stop nothing.',
    )
    signal: Signal = Field(
        default=DEFAULTS.signal,
        description='What to judge by: "head", the quality head (trace confidence stands in while it knows too '
        'little), or "confidence".',
    )
    allow_fewer: StrictBool = Field(
        default=DEFAULTS.allow_fewer,
        description="Prune even when fewer than group_size candidates are left to finish; the group is then complete "
        "with those.",
    )
    min_labels: Annotated[StrictInt, Field(ge=1, le=MAX_MIN_LABELS)] = Field(
        default=DEFAULTS.min_labels,
        description="Positive and negative rewards, of each kind, before anything is pruned: an integer from 1 to "
        f"{MAX_MIN_LABELS}.",
    )
    final_score: StrictBool = Field(
        default=DEFAULTS.final_score,
        description="Score trajectories by their last token as well (final_score), by a quality head of its own, which "
        "learns from the same rewards; for votes.",
    )

    def plan(self) -> PruningPlan:
        """Raises: PlanError that names the field as it stands in the body."""
        names = {field: f"pruning.{field}" for field in type(self).model_fields}
        return make_pruning_plan(self.model_dump(exclude_unset=True), names)

"""What the candidates of a group agree on."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_rollout.group.plans.pruning_plan import PruningPlan


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """What all candidates of a group agree on; whoever joins it must name the same."""

    group_size: int
    """Trajectories wanted, M."""
    num_candidates: int
    """M'."""
    early_stop: bool = True
    """Give the others up when `group_size` usable candidates have finished."""
    patience: float | None = None
    """The factor of `Group.length_cap`, without early stop."""
    pruning: PruningPlan | None = None
    num_replaceable: int = 0
    """Lost candidates that may be replaced, each by one more launch."""
    audit_ratio: float = 0.0
    """Share of such groups that are audited (`group/judging/audit.py`), where that is drawn when the first candidate
    comes."""

    @property
    def races(self) -> bool:
        """Who is slow loses a place to others."""
        return self.num_candidates > self.group_size

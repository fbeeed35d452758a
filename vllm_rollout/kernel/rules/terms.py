"""Terms that all candidates of a group share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """Terms that all candidates of a group share. A request that joins the group must state the same terms."""

    group_size: int
    """Trajectories wanted, M of DARTS."""
    num_candidates: int
    """Candidates of the group, M' of DARTS."""
    early_stop: bool = True
    """Stop the others when `group_size` usable candidates have finished."""
    patience: float | None = None
    """The factor of `Group.length_cap`. Used without early stop."""
    num_replaceable: int = 0
    """Lost candidates that may be replaced, each by one more launch."""
    parts: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Terms with parts, by part."""

    @property
    def races(self) -> bool:
        """True if the group has spare candidates, so that slow ones may lose their place."""
        return self.num_candidates > self.group_size

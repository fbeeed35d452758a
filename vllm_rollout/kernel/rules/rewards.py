"""Rewards of trajectories: those that a client posts, and grades, which the server computes.

Invariant: a posted reward names exactly one candidate, and no client can name another client's.
"""

from __future__ import annotations

from dataclasses import dataclass
from json import dumps
from typing import Literal, NamedTuple

GradeStatus = Literal["ok", "timeout", "error", "void"]
"""Status of a grade.

`timeout`: grading took longer than the test case may, and the reward is 0. `error`: the grader failed, and there is
no reward. `void`: the fault is not the policy's, and the trajectory does not count."""

Estimator = Literal["grpo", "rloo", "mean"]
"""`grpo`: divided by the standard deviation (DeepSeekMath 4.1). `rloo`: against the mean of the others (Ahmadian et
al. 2024). `mean`: against the mean of all (Dr. GRPO)."""


@dataclass(frozen=True, slots=True)
class Grade:
    """Result of grading one trajectory."""

    status: GradeStatus
    reward: float | None = None
    """A finite number with `ok`, 0 with `timeout`, else None."""
    reason: str | None = None
    """Reason why the status is not `ok`, in a sentence."""
    parts: dict[str, float] | None = None
    """Parts of the reward by name, if the function gives them."""
    seconds: float = 0.0
    """Duration of grading, without the time spent waiting for a free core."""


RewardStatus = Literal["accepted", "duplicate", "conflict", "unknown", "unfinished", "unscored"]
"""Status of a posted reward.

accepted    calibration and head learn from it
duplicate   the same reward came before, and nothing changes
conflict    another reward came before, and stays
unknown     no such candidate, or one that has been forgotten
unfinished  the candidate is running, or was stopped (pruned, surplus, failed): no reward is expected
unscored    the candidate ended before it was scored: only the success of its prompt is learned
"""


class Reward(NamedTuple):
    """The reward of one trajectory, as the client posted it."""

    prompt_id: str
    index: int  # type: ignore[assignment]  # of a tuple's methods nobody here needs `index`
    reward: float
    positive: bool
    """True if the reward is above the threshold: the label for calibration and head."""


class NamedReward(NamedTuple):
    """A reward, and the kind of id that names its candidate."""

    by: Literal["rollout", "group", "request"]
    """Kind of the id.

    rollout  a rollout's id, with the prompt's id beside the index
    group    the id of one group of a rollout, after OWNER/ if the rollout's id has an owner
    request  the id of a request that was a group, or one candidate of it, with the choice in its answer as index
    """
    id: str
    reward: Reward
    """Its prompt id is used only if `by` is "rollout"."""


EVERYBODY = "*"
"""Client of a request whose client is unknown. Any client may name such a request."""


def request_name(client: str, request_id: str, namespace: str = "") -> str:
    """Name of a request, unique among all clients. Clients with the same key are one client. `namespace`: from the
    request."""
    return dumps([client, namespace, request_id])  # ASCII, and no id can look like another client's


class AnswerName(NamedTuple):
    """Name of a candidate in a reward: an answer and a choice in it. Or the name of the first of several candidates."""

    name: str
    choice: int = 0

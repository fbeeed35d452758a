"""Arms of the comparison: the group's plan, the bound on staleness, and what an update of weights does to rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.feeds.rules.feed import FeedTerms, OnStale

BATCH, GROUP_SIZE = 16, 8
DETECTION_LENGTH = 32
"""Sampled tokens after which pruning scores a candidate. They stand for 512 tokens, as in ARRoL."""


@dataclass(frozen=True, slots=True)
class Arm:
    title: str
    plan: GroupPlan = field(default_factory=lambda: GroupPlan(GROUP_SIZE))
    max_staleness: int = 0
    """0: on policy. All devices roll out, then all train."""
    on_stale: OnStale = "wait"
    in_batches: bool = False
    """True for one step off: a batch starts when the one before was taken, and weights change between batches."""
    recompute: bool = False
    """Compute the KV of running answers again at each update. Otherwise it is kept."""
    stopped_teach: bool = False
    """Candidates that a race stopped are trained on, with reward 0."""
    most_different: bool = False
    """Train on GROUP_SIZE answers of each group, those whose rewards differ most. Source: PODS (arXiv 2504.13818)."""
    prunes: bool = False
    """A quality head stops half of the candidates after DETECTION_LENGTH tokens (ARRoL)."""
    in_rounds: bool = False
    """Tail batching (RollPacker). The plan is the rounds' own."""
    truncates: bool = False
    """Truncated importance sampling in place of PPO's clipping."""

    @property
    def feed(self) -> FeedTerms:
        return FeedTerms(BATCH, self.max_staleness, self.on_stale)

    @property
    def splits_devices(self) -> bool:
        return self.max_staleness > 0


def race(num_candidates: int) -> GroupPlan:
    return GroupPlan(GROUP_SIZE, num_candidates - GROUP_SIZE)


WAIT = Arm("wait for 8 of 8")
OFF = Arm("one step off", max_staleness=1, in_batches=True)
STALE = {eta: Arm(f"staleness {eta}", max_staleness=eta) for eta in (1, 2, 4, 8)}
DUAL_END = GroupPlan(GROUP_SIZE, 8, early_stop=False, selection="dual_end", num_longest=1, patience=1.5)


def raced(arm: Arm, num_candidates: int) -> Arm:
    return replace(arm, title=f"{arm.title}, race 8 of {num_candidates}", plan=race(num_candidates))


def taught(arm: Arm) -> Arm:
    return replace(arm, title=f"{arm.title}, stopped ones trained on", stopped_teach=True)


def most_different(arm: Arm) -> Arm:
    return replace(arm, title=f"{arm.title}, most different 8 of 16", plan=GroupPlan(16), most_different=True)


def pruned(arm: Arm, title: str) -> Arm:
    return replace(arm, title=title, plan=replace(race(16), early_stop=False), prunes=True)


ARMS = {
    "wait": WAIT,
    "race": Arm("race 8 of 16", race(16)),
    "stale1": STALE[1],
    "off-race": raced(OFF, 16),
    "stale2-race12": raced(STALE[2], 12),
    "stale2": STALE[2],
    "off": OFF,
    "race10": Arm("race 8 of 10", race(10)),
    "race12": Arm("race 8 of 12", race(12)),
    "stale1-race12": raced(STALE[1], 12),
    "stale1-race16": raced(STALE[1], 16),
    "stale2-race10": raced(STALE[2], 10),
    "stale2-race16": raced(STALE[2], 16),
    "race-taught": taught(Arm("race 8 of 16", race(16))),
    "stale4": STALE[4],
    "stale2-drop": replace(STALE[2], title="staleness 2, older ones dropped", on_stale="drop"),
    "stale2-recompute": replace(STALE[2], title="staleness 2, KV recomputed", recompute=True),
    "stale2-truncated": replace(STALE[2], title="staleness 2, importance sampling", truncates=True),
    "stale2-race12-taught": taught(raced(STALE[2], 12)),
    "rounds": Arm("rounds", in_rounds=True),
    "off-rounds": replace(OFF, title="one step off, rounds", in_rounds=True),
    "dual": Arm("7 first and the longest of 16", DUAL_END),
    "different": most_different(replace(WAIT, title="wait")),
    "stale2-different": most_different(STALE[2]),
    "pruned": pruned(WAIT, "half of 16 pruned"),
    "stale2-pruned": pruned(STALE[2], "staleness 2, half of 16 pruned"),
    "off-race12": raced(OFF, 12),
    "off-race-taught": taught(raced(OFF, 16)),
    "stale1-race16-taught": taught(raced(STALE[1], 16)),
    "stale2-drop-race12": replace(
        raced(STALE[2], 12), title="staleness 2, older ones dropped, race 8 of 12", on_stale="drop"
    ),
    "stale4-race12": raced(STALE[4], 12),
    "stale8": STALE[8],
    "stale8-race12": raced(STALE[8], 12),
}
"""The first seven are the main arms."""

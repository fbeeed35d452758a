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
DUAL_END = GroupPlan(GROUP_SIZE, 8, early_stop=False, selection="dual_end", num_longest=1, patience=1.5)


def stale(eta: int, on_stale: OnStale) -> Arm:
    title = f"staleness {eta}{', older ones dropped' * (on_stale == 'drop')}"
    return Arm(title, max_staleness=eta, on_stale=on_stale)


def raced(arm: Arm, num_candidates: int) -> Arm:
    return replace(arm, title=f"{arm.title}, race 8 of {num_candidates}", plan=race(num_candidates))


def taught(arm: Arm) -> Arm:
    return replace(arm, title=f"{arm.title}, stopped ones trained on", stopped_teach=True)


def most_different(arm: Arm) -> Arm:
    return replace(arm, title=f"{arm.title}, most different 8 of 16", plan=GroupPlan(16), most_different=True)


def pruned(arm: Arm, title: str) -> Arm:
    return replace(arm, title=title, plan=replace(race(16), early_stop=False), prunes=True)


FEEDS = {
    f"stale{eta}{'-drop' * (on_stale == 'drop')}": stale(eta, on_stale)
    for on_stale in ("wait", "drop")
    for eta in (1, 2, 4, 8)
}
ARMS = {
    "wait": WAIT,
    "race10": Arm("race 8 of 10", race(10)),
    "race12": Arm("race 8 of 12", race(12)),
    "race": Arm("race 8 of 16", race(16)),
    "race-taught": taught(Arm("race 8 of 16", race(16))),
    "off": OFF,
    "off-race10": raced(OFF, 10),
    "off-race12": raced(OFF, 12),
    "off-race": raced(OFF, 16),
    "off-race-taught": taught(raced(OFF, 16)),
    **FEEDS,
    **{f"{name}-race{num}": raced(feed, num) for name, feed in FEEDS.items() for num in (10, 12, 16)},
    "stale1-race16-taught": taught(raced(FEEDS["stale1"], 16)),
    "stale2-race12-taught": taught(raced(FEEDS["stale2"], 12)),
    "stale2-recompute": replace(FEEDS["stale2"], title="staleness 2, KV recomputed", recompute=True),
    "stale2-truncated": replace(FEEDS["stale2"], title="staleness 2, importance sampling", truncates=True),
    "rounds": Arm("rounds", in_rounds=True),
    "off-rounds": replace(OFF, title="one step off, rounds", in_rounds=True),
    "dual": Arm("7 first and the longest of 16", DUAL_END),
    "different": most_different(replace(WAIT, title="wait")),
    "stale2-different": most_different(FEEDS["stale2"]),
    "pruned": pruned(WAIT, "half of 16 pruned"),
    "stale2-pruned": pruned(FEEDS["stale2"], "staleness 2, half of 16 pruned"),
}
MAIN_ARMS = [
    *("wait", "race", "race-taught", "off", "off-race", "off-race-taught"),
    *("stale1", "stale2", "stale2-drop", "stale2-race12", "stale1-race16-taught"),
]

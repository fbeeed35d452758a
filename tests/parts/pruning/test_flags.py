"""`vllm-rollout serve`: what the flags of pruning set."""

from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.parts.pruning.options import PruningOptions


def test_values_reach_the_engine_in_its_units(parsed):
    args = parsed("--rollout-feature-ring-mib", "3", "--rollout-train-budget-ms", "2", "--rollout-audit-ratio", "0.5")
    assert PruningOptions.of(args) == PruningOptions(train_budget_s=0.002, feature_ring_bytes=3 * 2**20)
    assert ServeOptions.of(args).audit_ratio == 0.5


def test_a_share_is_at_most_one(refusal):
    assert "must be in [0, 1], got '1.5'" in refusal("--rollout-audit-ratio", "1.5")
    assert "must be a positive number, got '0'" in refusal("--rollout-feature-ring-mib", "0")

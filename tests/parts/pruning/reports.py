"""Reports of learned state, for tests that have all of it in one process."""

from vllm_rollout.parts.pruning.rules.learning import Learning
from vllm_rollout.parts.pruning.rules.report import RulesReport, rules_report


def report_of(learning: Learning) -> RulesReport:
    return rules_report(learning.outcomes(), learning.num_judged, learning.num_pruned, learning.audit_report())

"""Scores in the reports of a dry run: the head says the logits of the run, and twice as much of last tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.support.dry_run import DryRun
from vllm_rollout.kernel.wire import RunnerReport
from vllm_rollout.parts.pruning.wire import LastLogits, ScoreReport


def reported(report: RunnerReport, run: DryRun, request_ids: Sequence[str], due: Sequence[str]) -> RunnerReport:
    """The report with scores. `due`: requests that reached a detection length."""
    values, versions = None, []
    if due:
        logits = np.array([run.logits.get(request_id, 0.0) for request_id in due], dtype=np.float32)
        values = np.stack([logits, *[np.nan_to_num(logits)] * 3], axis=1)
        versions = [int(logit == logit) for logit in logits]
    due_at = [run.num_sampled[request_id] for request_id in due]
    logits = np.array([run.logits.get(request_id, 0.0) for request_id in request_ids], dtype=np.float32)
    ones = np.ones(len(logits), dtype=np.int64)
    last = LastLogits(np.arange(len(logits)), 0 * ones, 2 * logits, ones)
    return ScoreReport(due, values, versions, due_at, last).added_to(report)

"""Scores of a step, from worker to scheduler."""

import pickle

import numpy as np
import pytest

from vllm_rollout.parts.pruning.rules.assessment import Confidence
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, Observation
from vllm_rollout.parts.pruning.wire import LastLogits, ScoreReport


def test_each_due_request_has_its_own_row():
    values = np.array([[0.5, 3.0, 1.5, 2.25], [np.nan, 6.0, 5.0, 5.5]], dtype=np.float32)
    report = pickle.loads(pickle.dumps(ScoreReport(["a", "b"], values, [7, 0], [8, 4])))
    assert list(report.observations()) == [
        ("a", Observation(Confidence(3.0, 1.5, 2.25), 0.5, 7, 8)),
        ("b", Observation(Confidence(6.0, 5.0, 5.5), None, 0, 4)),
    ]
    assert list(ScoreReport().observations()) == []


def test_a_report_whose_parts_do_not_fit_together_is_our_mistake():
    report = ScoreReport(["a", "b"], np.zeros((1, 4), np.float32), [1], [8])
    with pytest.raises(ValueError, match="zip"):
        list(report.observations())


def test_each_row_says_what_its_last_token_would_be_worth():
    last = LastLogits(np.array([1, 2]), np.zeros(2, np.int64), np.array([-0.5, 2.0], np.float32), np.array([3, 0]))
    report = pickle.loads(pickle.dumps(ScoreReport(last=last)))
    seen = report.last_observation(2.0, 1, 0)
    assert (seen.logit, seen.head_version, seen.detection_length) == (-0.5, 3, WHOLE)
    assert seen.confidence.mean == 2.0
    assert report.last_observation(1.0, 0, 0).logit is None
    assert report.last_observation(1.0, 2, 0).logit is None, "no head was trained"
    assert ScoreReport().last_observation(3.0, 2, 0).head_version == 0


def test_in_a_step_with_drafts_each_token_has_its_logit():
    last = LastLogits(
        np.array([0, 1, 0]), np.array([0, 0, 1]), np.array([0.5, 1.5, 2.5], np.float32), np.array([4, 4, 4])
    )
    report = ScoreReport(last=last)
    assert report.last_observation(2.0, 0, 1).logit == 2.5
    assert report.last_observation(2.0, 0, 2).logit is None, "a token that the head was not asked about"

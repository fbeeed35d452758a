"""Estimated success rate with and without audit groups, if right answers are shorter and groups race.

The device is emulated, so that the true success rate is known, and everything else is the real engine. Outcomes follow
from seeds."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Server, emulating, serve_command
from vllm_rollout.parts.emulation.fate import DrawnLengths, success_rate
from vllm_rollout.parts.emulation.settings import Settings
from vllm_rollout.parts.emulation.tokens import succeeded

DEVICE = {
    "step": {"ms": 1.0, "ms_per_request": 0.001},
    "lengths": {"log_normal": {"mean": 24, "sigma": 0.7}},
    "success": {"rate": 0.35, "log_odds_per_doubling": -1.0, "reference_length": 20},
}
"""Twice as long is a third as likely to be right, about what 0.5 in log length makes of wrong answers."""
SETTINGS = Settings.model_validate(DEVICE)
GROUP_SIZE, REDUNDANCY = 8, 8
NUM_GROUPS = 480
GROUPS_PER_ROLLOUT = 96
AUDIT_RATIO = 0.5
"""240 groups give some 1,850 labels: the audited rate is known to 0.012."""
TOLERANCE = 0.06
"""Five such errors: which completions are audited follows from the order in which they come. Races are off by 0.13."""
XARGS = {
    "rollout_redundancy": REDUNDANCY,
    "rollout_pruning_mode": "shadow",
    "rollout_signal": "confidence",
    "rollout_min_labels": 8,
}


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("audits")
    flags = ("--max-num-seqs", "1024", *emulating(folder, DEVICE), "--rollout-emulate-speed", "20")
    with Server(serve_command(tiny_model, *flags), folder / "server.log") as server:
        yield server


def true_rate(detection_length: int, num: int = 20_000) -> float:
    """True success rate of scored candidates: those that reach the detection length."""
    lengths = DrawnLengths(SETTINGS.lengths.log_normal)
    drawn = [lengths.of("", "", None, 0.5, (position + 0.5) / num) for position in range(num)]
    rates = [success_rate(SETTINGS.success, length, 0.5) for length in drawn if length >= detection_length]
    return sum(rates) / len(rates)


def prompt_of(number: int) -> list[int]:
    return [40 + number % 20, 60 + number // 20 % 20, 80 + number // 400, 7]


def learn_by_rollouts(server: Server, detection_length: int, audit_ratio: float, num_groups: int = NUM_GROUPS) -> None:
    pruning = {"detection_length": detection_length, "mode": "shadow", "signal": "confidence", "min_labels": 8}
    for first in range(0, num_groups, GROUPS_PER_ROLLOUT):
        numbers = range(first, first + GROUPS_PER_ROLLOUT)
        body = {
            "prompts": [{"id": f"p{number}", "prompt_token_ids": prompt_of(number)} for number in numbers],
            "group_size": GROUP_SIZE, "redundancy": REDUNDANCY, "pruning": pruning,
            "audit_ratio": audit_ratio, "audit_unit": "group",
            "sampling_params": {"seed": 1000, "max_tokens": 1000}, "include": [],
        }  # fmt: skip
        answer = server.rollout(**body)
        posted = server.reward(answer, lambda _, trajectory: succeeded(trajectory["token_ids"]))
        assert sum(posted["counts"].values()) == GROUPS_PER_ROLLOUT * GROUP_SIZE


def learn_by_completions(server: Server, detection_length: int, audit_ratio: float) -> None:
    xargs = {**XARGS, "rollout_detection_length": detection_length, "rollout_audit_ratio": audit_ratio}

    def complete(number: int) -> dict[str, Any]:
        body = {
            "prompt": prompt_of(number), "n": GROUP_SIZE, "seed": 1000, "max_tokens": 1000,
            "return_token_ids": True, "vllm_xargs": xargs,
        }  # fmt: skip
        return server.http.post("/v1/completions", json=body).json()

    for first in range(0, NUM_GROUPS, GROUPS_PER_ROLLOUT):
        with ThreadPoolExecutor(GROUPS_PER_ROLLOUT) as pool:
            answers = list(pool.map(complete, range(first, first + GROUPS_PER_ROLLOUT)))
        rewards = [
            {"request_id": answer["id"], "index": choice["index"], "reward": float(succeeded(choice["token_ids"]))}
            for answer in answers
            for choice in answer["choices"]
        ]
        assert len(rewards) == GROUPS_PER_ROLLOUT * GROUP_SIZE
        server.http.post("/v1/rewards", json={"rewards": rewards}).raise_for_status()


def report(server: Server, detection_length: int) -> dict[str, Any]:
    answer = server.http.get("/v1/quality_head/report", params={"detection_length": detection_length})
    answer.raise_for_status()
    return answer.json()


def test_what_races_teach_is_too_good(server: Server) -> None:
    learn_by_rollouts(server, 4, audit_ratio=0.0, num_groups=2 * GROUPS_PER_ROLLOUT)
    found = report(server, 4)
    assert found["audit"]["num_labels"] == 0
    assert found["shadow"]["positive_ratio"] > true_rate(4) + 0.08, found


@pytest.mark.parametrize(
    ("learn", "detection_length"), [(learn_by_rollouts, 5), (learn_by_completions, 6)], ids=["rollouts", "completions"]
)
def test_with_audits_the_report_says_what_is_true(server: Server, learn: Any, detection_length: int) -> None:
    counted = server.counter("vllm_rollout:audit_groups_total")
    learn(server, detection_length, AUDIT_RATIO)
    assert server.counter("vllm_rollout:audit_groups_total") - counted == pytest.approx(NUM_GROUPS / 2, abs=45)
    found = report(server, detection_length)
    true = true_rate(detection_length)
    assert found["audit"]["raced_positive_ratio"] > true + 0.08, found
    assert found["audit"]["positive_ratio"] == pytest.approx(true, abs=TOLERANCE), found
    assert found["shadow"]["num_scored"] > 1400, "what was learned cold is not in it"
    assert found["shadow"]["positive_ratio"] == pytest.approx(true, abs=TOLERANCE), found

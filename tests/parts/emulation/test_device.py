"""The device's clock, the log of its steps and what is made of it."""

import errno
import io
import json
import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner
from vllm.sampling_params import SamplingParams

from vllm_rollout.cli import app
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.emulation.command import report
from vllm_rollout.parts.emulation.device import Device, StepWork, cost_of, step_seconds
from vllm_rollout.parts.emulation.fate import Fate, Fates
from vllm_rollout.parts.emulation.settings import Settings
from vllm_rollout.parts.emulation.step_log import LoggedStep, LoggedSteps, StepLog, Summary, read_steps
from vllm_rollout.parts.emulation.tokens import PERIOD, Vocabulary, succeeded
from vllm_rollout.parts.emulation.worker.request import EmulatedRequest

TEN_MS = Settings.model_validate({"step": {"ms": 10, "ms_per_request": 0}})
ONE = StepWork(1, 1, 0)


def test_a_step_waits_for_the_one_before_and_a_late_host_leaves_the_device_idle():
    device = Device(TEN_MS)
    spans = [device.launch(now, ONE) for now in (1.0, 1.002, 1.05)]
    assert [(span.start, span.end) for span in spans] == [
        pytest.approx((1.0, 1.01)), pytest.approx((1.01, 1.02)), pytest.approx((1.05, 1.06))
    ]  # fmt: skip


@given(st.lists(st.floats(0, 0.1), min_size=1), st.sampled_from([0.25, 1.0, 4.0]))
def test_steps_take_their_time_and_never_overlap(gaps, speed):
    device, now, spans = Device(TEN_MS, speed), 5.0, []
    for gap in gaps:
        now += gap
        spans.append(device.launch(now, ONE))
    for span in spans:
        assert span.launched <= span.start
        assert span.end - span.start == pytest.approx(0.01 / speed)
    assert all(before.end <= after.start for before, after in pairwise(spans))


def step(start: float, end: float, cpu: float, goes_on: bool = True, requests: int = 2) -> LoggedStep:
    return LoggedStep(start, start, end, end, cpu, goes_on, requests, requests, 10, 0)


STEPS = [step(0, 1, 0.0, goes_on=False), step(1.5, 2.5, 0.2), step(9, 10, 0.3, goes_on=False), step(10, 11, 0.5)]


def test_idle_time_is_that_with_work_and_the_host_is_charged_between_steps_that_follow():
    summary = Summary.of(STEPS)
    assert (summary.num_steps, summary.num_following) == (4, 2)
    assert summary.busy_s == pytest.approx(4.0)
    assert summary.idle_s == pytest.approx(0.5)  # not the 6.5 s in which nothing was asked
    assert summary.busy == pytest.approx(4 / 4.5)
    assert summary.host_ms == pytest.approx(200.0)
    assert summary.device_ms == pytest.approx(1000.0)


def test_what_was_logged_is_read_by_rank_and_a_row_cut_off_is_left_out(tmp_path):
    for rank in (1, 0):
        log = StepLog(tmp_path, rank=rank, speed=0.5, say=lambda line: None)
        for row in STEPS:
            log.add(row)
        log.close()
    with (tmp_path / "steps-1.jsonl").open("a") as file:
        file.write("[1.0, 2.")
    assert read_steps(tmp_path) == [LoggedSteps(rank, 0.5, STEPS) for rank in (0, 1)]


def test_a_new_server_takes_away_the_logs_of_one_that_had_more_ranks(tmp_path):
    for rank, num_ranks in ((0, 3), (2, 3), (0, 1)):
        StepLog(tmp_path, rank=rank, speed=1.0, say=lambda line: None, num_ranks=num_ranks).close()
    assert [log.rank for log in read_steps(tmp_path)] == [0]
    for rank, num_ranks in ((1, 2), (0, 1)):
        StepLog(tmp_path, rank=rank, speed=1.0, say=lambda line: None, num_ranks=num_ranks, goes_on=True).close()
    assert [log.rank for log in read_steps(tmp_path)] == [0, 1]


def test_a_log_that_goes_on_begins_after_the_last_whole_row(tmp_path):
    for goes_on in (False, True):
        log = StepLog(tmp_path, rank=0, speed=0.5, say=lambda line: None, goes_on=goes_on)
        for row in STEPS:
            log.add(row)
        log.close()
        with (tmp_path / "steps-0.jsonl").open("a") as file:
            file.write("[1.0, 2.")
    assert read_steps(tmp_path)[0].steps[-len(STEPS) :] == STEPS


def test_a_full_disk_ends_the_log_and_not_the_engine(tmp_path, monkeypatch):
    said = []
    log = StepLog(tmp_path, rank=0, speed=0.5, say=said.append)
    log.add(STEPS[0])

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    for row in STEPS[1:]:
        log.add(row)
    log.close()
    assert said[0] == "emulated device 0: its log ends here, No space left on device"
    assert sum("ends here" in line for line in said) == 1
    assert read_steps(tmp_path)[0].steps == STEPS[:1]


def test_every_ten_seconds_a_line_is_said():
    said = []
    log = StepLog(None, rank=3, speed=1.0, say=said.append)
    for second in range(25):
        log.add(step(second, second + 0.5, second / 10))
    assert len(said) == 2
    assert "emulated device 3: 11 steps of 500.0 ms, busy for 52.4%" in said[0]
    assert "100.0 ms of CPU" in said[0]


def test_the_command_prints_a_table_and_says_what_is_wrong(tmp_path):
    runner = CliRunner()
    missing = runner.invoke(app, ["emulation-report", str(tmp_path)])
    assert missing.exit_code == 1
    (tmp_path / "steps-0.jsonl").write_text('{"rank": 0, "speed": 1, "pid": 1}\n[1, 2]\n')
    with pytest.raises(ValueError, match=r"steps-0\.jsonl:2: not a step log"):
        read_steps(tmp_path)
    texts = json.dumps(["1"] * len(LoggedStep._fields))
    (tmp_path / "steps-0.jsonl").write_text(f'{{"rank": 0, "speed": 1, "pid": 1}}\n{texts}\n')
    with pytest.raises(ValueError, match=r"steps-0\.jsonl:2: not a step log .*a step has numbers"):
        read_steps(tmp_path)
    (tmp_path / "steps-0.jsonl").write_text(
        '{"rank": 0, "speed": 1, "pid": 1}\n' + "".join(json.dumps(row) + "\n" for row in STEPS)
    )
    shown = runner.invoke(app, ["emulation-report", str(tmp_path)])
    assert shown.exit_code == 0
    assert "88.9%" in shown.output


def test_the_report_has_a_column_for_each_rank():
    console = Console(file=io.StringIO(), width=100)
    report([LoggedSteps(rank, 1.0, STEPS[: rank + 2]) for rank in range(2)], console)
    (line,) = [line for line in console.file.getvalue().splitlines() if line.startswith("│ steps")]
    assert line.split() == ["│", "steps", "│", "2", "│", "3", "│"]


@given(st.integers(8, 20_000), st.sets(st.integers(0, 5)), st.integers(0, 2**53), st.integers(1, 10**7))
def test_no_made_up_token_ends_a_sequence_and_the_last_but_one_tells_success(size, stops, salt, number):
    vocabulary = Vocabulary(size, stops)
    said = [vocabulary.cycle[(salt + number) % PERIOD], vocabulary.verdict(salt, True), vocabulary.verdict(salt, False)]
    assert all(0 <= token < size and token not in stops for token in said)
    assert succeeded([said[0], said[1], 2])
    assert not succeeded([said[0], said[2], 2])


def test_a_single_token_has_not_succeeded():
    assert not succeeded([2])


def test_a_model_without_tokens_to_say_is_refused():
    with pytest.raises(ValueError, match="needs 2 tokens that end nothing"):
        Vocabulary(4, {0, 2})


@pytest.mark.parametrize(("num_requests", "context"), [(1, 10), (64, 700), (500, 8000)])
def test_the_rules_know_what_a_step_costs(num_requests: int, context: int):
    settings = Settings.model_validate({"step": {"ms": 5, "ms_per_request": 0.03, "ms_per_context_token": 2e-5}})
    seconds = step_seconds(settings)(StepWork(num_requests, num_requests * context, 0))
    assert cost_of(settings).ptl(num_requests, context) == pytest.approx(seconds)


@pytest.mark.parametrize(("length", "min_tokens", "num_before", "found"), [
    (3, 50, 0, 51), (80, 50, 0, 80), (3, 0, 0, 3), (3, 50, 10, 61), (51, 50, 0, 51), (1, 1, 0, 2),
])  # fmt: skip
def test_a_candidate_ends_after_its_min_tokens(length, min_tokens, num_before, found):
    params = SamplingParams(max_tokens=200, min_tokens=min_tokens, stop_token_ids=[7])
    tag = CandidateTag("g", 0, GroupTerms(1, 2), 1, num_resumed=num_before)
    fate = Fate(length, succeeds=True, score=0.0, salt=3)
    fates = Fates(Settings())
    request = EmulatedRequest("g/0", [1] * (9 + num_before), params, fates, Vocabulary(1000, {7}), (), tag, fate)
    said = [request.token(number) for number in range(1, 101)]
    assert said.index(7) + 1 == found
    assert succeeded(said[:found]) == (found > 1)

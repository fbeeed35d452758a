"""A recording and its simulation beside each other on one page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from tests.kernel.http.conftest import serving
from tests.parts.page.browser import chromium, drawn, needs_browser, page_at, text
from tests.tools.simulator.traces import FLAT
from vllm_rollout.cli import app as cli
from vllm_rollout.parts.page.http.page import page_router
from vllm_rollout.parts.page.recording.file import read_trace
from vllm_rollout.parts.page.simulated import Recording
from vllm_rollout.parts.page.watching.recorded_feed import RecordedFeed
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import Pools
from vllm_rollout.simulator.replay import sweep
from vllm_rollout.simulator.settings import Setting


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two rollouts that waited for all, and their replay."""
    run, whatif = tmp_path / "run.jsonl", tmp_path / "whatif.jsonl"
    with run.open("w") as file:
        for number, longest in enumerate((90, 300)):
            lengths = [10, 20, 30, longest]
            prompts = [{"id": f"q{i}", "lengths": lengths, "ended_s": lengths, "started_s": 0.0} for i in range(3)]
            row = {"rollout_id": f"rollout-{number}", "group_size": 2, "seconds": longest, "prompts": prompts}
            file.write(f"{json.dumps(row)}\n")
    trace = read_trace(run)
    recording = Recording(trace, in_steps=False)
    sweep(Pools(trace), [Setting(2, 2, early_stop=False), Setting(2, 2)], Machine(FLAT), recording=recording)
    recording.write(whatif)
    return [run, whatif]


def page_of(*files: Path) -> FastAPI:
    app = FastAPI()
    app.include_router(RecordedFeed(*files).router())
    app.include_router(page_router())
    return app


@needs_browser
def test_what_ran_is_held_against_what_a_setting_would_have_done(files: list[Path]) -> None:
    with serving(page_of(*files)) as url, chromium() as browser, page_at(browser, f"{url}/rollouts#compare") as page:
        told = text(page, "P50, P99, longest")
        assert page.inner_text("#status") == "of the file run.jsonl, whatif.jsonl"
        assert "\tall that have run\tsetting 2x first\n" in told
        assert "rollouts\t2\t2" in told
        assert "seconds\t390.0\t40.0" in told, "each group of a race ends with its second answer"
        assert "tokens\t1,530\t420" in told
        page.select_option("main select >> nth=1", "setting 2x first waits for all")
        assert "tokens\t1,530\t1,530" in text(page, "seconds\t390.0\t390.0")
        page.select_option("main select >> nth=0", "2x first/rollout-1")
        text(page, "seconds\t20.0\t390.0")
        page.keyboard.press("1")
        page.select_option("#rollout", "2x first/rollout-1")
        text(page, "3\nof 3 groups complete")
        assert drawn(page) > 5000
        page.keyboard.press("2")
        assert "surplus\t120\t" in text(page, "where tokens went")


@needs_browser
def test_steps_without_times_are_compared_by_tokens_alone(files: list[Path]) -> None:
    trace = read_trace(files[0])
    recording = Recording(trace, in_steps=True)
    sweep(Pools(trace), [Setting(2, 2)], Machine(), recording=recording)
    recording.write(files[1])
    with serving(page_of(*files)) as url, chromium() as browser, page_at(browser, f"{url}/rollouts#compare") as page:
        assert "seconds\t390.0\t–" in text(page, "P50, P99, longest")


def test_a_file_that_is_missing_among_several_is_named(files: list[Path]) -> None:
    result = CliRunner().invoke(cli, ["watch", str(files[0]), str(files[0].with_name("none.jsonl"))])
    assert (result.exit_code, "none.jsonl: No such file or directory" in result.output) == (1, True)

"""A rehearsal of benchmarks.gpu_check without a GPU: all pieces, on small models, through the same code."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import psutil
import pytest
import vllm.envs
from vllm.engine.arg_utils import EngineArgs

from benchmarks.gpu_check.engine_child import engine_options
from benchmarks.gpu_check.pieces import ENGINES, PIECES, sources_of
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.served import FLAGS
from tests.support.waiting import wait_until
from vllm_rollout.parts.shaping.profile_file import Profile

ROOT = Path(__file__).parents[2]
REHEARSAL_S = 1800
KNOWN_OPTIONS = {field.name for field in fields(EngineArgs)}
KNOWN_VARIABLES = {*vllm.envs.environment_variables, "CUDA_LAUNCH_BLOCKING"}


@pytest.mark.parametrize("name", ENGINES)
def test_what_an_engine_is_told_exists(name: str) -> None:
    settings = ENGINES[name]
    assert set(engine_options(settings)) <= KNOWN_OPTIONS
    assert set(settings.environment) <= KNOWN_VARIABLES


def test_what_servers_are_told_exists() -> None:
    flags = {flag.removeprefix("--").replace("-", "_") for flag in FLAGS if flag.startswith("--")}
    assert flags - {"disable_uvicorn_access_log"} <= KNOWN_OPTIONS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of a rehearsal that was killed while a piece with engines ran, and then continued."""
    folder = tmp_path_factory.mktemp("gpu_check")
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--output", str(folder)]
    command += ["--minutes", str(REHEARSAL_S / 60)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("race: "):
        assert process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    wait_until(lambda: not [child for child in children if child.is_running()])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=REHEARSAL_S)
    assert "overhead: passed before, with the same sources" in done.stdout, done.stdout + done.stderr
    return folder


@pytest.mark.timeout(2 * REHEARSAL_S)
@pytest.mark.parametrize("name", PIECES)
def test_a_piece_passes(folder: Path, name: str) -> None:
    record = Record(folder / "lease.jsonl")
    of_piece = [line for line in record.lines() if line.get("piece") == name and line["kind"] in ("check", "end")]
    assert record.ended(name, sources_of(name, "cpu")) == "passed", json.dumps(of_piece, indent=1)


def test_the_profile_is_one_that_simulations_take(folder: Path) -> None:
    profile = Profile.read(folder / "ptl.json")
    assert profile.fits
    assert profile.cost().ptl(4, 128) > 0


def test_the_summary_says_that_it_is_none_of_a_gpu(folder: Path) -> None:
    said = (folder / "summary.md").read_text()
    assert "A rehearsal: sizes are small" in said
    assert all(f"| {name} | passed |" in said for name in PIECES)

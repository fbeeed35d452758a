"""examples/recipes, as a user runs them: TRL's scripts with their diffs, for two steps of a small model.

On a CPU the trainers of the others end before a step: the kit tries what their diffs turn on (`make conformance`).
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from conformance.__main__ import environment_of
from tests.engine.conftest import TIMEOUT_S, Server, serve_command
from tests.examples.test_recipes import RECIPES, ROOT, patched

FLAGS = (
    "--max-model-len",
    "512",
    "--dtype",
    "float32",
    "--logprobs-mode",
    "processed_logprobs",
    "--max-logprobs",
    "-1",
)
NUM_COMPLETIONS, REDUNDANCY = 16, 8
"""Completions of a step, and spare candidates of each of its two groups."""


@pytest.fixture(scope="module")
def python() -> Path:
    """Python of TRL's environment."""
    return environment_of("trl")[0]


def run(python: Path, name: str, folder: Path, *arguments: str) -> str:
    """Output of the patched script. Raises: AssertionError with the end of its output when it fails."""
    (recipe,) = (recipe for recipe in RECIPES if recipe.name == name)
    script = patched(recipe, folder)
    done = subprocess.run(
        [str(python), "-m", "conformance.trl.on_cpu", str(script), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    return said


def test_a_colocated_trainer_races(python: Path, tiny_model: str, tmp_path: Path) -> None:
    said = run(python, "trl_colocated", tmp_path, tiny_model)
    assert len(re.findall(r"'reward': ", said)) == 2
    assert f"have {REDUNDANCY} spare candidates; max_num_seqs is {NUM_COMPLETIONS + 2 * REDUNDANCY}" in said


def test_a_trainer_at_a_server_races(python: Path, tiny_model: str, tmp_path: Path) -> None:
    with Server(serve_command(tiny_model, *FLAGS), tmp_path / "server.log", VLLM_SERVER_DEV_MODE="1") as server:
        said = run(python, "trl_server", tmp_path, tiny_model, server.url)
        assert len(re.findall(r"'reward': ", said)) == 2
        num = 2 * (NUM_COMPLETIONS + 2 * REDUNDANCY)
        assert server.counter("vllm:request_success_total") == num
        assert server.counter("vllm:request_success_total", finished_reason="abort") > 0

"""A rehearsal of gpu-check's engine pieces without a GPU: all in one small engine with dummy weights, in turn."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import vllm.envs
from vllm.engine.arg_utils import EngineArgs

from benchmarks.gpu_check.engine import Engine, Engines, Settings
from benchmarks.gpu_check.piece import run
from benchmarks.gpu_check.pieces import PIECES
from tests.support.waiting import WAIT_S

SMALL = {"max_num_seqs": 20, "enforce_eager": True, "block_size": 32, "dtype": "float32", "max_num_batched_tokens": 64}
PROFILE = Path(__file__).parents[2] / "benchmarks" / "results" / "ptl_profile.json"
KNOWN_OPTIONS = {field.name for field in fields(EngineArgs)}
KNOWN_VARIABLES = {*vllm.envs.environment_variables, "CUDA_LAUNCH_BLOCKING"}


class OneEngine(Engines):
    """Whatever engine is asked for, it is this one; what it was asked for must exist."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.settings = Settings(
            model="8b", options=SMALL, environment={"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
        )
        self.engine: Engine = self._stack.enter_context(super().start(self.settings))
        self.asked: list[Settings] = []

    @cached_property
    def second(self) -> Engine:
        """Where groups move to."""
        return self._stack.enter_context(Engines.start(self, self.settings))

    def start_pair(self, settings: Settings) -> Any:
        self.start(settings)
        return nullcontext((self.engine, self.second))

    def start(self, settings: Settings) -> Any:
        assert set(settings.options) <= KNOWN_OPTIONS, settings
        assert set(settings.environment) <= KNOWN_VARIABLES, settings
        self.asked.append(settings)
        return nullcontext(self.engine)

    def profile(self, model: str, *arguments: str) -> dict[str, Any]:
        """`vllm-rollout profile` has an engine test of its own; here, that its flags exist."""
        split = arguments.index("--")
        help_text = subprocess.run(
            [sys.executable, "-m", "vllm_rollout.cli", "profile", "--help"],
            capture_output=True,
            text=True,
            check=True,
            timeout=WAIT_S,
        ).stdout
        assert all(flag in help_text for flag in arguments[:split] if flag.startswith("--"))
        flags = {flag.removeprefix("--").replace("-", "_") for flag in arguments[split + 1 :] if flag.startswith("--")}
        assert flags <= KNOWN_OPTIONS
        return json.loads(PROFILE.read_text())


@pytest.fixture(scope="module")
def engines() -> Iterator[OneEngine]:
    with OneEngine() as one:
        yield one


@pytest.mark.parametrize("name", [name for name, piece in PIECES.items() if piece.starts_an_engine])
def test_a_piece_runs_to_its_end(engines: OneEngine, name: str) -> None:
    result = run(name, "cpu", engines)
    assert result["status"] == "passed", result


def test_every_kind_of_engine_was_asked_for(engines: OneEngine) -> None:
    assert {settings.kind for settings in engines.asked} == {"rollout", "stock"}
    variables = {name for settings in engines.asked for name in settings.environment}
    assert variables == {"CUDA_LAUNCH_BLOCKING", "VLLM_GPU_SYNC_CHECK", "VLLM_USE_V2_MODEL_RUNNER"}

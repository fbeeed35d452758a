"""`vllm-rollout simulate` as a command."""

import json

import pytest
import typer
from typer.testing import CliRunner

from vllm_rollout.simulator.command import simulate

app = typer.Typer()
app.command()(simulate)


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def run(invoke, tmp_path):
    """Run the command with a picture, a.png, and numbers."""
    return lambda *more: invoke(*more, "--output", tmp_path / "a.png", "--output-json", tmp_path / "a.json")


@pytest.fixture
def numbers(tmp_path):
    """Numbers of the last run."""
    return lambda: json.loads((tmp_path / "a.json").read_text())

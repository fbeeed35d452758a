"""Output of `vllm-rollout COMMAND --help`."""

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from vllm_rollout.cli import app

COMMANDS = get_command(app).commands


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"serve", "models"}))
def test_each_command_in_a_help_text_has_a_line_of_its_own(name):
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "160"}).output
    written = {line.strip() for line in COMMANDS[name].callback.__doc__.splitlines()}
    commands = {line for line in written if line.startswith("vllm-rollout ")}
    assert commands - {line.strip() for line in shown.splitlines()} == set()

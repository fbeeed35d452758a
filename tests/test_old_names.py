"""Flags whose names have changed are refused with the new name, before anything slow is imported."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.main import get_command

from tests.support.waiting import WAIT_S
from vllm_rollout import cli, old_names

LINES = [
    *((("serve", "m"), flag, new) for flag, new in old_names.SERVE.items()),
    *((("profile", "m", "--"), flag, new) for flag, new in old_names.SERVE.items()),
    *(((name,), flag, new) for name, table in old_names.COMMANDS.items() for flag, new in table.items()),
]
"""A command line, an old flag behind it, and what to write instead."""


@pytest.mark.parametrize(("line", "old", "new"), LINES)
@pytest.mark.parametrize("written", ["{}", "{}=x", "underscores"])
def test_an_old_name_is_refused_with_the_new_one(line, old, new, written, monkeypatch, capsys):
    flag = f"--{old[2:].replace('-', '_')}" if written == "underscores" else written.format(old)
    monkeypatch.setattr(sys, "argv", ["vllm-rollout", *line, flag, "x"])
    monkeypatch.setattr(cli, "app", None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"vllm-rollout {line[0]}: {old} has a new name: {new}.\n"


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["--help"],
        ["serve", "m", "--rollout-emulate", "f", "--rollout-judge-args=--out x", "--no-enable-rollout-page"],
        ["profile", "m", "--output", "p.json", "--", "--max-num-seqs", "8"],
        ["export", "t.jsonl", "--to", "tensorboard", "--output", "runs"],
        ["emulation-report", "--emulate"],
    ],
)
def test_new_names_and_other_commands_are_left_alone(line):
    assert old_names.refusal(line) is None


@pytest.mark.parametrize("name", sorted(old_names.COMMANDS.keys() - {"serve"}))
def test_new_names_of_commands_are_there_and_old_ones_are_not(name):
    flags = {flag for option in get_command(cli.app).commands[name].params for flag in option.opts}
    for old, new in old_names.COMMANDS[name].items():
        assert set(re.findall(r"--[\w-]+", new)) <= flags
        assert old not in flags


def test_an_old_name_is_refused_before_anything_slow_is_imported():
    code = (
        "import sys; from vllm_rollout import cli\nsys.argv = ['vllm-rollout', 'serve', 'm', '--emulate', 'f']\n"
        "try: cli.main()\nexcept SystemExit as ended: assert ended.code == 2\n"
        "assert not {'vllm', 'torch', 'numpy', 'fastapi'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert "--rollout-emulate" in done.stderr

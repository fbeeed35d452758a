"""Parts that are left out of a server, or of a trainer's own process: what is not there, and what is refused."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from vllm_rollout.kernel import parts
from vllm_rollout.kernel.api.flags import Flags
from vllm_rollout.kernel.parts import WITHOUT, Part


def flags_of(name: str) -> Flags:
    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group(name.title())
        group.add_argument(f"--rollout-{name}", default="")
        group.add_argument(f"--enable-rollout-{name}s", action=argparse.BooleanOptionalAction, default=True)

    def switch_on(args: argparse.Namespace) -> None:
        setattr(args, name, "switched on")

    return Flags(add, switch_on=switch_on)


APPLES, PEARS, APPLES_WITH_PEARS = map(flags_of, ("apple", "pear", "salad"))
LISTED = (
    Part(
        "apples",
        "",
        faces={"flags": f"{__name__}:APPLES"},
        also={"pears": {"flags": f"{__name__}:APPLES_WITH_PEARS"}},
    ),
    Part("jam", "", needs=("apples",)),
    Part("pears", "", faces={"flags": f"{__name__}:PEARS"}),
)


@pytest.fixture(autouse=True)
def listed(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists three parts in place of ours."""
    monkeypatch.setattr(parts, "installed_parts", lambda: {part.name: part for part in LISTED})
    parts.parts.cache_clear()


@pytest.fixture
def in_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def leave_out(names: str) -> None:
        monkeypatch.setenv(WITHOUT, names)
        parts.parts.cache_clear()

    return leave_out


def names() -> list[str]:
    return [part.name for part in parts.parts()]


def test_a_part_that_is_left_out_has_no_flag_and_switches_nothing_on(parsed):
    args = parsed()
    assert (args.rollout_apple, args.apple, args.pear, args.salad) == ("", *["switched on"] * 3)
    args = parsed("--without", "pears")
    assert not {name for name in vars(args) if "pear" in name or "salad" in name}
    assert names() == ["apples", "jam"]
    assert os.environ[WITHOUT] == "pears", "processes of the server inherit it"


def test_the_flag_comes_before_the_environment_and_may_be_repeated(parsed, in_environment):
    in_environment("pears")
    parsed()
    assert names() == ["apples", "jam"]
    parsed("--without", "jam", "--without=apples")
    assert names() == ["pears"]
    parsed("--without", "")
    assert names() == ["apples", "pears", "jam"]


def test_a_configuration_file_leaves_parts_out(parsed, refusal, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("without: pears\n")
    parsed("--config", str(config))
    assert names() == ["apples", "jam"]
    config.write_text("without: pears\nenable-rollout-pears: true\n")
    assert "--enable-rollout-pears belongs to the part pears" in refusal("--config", str(config))
    config.write_text("without: [pears, jam]\n")
    assert "write one text of names, such as drafts,page, got ['pears', 'jam']" in refusal("--config", str(config))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--without", "jam,nuts"], "--without: there is no part 'nuts'. Leave out some of: apples, jam, pears."),
        (["--without", "apples"], "the part 'jam' needs 'apples', which is left out. Leave out none of them, or all: "),
        (["--without", "apples"], "or all: apples,jam."),
        (["--without"], "argument --without: expected one argument"),
        (["--without", "pears", "--rollout-pear", "f"], "--rollout-pear belongs to the part pears, which --without"),
        (["--without", "pears", "--rollout_pear=f"], "leaves out. Leave out the flag, or keep the part."),
        (["--without", "pears", "--no-enable-rollout-pears"], "--no-enable-rollout-pears belongs to the part pears"),
        (["--without", "pears", "--rollout-salad", "f"], "--rollout-salad belongs to the part pears"),
        (["--without", "apples,jam", "--rollout-salad", "f"], "--rollout-salad belongs to the part apples"),
        (["--without", "pears", "--rollout-plum"], "unrecognized arguments: --rollout-plum"),
    ],
)
def test_what_cannot_be_left_out_is_refused_with_a_remedy(refusal, flags, said):
    assert said in refusal(*flags)


def test_what_the_environment_leaves_out_is_refused_with_a_remedy(refusal, in_environment):
    in_environment("nuts")
    assert f"{WITHOUT}: there is no part 'nuts'. Leave out some of: apples, jam, pears." in refusal()
    in_environment("pears")
    assert f"belongs to the part pears, which {WITHOUT} leaves out" in refusal("--rollout-pear", "f")


@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        ((), "the flags of the groups Rollout, Apple, Pear and Salad (--help=Rollout)"),
        (("--without", "jam,apples"), "the flags of the groups Rollout and Pear (--help=Rollout)"),
    ],
)
def test_the_help_names_the_groups_of_flags_that_are_there(parsed, capsys, flags, groups):
    with pytest.raises(SystemExit):
        parsed(*flags, "--help")
    assert groups in " ".join(capsys.readouterr().out.split())


def test_the_help_teaches_how_to_leave_parts_out(parsed, capsys):
    with pytest.raises(SystemExit):
        parsed("--help=Rollout")
    said = " ".join(capsys.readouterr().out.split())
    assert "--without PART,PART Leave these parts out" in said
    assert WITHOUT in said


def run_command(*arguments: str, without: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_rollout.cli", *arguments],
        env={**os.environ, WITHOUT: without, "COLUMNS": "200"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.skipif(not parts.installed_parts(), reason="no part is here")
def test_the_command_parts_lists_the_parts(monkeypatch):
    monkeypatch.undo()
    installed = parts.installed_parts()
    last = parts.parts()[-1]
    shown = run_command("parts", without=last.name).stdout
    cells = ([cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines())
    rows = {row[0]: row[1:] for row in cells if row}
    assert rows.keys() >= installed.keys()
    assert rows[last.name][1:] == [", ".join(last.needs), "left out"]
    others = {name: part for name, part in installed.items() if name != last.name}
    assert {rows[name][-1] for name in others} == {"yes"}


def test_a_command_with_an_unknown_name_in_the_environment_says_so():
    misspelt = run_command("parts", without="nuts")
    assert (misspelt.returncode, misspelt.stdout) == (2, "")
    assert f"vllm-rollout: {WITHOUT}: there is no part 'nuts'. Leave out some of: " in misspelt.stderr

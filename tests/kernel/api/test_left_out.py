"""`vllm-rollout serve --without PART`: flags that are not there, and what is refused with a remedy."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_rollout.kernel import parts, plugin
from vllm_rollout.kernel.api import serve
from vllm_rollout.parts.drafts.options import DraftsOptions

PARTS = "drafts, emulation, fleet, front_ends"


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.delenv(parts.WITHOUT, raising=False)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(plugin, "register", lambda: None)  # vLLM's classes stay as they are
    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)
    yield
    monkeypatch.undo()
    parts.parts.cache_clear()
    parts.exports.cache_clear()


@pytest.fixture
def parsed(tiny_model: str) -> Callable[..., Any]:
    """The arguments of a server with these flags."""
    return lambda *flags: serve.parse([tiny_model, *flags], "vllm-rollout serve", "")


@pytest.fixture
def refusal(parsed: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Error message of flags that end the start."""

    def refuse(*flags: str) -> str:
        with pytest.raises(SystemExit) as ended:
            parsed(*flags)
        assert ended.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return refuse


def names() -> set[str]:
    return {part.name for part in parts.parts()}


def test_a_part_that_is_left_out_has_no_flag_and_no_option(parsed):
    everything = names()
    args = parsed("--without", "drafts,page")
    assert names() == everything - {"drafts", "page"}
    assert not {name for name in vars(args) if "draft" in name or "page" in name or "record" in name}
    assert DraftsOptions.PART not in args.additional_config.get("vllm_rollout", {})
    assert os.environ[parts.WITHOUT] == "drafts,page", "processes of the server inherit it"


def test_the_flag_comes_before_the_environment_and_may_be_repeated(parsed, monkeypatch):
    everything = names()
    monkeypatch.setenv(parts.WITHOUT, "trainers")
    parts.parts.cache_clear()
    parsed()
    assert names() == everything - {"trainers"}
    parsed("--without", "drafts", "--without=page")
    assert names() == everything - {"drafts", "page"}
    parsed("--without", "")
    assert names() == everything


def test_a_configuration_file_leaves_parts_out(parsed, refusal, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("without: drafts\n")
    parsed("--config", str(config))
    assert "drafts" not in names()
    config.write_text("without: drafts\nenable-rollout-drafts: true\n")
    assert "--enable-rollout-drafts belongs to the part drafts" in refusal("--config", str(config))
    config.write_text("without: [drafts, page]\n")
    assert "write one text of names, such as drafts,page, got ['drafts', 'page']" in refusal("--config", str(config))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--without", "page,nothing"], f"--without: there is no part 'nothing'. Leave out some of: {PARTS}"),
        (["--without", "shaping"], "needs 'shaping', which is left out. Leave out none of them, or all: "),
        (["--without"], "argument --without: expected one argument"),
        (
            ["--without", "page", "--rollout-record", "f"],
            "--rollout-record belongs to the part page, which --without leaves out. Leave out the flag, or",
        ),
        (["--without", "page", "--no_enable_rollout_page"], "--no-enable-rollout-page belongs to the part page"),
        (["--without", "drafts", "--rollout-draft-memory-mib=3"], "--rollout-draft-memory-mib belongs to the part"),
        (["--without", "drafts", "--rollout-parts"], "unrecognized arguments: --rollout-parts"),
        (["--without", "rounds", "--rollout-parallelism", "auto"], "--rollout-parallelism belongs to the part rounds"),
    ],
)
def test_what_cannot_be_left_out_is_refused_with_a_remedy(refusal, flags, said):
    assert said in refusal(*flags)


def test_what_the_environment_cannot_mean_is_refused_with_a_remedy(refusal, monkeypatch):
    monkeypatch.setenv(parts.WITHOUT, "pages")
    parts.parts.cache_clear()
    assert f"{parts.WITHOUT}: there is no part 'pages'. Leave out some of: {PARTS}" in refusal()
    monkeypatch.setenv(parts.WITHOUT, "page")
    assert f"which {parts.WITHOUT} leaves out" in refusal("--rollout-record", "f")


def test_the_help_says_what_there_is(parsed, capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "the groups Rollout, Drafts, Emulation, " in said
    with pytest.raises(SystemExit):
        parsed("--without", "drafts", "--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "the groups Rollout, Emulation, " in said
    assert "Earlier tokens as drafts" not in said
    with pytest.raises(SystemExit):
        parsed("--help=Rollout")
    assert "--without PART,PART" in capsys.readouterr().out


def run_command(*arguments: str, without: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_rollout.cli", *arguments],
        env={**os.environ, parts.WITHOUT: without, "COLUMNS": "200", **environment},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_parts_lists_the_parts():
    listed = run_command("parts", without="drafts").stdout
    lines = ([cell.strip() for cell in line.split("│")[1:-1]] for line in listed.splitlines())
    rows = {cells[0]: cells[1:] for cells in lines if cells}
    assert rows["drafts"][-1] == "left out"
    assert rows["sessions"][1:] == ["rewards", "yes"]
    assert rows["page"][0].startswith("Shows and records rollouts")


def test_a_command_of_a_part_that_is_left_out_is_not_there(tmp_path: Path):
    refused = run_command("emulation-report", str(tmp_path), without="emulation")
    assert refused.returncode == 2
    assert "No such command 'emulation-report'" in refused.stderr
    misspelt = run_command("parts", without="nothing")
    assert (misspelt.returncode, misspelt.stdout) == (2, "")
    assert f"vllm-rollout: {parts.WITHOUT}: there is no part 'nothing'. Leave out some of: {PARTS}" in misspelt.stderr


LOOK = """
from vllm.engine.arg_utils import EngineArgs
from vllm_rollout.kernel.plugin import register
register()
print(hasattr(EngineArgs.create_engine_config, "__wrapped__"))
"""


@pytest.mark.parametrize(
    ("without", "said"), [("drafts", "True"), ("in_process", "False"), ("pages", "no part 'pages'")]
)
def test_engines_of_a_trainer_s_own_process_know_what_is_left_out(without, said):
    environment = {**os.environ, parts.WITHOUT: without, "VLLM_PLUGINS": "", "VLLM_ROLLOUT": "scheduler,worker"}
    looked = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert said in looked.stdout + looked.stderr

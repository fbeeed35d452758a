"""The command line of `vllm-rollout profile`."""

from pathlib import Path

import typer
from typer.testing import CliRunner

from vllm_rollout.profiling import command
from vllm_rollout.profiling import run as run_module

app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    pass


command.register(app)


def invoke(*arguments, columns="200"):
    return CliRunner(env={"COLUMNS": columns, "TERMINAL_WIDTH": columns}).invoke(app, ["profile", *arguments])


def asked_for(monkeypatch, *arguments):
    """The options that a command line stands for."""
    found = []
    monkeypatch.setattr(run_module, "run", found.append)
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return found[0]


def test_flags_behind_the_dashes_go_to_the_engine(monkeypatch):
    options = asked_for(monkeypatch, "some-model", "--quick", "--", "--max-num-seqs", "64", "--enforce-eager")
    assert options.model == "some-model"
    assert options.wanted.quick
    assert options.serve_flags == ("--max-num-seqs", "64", "--enforce-eager")


def test_without_a_model_it_is_the_embedded_one_also_with_flags(monkeypatch):
    options = asked_for(monkeypatch, "--", "--max-num-seqs", "64")
    assert options.model == "smollm2-135m-instruct"
    assert options.serve_flags == ("--max-num-seqs", "64")
    assert asked_for(monkeypatch).serve_flags == ()


def test_sizes_are_lists(monkeypatch):
    options = asked_for(monkeypatch, "m", "--batch-sizes", "16,32", "--contexts", "128", "--refresh", "--steps", "5")
    assert (options.wanted.batch_sizes, options.wanted.contexts) == ((16, 32), (128,))
    assert (options.refresh, options.wanted.num_steps, options.tensor_parallel_sizes) == (True, 5, (1,))


def test_a_flag_in_the_wrong_place_is_told_the_right_one():
    result = invoke("some-model", "--max-num-seqs", "64")
    assert result.exit_code == 2
    assert "no such option: --max-num-seqs" in result.output
    assert "behind --" in result.output


def test_what_is_wrong_is_one_line():
    result = invoke("some-model", "--batch-sizes", "1,x")
    assert result.exit_code == 1
    assert result.output.startswith("vllm-rollout profile: --batch-sizes must be positive whole numbers")
    assert "Traceback" not in result.output


def test_output_is_the_profile_or_the_picture_of_a_comparison(monkeypatch):
    assert asked_for(monkeypatch).output == Path("ptl.json")
    assert asked_for(monkeypatch, "--output", "mine.json").output == Path("mine.json")
    compared = []
    monkeypatch.setattr("vllm_rollout.profiling.compare.compare", lambda *paths: compared.append(paths))
    for flags in ((), ("--output", "both.png")):
        assert invoke("--compare", "a.json", "b.json", *flags).exit_code == 0
    assert compared == [(Path("a.json"), Path("b.json"), picture) for picture in (None, Path("both.png"))]
    assert "must end in .png, got a.json" in invoke("--compare", "a.json", "b.json", "--output", "a.json").output


def test_the_help_explains_measurement_flags_and_interruption():
    said = " ".join(invoke("--help").output.split())
    for named in ("median of steady steps", "three linear", "stand behind --", "continues an interrupted", "--compare"):
        assert named in said

"""The `vllm-rollout` command.

Invariant: nothing heavy is imported before a subcommand needs it.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

import vllm_rollout
from vllm_rollout import old_names
from vllm_rollout.doctor.command import doctor
from vllm_rollout.doctor.start import refuse_installation, refuse_start
from vllm_rollout.kernel.parts import face, faces, has, installed_parts, parts
from vllm_rollout.profiling import command as profiling
from vllm_rollout.simulator import command as simulator

app = typer.Typer(
    help="Group rollouts for reinforcement learning: vLLM's step loop stops candidates that a group does not need.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models_app = typer.Typer(help="Small models that need no model hub.", no_args_is_help=True)
app.add_typer(models_app, name="models")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"vllm-rollout {vllm_rollout.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", "-v", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def serve(context: typer.Context) -> None:
    """Serve a model: `vllm serve` with group rollouts. Takes every flag of `vllm serve`.

    Without MODEL it serves the embedded default, SmolLM2-135M-Instruct.
    """
    gc.disable()  # what imports make stays: to look for garbage in it takes a fifth of their time
    from vllm_rollout.kernel.api.flags import leave_parts_out
    from vllm_rollout.kernel.platform import choose_platform

    if refusal := refuse_start(context.args):
        sys.exit(f"vllm-rollout serve: {refusal}")
    os.environ.pop("VLLM_ROLLOUT", None)  # it is for engines of trainers, of which one may have started this server
    leave_parts_out(context.args, "vllm-rollout serve")
    choose_platform(context.args)
    from vllm_rollout.kernel.api.serve import main as serve_main

    gc.enable()
    serve_main(context.args)


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="A name from `models list`, a Hugging Face name or a directory.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(help="Number of prompts (groups) at once, or that a round returns. Default: 8.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Trajectories that a trainer wants per prompt. Default: 8, with --rounds 2.")
    ] = None,
    candidates: Annotated[
        int | None, typer.Option(help="Candidates per prompt that race. Default: 16. Not with --rounds.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Upper bound of a candidate's output tokens. Default: 768.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File for the picture (PNG).")] = None,
    rounds: Annotated[
        bool,
        typer.Option(
            "--rounds",
            help="Tail batching: compare short rounds and a long one with rounds that wait for all candidates.",
        ),
    ] = False,
    train: Annotated[
        bool,
        typer.Option(
            "--train", help="Train a small policy twice: once waiting for all answers, once racing. Needs a checkout."
        ),
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Steps of each training. Default: 20. Only with --train.")] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A smaller demo: 4 prompts and 256 tokens, with --rounds 384 tokens, with --train 8 steps."
        ),
    ] = False,
) -> None:
    """Race 16 candidates for the first 8 on a small model, and compare with stock vLLM: a table and a picture."""
    given = {"model": model, "prompts": prompts, "group_size": group_size, "candidates": candidates}
    given |= {"max_tokens": max_tokens, "output": output}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        if output is not None and output.suffix != ".png":
            raise ValueError(f"--output must end in .png, got {output}")
        if output is not None and not output.parent.is_dir():
            raise ValueError(f"--output: there is no folder {output.parent}; make it")
        if refusal := refuse_installation():
            raise RuntimeError(refusal)
        if train:
            _run_training_demo(chosen | ({} if steps is None else {"steps": steps}), quick)
        elif steps is not None:
            raise ValueError("--steps is for --train")
        else:
            _run_rounds_demo(chosen, quick) if rounds else _run_race_demo(chosen, quick)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"vllm-rollout demo: {error}")
    except OSError as error:
        sys.exit(f"vllm-rollout demo: {error}. Free some space, or name another place with --output.")
    except KeyboardInterrupt:
        sys.exit(130)


def _run_race_demo(chosen: dict[str, Any], quick: bool) -> None:
    from vllm_rollout.demo.options import QUICK, Options
    from vllm_rollout.demo.run import run

    run(Options(**((QUICK if quick else {}) | chosen)))


def _run_training_demo(chosen: dict[str, Any], quick: bool) -> None:
    from vllm_rollout.demo.training.options import QUICK, TrainingOptions
    from vllm_rollout.demo.training.run import run

    if others := sorted(chosen.keys() - {"steps", "output"}):
        raise ValueError(f"--{others[0].replace('_', '-')} is not for --train, which has --steps and --output")
    run(TrainingOptions(**((QUICK if quick else {}) | chosen)))


def _run_rounds_demo(chosen: dict[str, Any], quick: bool) -> None:
    if (rounds := face("rounds", "demo")) is None:
        raise ValueError("--rounds shows the part 'rounds', and it is left out")
    rounds(chosen, quick)


app.command()(doctor)
with suppress(ValueError):  # of the environment variable that leaves parts out: `main` says it
    if has("shaping"):
        profiling.register(app)
        simulator.register(app)
    for _, commands in faces("commands"):
        commands.register(app)


@app.command("parts")
def list_parts() -> None:
    """List the parts of this installation. `vllm-rollout serve --without NAME,NAME` leaves some out."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("name", no_wrap=True)
    for column in ("what it does", "needs", "is there"):
        table.add_column(column)
    there = {part.name for part in parts()}
    for name, part in sorted(installed_parts().items()):
        presence = "yes" if name in there else "left out"
        table.add_row(name, part.purpose, ", ".join(part.needs), presence)
    Console().print(table)


@models_app.command("list")
def list_models() -> None:
    """List the models, and say which are on this machine."""
    from rich.console import Console
    from rich.table import Table

    from vllm_rollout import models

    table = Table()
    table.add_column("name", no_wrap=True)
    for column in ("fetched", "what it is", "licence"):
        table.add_column(column)
    for model in models.list_models():
        fetched = "yes" if models.is_fetched(model.name) else "no"
        table.add_row(model.name, fetched, model.description, model.license)
    Console().print(table)


@models_app.command("fetch")
def fetch_model(name: Annotated[str, typer.Argument(help="A name from `vllm-rollout models list`.")]) -> None:
    """Fetch a model, check it, convert it, and print its folder."""
    from vllm_rollout import models

    try:
        print(models.fetch(name))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"vllm-rollout models fetch: {error}")


def main() -> None:
    if refusal := old_names.refusal(sys.argv[1:]):
        print(refusal, file=sys.stderr)
        sys.exit(2)
    try:
        parts()
    except ValueError as error:
        print(f"vllm-rollout: {error}", file=sys.stderr)
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()

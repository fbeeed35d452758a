"""Flags of parts, and the flag that leaves parts out. Imports no vLLM: parts are left out before anything slow is
imported.

Invariant: a part that is left out adds no flag, and each of its flags is refused by the part's name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from vllm_rollout import old_names
from vllm_rollout.kernel import parts

FLAG = "--without"
MAX_MIB = 1 << 40
"""More than any machine has."""


def _nothing(*_: Any) -> None: ...


@dataclass(frozen=True)
class Flags:
    """Flags of a part of `vllm-rollout serve`: its face `flags`."""

    add: Callable[[argparse.ArgumentParser], None]
    """Adds them, in argument groups of their own."""
    refuse: Callable[[argparse.Namespace, argparse.ArgumentParser], None] = _nothing
    """Exits with status 2 and a remedy if the server could not work with these values."""
    switch_on: Callable[[argparse.Namespace], None] = _nothing
    """Sets vLLM's arguments, and the part's options in `additional_config`. With `args.separate_processes` the engine
    core and its worker each begin as a new process."""
    around: Callable[[argparse.Namespace], AbstractContextManager[None]] = nullcontext  # type: ignore[assignment]
    """Context in which the server runs."""


def flags_of_parts() -> list[Flags]:
    return [flags for _, flags in parts.faces("flags")]


def number_in(low: float, high: float) -> Callable[[str], float]:
    """A parser of a flag's value as a number in [low, high]."""

    def number(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be in [{low:g}, {high:g}], got {text!r}")
        return value

    return number


def positive(text: str) -> float:
    """A flag's value as a positive number."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def mebibytes(text: str) -> float:
    """A flag's value as a positive number of MiB that a machine may have."""
    if (value := positive(text)) > MAX_MIB:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_MIB:,} MiB, got {text!r}")
    return value


def add_without(group: Any) -> None:
    """Add the flag that leaves parts out. `group`: a parser, or a group of its flags."""
    group.add_argument(
        FLAG,
        metavar="PART,PART",
        action="append",
        default=[],
        help="Leave these parts out, with their flags, endpoints and metrics. `vllm-rollout parts` lists the parts. "
        f"The environment variable {parts.WITHOUT} leaves parts out of a trainer's own process, too. Default: every "
        "part is there.",
    )


def leave_parts_out(arguments: Sequence[str], program: str) -> str:
    """Leave out the parts that --without names, in these arguments or in the file of `--config`. Returns the name of
    the flag or variable that says what is left out.

    Call this before the parser is made, because parts decide which flags there are. Raises: SystemExit with status 2
    for a name that no part has, and for a part that remains and needs one of those.
    """
    parser = argparse.ArgumentParser(program, f"{program} [model_tag] [options]", add_help=False, allow_abbrev=False)
    add_without(parser)
    config = old_names.config_of(arguments)
    if not isinstance(in_file := config.get(FLAG[2:], ""), str):
        parser.error(f"{FLAG[2:]}: write one text of names, such as drafts,page, got {in_file!r}.")
    named = parser.parse_known_args(arguments)[0].without or ([in_file] if FLAG[2:] in config else [])
    try:
        if named:
            parts.leave_out(",".join(named), FLAG)
        parts.parts()
    except ValueError as error:
        parser.error(str(error))
    return FLAG if named else parts.WITHOUT


def refuse_flags_left_out(arguments: Sequence[str], parser: argparse.ArgumentParser, said_by: str) -> None:
    """Exit with status 2 for a flag of a part that is left out, also for one in the file of `--config`.

    `said_by`: name of the flag or variable that leaves it out.
    """
    words = [*arguments, *(f"--{key}" for key in old_names.config_of(arguments))]
    written = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    unknown = written - parser._option_string_actions.keys()
    for part, flags in parts.faces_left_out("flags") if unknown else ():
        its = argparse.ArgumentParser()
        flags.add(its)
        for flag in sorted(unknown & its._option_string_actions.keys()):
            parser.error(
                f"{flag} belongs to the part {part}, which {said_by} leaves out. Leave out the flag, or keep the part."
            )

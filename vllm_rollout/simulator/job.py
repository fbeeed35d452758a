"""A sweep that is ready to run, and what its makers share: `simulation.py` for rollouts, a part for runs of rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.table import Table

from vllm_rollout.parts.shaping.rules.trace import Trace
from vllm_rollout.simulator.clock import Clock
from vllm_rollout.simulator.generate import LengthDistribution, parse_distribution
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.options import SimulateOptions
from vllm_rollout.simulator.parts import FlagError, simulated
from vllm_rollout.simulator.settings import Setting

DEFAULT_GROUP_SIZE = 8
"""Group size of DARTS, used if neither flag nor trace gives one."""

AnySetting = TypeVar("AnySetting")
Advance = Callable[[str, int], None]
"""Takes a setting's name and the number of units that were just done."""


class Report(NamedTuple):
    """Tables, sentence, notes, picture and numbers of a sweep."""

    tables: list[Table]
    sentence: str
    notes: list[str]
    draw: Callable[[str, Path], None]
    """Draws the picture. Takes its subtitle and file."""
    numbers: dict[str, Any]


class SimulationJob(NamedTuple):
    """A sweep that is ready to run."""

    origin: str
    """Source of the lengths, for people."""
    size: str
    """Size of the replay, for people."""
    clock: Clock
    unit: str
    """Unit of progress, for people."""
    total: int
    """Number of units."""
    replay: Callable[[Advance], Report]


def distribution_of(options: SimulateOptions) -> LengthDistribution:
    """The distribution that `--generate` describes. Raises: FlagError."""
    try:
        return parse_distribution(options.generate or "")
    except ValueError as error:
        raise FlagError(f"--generate {options.generate!r}: {error}") from error


def told(its: LengthDistribution) -> str:
    """Description of a distribution, for people."""
    return (
        f"generated, median {its.median:g} tokens, sigma {its.sigma:g} within and {its.prompt_sigma:g} between prompts"
    )


def pruning_defaults(options: SimulateOptions, trace: Trace | None) -> dict[str, int]:
    """Defaults for settings that prune."""
    length = options.detection_length or (None if trace is None else trace.detection_length)
    return {} if length is None else {"detection_length": length}


def with_drafted(
    options: SimulateOptions, settings: Sequence[AnySetting], group_of: Callable[[Any], Setting]
) -> list[AnySetting]:
    """The settings. With `--drafts` each setting follows once more, with drafts. `group_of`: the setting of a setting's
    groups. Raises: FlagError."""
    more: list[Any] = [setting.drafted for setting in settings] if options.drafts else []
    if options.draft_acceptance is not None and not any(group_of(its).drafts for its in (*settings, *more)):
        raise FlagError("--draft-acceptance is for drafts, and no setting has any: add --drafts, or drafts=true to one")
    return list(dict.fromkeys([*settings, *more]))


class Gained(NamedTuple):
    """Table and numbers on drafts. Empty without any."""

    tables: Sequence[Table]
    numbers: dict[str, Any]


def gained_of(machine: Machine, settings: Iterable[Setting], group_size: int, contexts: Iterable[float]) -> Gained:
    """Gain of drafts by batch size, if a setting has drafts. `contexts`: of each candidate half way, in tokens."""
    if not any(setting.drafts for setting in settings):
        return Gained((), {})
    return Gained(*simulated("drafts", "drafts=true").gained_of(machine, group_size, contexts))


def alternatives(text: str) -> list[str]:
    """Split "a=1|2,b=3" into "a=1,b=3" and "a=2,b=3"."""
    parts = []
    for part in text.split(","):
        key, equals, values = part.partition("=")
        parts.append([f"{key}{equals}{value}" for value in values.split("|")])
    return [",".join(chosen) for chosen in product(*parts)]

"""Names of flags that have changed, with the new ones, and values that are gone. Each is refused for one version.

Invariant: importing this is light, so that an old name is refused before anything slow is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

SERVE = {
    "--compat": "--rollout-compat",
    "--emulate": "--rollout-emulate",
    "--emulate-log": "--rollout-emulate-log",
    "--emulate-speed": "--rollout-emulate-speed",
    "--parallelism": "--rollout-parallelism",
    "--parallelism-devices": "--rollout-parallelism-devices",
    "--record": "--rollout-record",
    "--rollout-draft-memory-mb": "--rollout-draft-memory-mib",
    "--rollout-drafts": "--enable-rollout-drafts or --no-enable-rollout-drafts",
    "--rollout-feature-ring-mb": "--rollout-feature-ring-mib",
    "--rollout-judge-memory": "--rollout-judge-gpu-memory-utilization (GPUs) or --rollout-judge-memory-gib (CPUs)",
    "--rollout-move-kv": "--enable-rollout-move-kv or --no-enable-rollout-move-kv, and --enable-rollout-nixl for nixl",
    "--rollout-page": "--enable-rollout-page or --no-enable-rollout-page",
}
"""Old flag of `vllm-rollout serve` -> text with its replacement."""

COMMANDS: Mapping[str, Mapping[str, str]] = {
    "export": {"--out": "--output"},
    "profile": {"--picture": "--output"},
    "serve": SERVE,
}
"""Command -> its old flags, each with its replacement."""

TRAINERS = {"trl-legacy": "it was for TRL up to 1.10. Install TRL 1.14 to 1.16, and write --rollout-compat trl"}
"""Old value of `--rollout-compat` -> why it is gone, and a remedy."""


def trainer(name: str) -> str:
    """`name`, as a value of `--rollout-compat`. Raises: ArgumentTypeError, with the remedy, for an old value."""
    if (remedy := TRAINERS.get(name)) is not None:
        raise argparse.ArgumentTypeError(f"{name} is gone: {remedy}.")
    return name


def refusal(arguments: Sequence[str]) -> str | None:
    """Message for the first old name in a command line such as `["serve", "--emulate", "f"]`. None without one."""
    command, flags = next(iter(arguments), ""), list(arguments[1:])
    engine_flags: list[str] = []
    if command == "profile" and "--" in flags:  # flags of serve stand behind it
        border = flags.index("--")
        flags, engine_flags = flags[:border], flags[border:]
    found = _first(flags, COMMANDS.get(command, {})) or _first(engine_flags, SERVE)
    return found and f"vllm-rollout {command}: {found}"


def _first(words: Iterable[str], table: Mapping[str, str]) -> str | None:
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")  # vLLM takes both
        if flag in table:
            return f"{flag} has a new name: {table[flag]}."
    return None


def refuse(arguments: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 for an old name of a flag of `serve`, also for one in the file of `--config`."""
    config = config_of(arguments)
    words = [*arguments, *(f"--{key}" for key in config)]
    if (refused := _first(words, SERVE)) is not None:
        parser.error(refused)
    for key, value in config.items():
        if value is False and key.replace("_", "-").startswith("enable-rollout-"):
            # vLLM leaves out what is false there.
            parser.error(f"{key}: false has no effect in a configuration file. Write no-{key}: true.")


def config_of(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Content of the file of `--config`. Empty if there is none, or if vLLM will refuse it."""
    import yaml

    path = next((path for flag, path in pairwise(arguments) if flag == "--config"), None)
    try:
        content = None if path is None else yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}

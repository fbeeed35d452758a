"""Names of flags that have changed, with the new ones. An old name is refused for one version, then forgotten.

Invariant: importing this is light, so that an old name is refused before anything slow is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
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
"""Old flag of `vllm-rollout serve` -> what to write instead."""

COMMANDS: Mapping[str, Mapping[str, str]] = {
    "export": {"--out": "--output"},
    "profile": {"--picture": "--output"},
    "serve": SERVE,
}
"""Command -> its old flags, likewise."""


def refusal(arguments: Sequence[str]) -> str | None:
    """The message for the first old name in a command line, such as `["serve", "--emulate", "f"]`; None without one."""
    command, flags = next(iter(arguments), ""), list(arguments[1:])
    engine_flags: list[str] = []
    if command == "profile" and "--" in flags:  # flags of serve stand behind it
        border = flags.index("--")
        flags, engine_flags = flags[:border], flags[border:]
    for words, table in ((flags, COMMANDS.get(command, {})), (engine_flags, SERVE)):
        for word in words:
            flag = word.partition("=")[0].replace("_", "-")  # vLLM takes both
            if flag in table:
                return f"vllm-rollout {command}: {_message(flag, table)}"
    return None


def _message(flag: str, table: Mapping[str, str]) -> str:
    return f"{flag} has a new name: {table[flag]}."


class _Refused(argparse.Action):
    """Overrides: __call__."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        parser.error(_message(str(self.option_strings[0]), SERVE))


def refuse_in(parser: argparse.ArgumentParser) -> None:
    """Have a parser of `serve` refuse the old names, which a configuration file may have as well."""
    for flag in SERVE:
        # vLLM writes `flag: false` of a configuration file as --no-flag, where there is such a flag.
        names = (flag, f"--no-{flag.removeprefix('--')}")
        parser.add_argument(*names, action=_Refused, nargs="*", dest=argparse.SUPPRESS, help=argparse.SUPPRESS)

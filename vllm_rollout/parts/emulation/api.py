"""`vllm-rollout serve --rollout-emulate FILE`: flags, what cannot go with them, and what they set.

Invariant: without --rollout-emulate nothing here has an effect. With it the server needs no GPU: the platform is vLLM's
CPU platform (`kernel/platform.py`), whichever vLLM is installed.
"""

from __future__ import annotations

import argparse
from copy import copy
from pathlib import Path

from vllm.engine.arg_utils import EngineArgs

from vllm_rollout.kernel.api.flags import Flags, number_in
from vllm_rollout.parts.emulation.options import EXECUTOR_CLS, emulate
from vllm_rollout.parts.emulation.settings import Settings
from vllm_rollout.private_file import private_folder

MIN_SPEED, MAX_SPEED = 1e-3, 1e3


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title="Emulation",
        description="A server without a model: tokens are made up, and each step takes the time that it would take "
        "on a device. docs/guides/emulation.md.",
    )
    group.add_argument(
        "--rollout-emulate",
        metavar="FILE",
        help="File with step times and the behaviour of candidates: JSON, or a profile made by "
        "`vllm-rollout profile`. Only configuration and tokenizer of MODEL are read. Default: off.",
    )
    group.add_argument(
        "--rollout-emulate-speed",
        metavar="X",
        type=number_in(MIN_SPEED, MAX_SPEED),
        default=1.0,
        help="Speed of the emulated device. 0.25 makes every step four times as long, so that a slow host can "
        "emulate a fast device. Default: %(default)s.",
    )
    group.add_argument(
        "--rollout-emulate-log",
        metavar="DIR",
        help="Write one row per step into this folder, with a file for each engine core, for `vllm-rollout "
        "emulation-report DIR`. Default: only a line in the server's log every ten seconds.",
    )


def refuse(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy if a device cannot be emulated with these flags."""
    if args.rollout_emulate is None:
        for flag, is_set in (
            ("--rollout-emulate-log", args.rollout_emulate_log is not None),
            ("--rollout-emulate-speed", args.rollout_emulate_speed != 1),
        ):
            if is_set:
                parser.error(f"{flag} says how to emulate a device; name one with --rollout-emulate FILE.")
        return
    try:
        Settings.read(args.rollout_emulate).at(args.tensor_parallel_size)
        if args.rollout_emulate_log is not None:
            private_folder(Path(args.rollout_emulate_log))
    except ValueError as error:
        parser.error(f"--rollout-emulate: {error}")
    except OSError as error:
        parser.error(
            f"--rollout-emulate-log {args.rollout_emulate_log}: {error.strerror}. Name a folder that can be written."
        )
    for flag, is_set, remedy in (
        ("--enable-lora", args.enable_lora, "There are no adapters on an emulated device. Leave it out."),
        (
            "--speculative-config",
            args.speculative_config is not None,
            "It has no model to draft with. Leave it out, or take --enable-rollout-drafts.",
        ),
        ("--enable-prompt-embeds", args.enable_prompt_embeds, "Send prompts as text or tokens."),
        ("--pipeline-parallel-size", args.pipeline_parallel_size > 1, "One worker emulates all; say its cost in FILE."),
        (
            "--distributed-executor-backend",
            args.distributed_executor_backend not in (None, "uni", EXECUTOR_CLS),
            "The worker runs in the engine core. Leave it out.",
        ),
    ):
        if is_set:
            parser.error(f"{flag} does not go with --rollout-emulate. {remedy}")


def switch_on(args: argparse.Namespace) -> None:
    if args.rollout_emulate is not None:
        emulate(
            args,
            file=str(Path(args.rollout_emulate).resolve()),
            speed=args.rollout_emulate_speed,
            log=None if args.rollout_emulate_log is None else str(Path(args.rollout_emulate_log).resolve()),
            async_scheduling=args.async_scheduling is not False,
        )


def on_device(engine_args: EngineArgs, file: str) -> EngineArgs:
    """Face `engine_args`: arguments of an engine without a server, on the device of a file. Raises: ValueError."""
    Settings.read(file).at(engine_args.tensor_parallel_size)
    ours = copy(engine_args)
    emulate(ours, file=str(Path(file).resolve()))
    return ours


FLAGS = Flags(add_flags, refuse, switch_on)

"""`vllm-rollout serve`: vLLM's own serve command with our scheduler, worker and endpoints switched on.

Invariant: flags, bodies, exit codes and help are vLLM's. We add flags that begin with --rollout, set four arguments and
one environment variable.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from vllm.distributed.nixl_utils import is_nixl_available
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_rollout
from vllm_rollout import old_names
from vllm_rollout.config import (
    DEFAULT_AUDIT_RATIO,
    DRAFT_MEMORY_BYTES,
    FEATURE_RING_BYTES,
    RECORD_MAX_MIB,
    TRAIN_BUDGET_S,
)
from vllm_rollout.extras import install_command
from vllm_rollout.kernel import PLUGIN
from vllm_rollout.kernel.api import on_cpu, server_folder
from vllm_rollout.kernel.api.state_folder import FolderLock, FolderTaken
from vllm_rollout.kernel.api.versions import configure_logging, refuse_missing_flags, set_up_environment
from vllm_rollout.kernel.compat import check_vllm_version, lacking, vllm_version
from vllm_rollout.kernel.http.admin import AdminKey
from vllm_rollout.kernel.names import SCHEDULER_CLS, WORKER_CLS
from vllm_rollout.kernel.options import DRAFTS_CONFIG, ServeOptions
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.parts.emulation import api as emulate
from vllm_rollout.parts.front_ends import api as front_ends
from vllm_rollout.parts.moving.api import parallelism
from vllm_rollout.parts.page.recording.file import TraceFile
from vllm_rollout.parts.pruning.http.body import ADMIN_HEADER
from vllm_rollout.parts.rewards.api import judge, rewards
from vllm_rollout.parts.shaping.profile_file import Profile
from vllm_rollout.parts.trainers.api import trainers
from vllm_rollout.private_file import private_folder

logger = init_logger("vllm.vllm_rollout")

GROUPS = (rewards, judge, emulate, parallelism, trainers, front_ends)
"""Modules with more flags, a group of them each."""

EPILOG = f"""
vllm-rollout is `vllm serve` with group rollouts. It adds the flags of the groups Rollout, Rewards, Judge, Emulation,
Parallelism, Trainers and Front ends (--help=Rollout). All other flags are vLLM's own.
Without MODEL it serves the embedded default, {DEFAULT_MODEL}. It adds POST /v1/rollouts with its endpoints for rewards,
quality heads, votes and state, and rollout_* fields in vllm_xargs of the OpenAI endpoints.
"""


def main(arguments: list[str]) -> None:
    """Run `vllm-rollout serve ARGUMENTS`. Returns when the server has stopped.

    Raises: SystemExit as `vllm serve` does (2 for a bad flag).
    """
    try:
        check_vllm_version()
    except RuntimeError as error:
        sys.exit(f"vllm-rollout serve: {error}")
    args = parse(arguments, "vllm-rollout serve", "[model_tag] [options]")
    command = ServeSubcommand()
    command.validate(args)
    logger.info(
        "vllm_rollout %s on vLLM %s (%s): scheduler %s, worker %s, KV block size %s, plugins %s",
        vllm_rollout.__version__,
        vllm_version,
        current_platform.device_type,
        args.scheduler_cls,
        args.worker_cls,
        args.block_size or "vLLM's default",
        os.environ["VLLM_PLUGINS"],
    )
    if missing := lacking():
        logger.info("vllm_rollout: vLLM %s lacks %s", vllm_version, "; ".join(missing))
    if args.enable_lora and current_platform.is_cpu():
        logger.warning(
            "vllm_rollout: LoRA on a CPU is for trying only: while adapters run, the base model gets wrong tokens from "
            "vLLM's operators, and prompt_logprobs are refused. Where tokens count, use a GPU or a server per policy."
        )
    with judge.beside(args), server_folder.of_a_server(), front_ends.both(args):
        command.cmd(args)


def parse(arguments: list[str], program: str, usage: str) -> argparse.Namespace:
    """Parse and check vLLM's flags and ours, and switch on the settings of a rollout server.

    Raises: SystemExit as `vllm serve` does.
    """
    # Before the parser is built: building it loads the plugins.
    os.environ["VLLM_PLUGINS"] = ",".join(allowed_plugins(os.environ.get("VLLM_PLUGINS")))
    set_up_environment()
    parser = FlexibleArgumentParser(prog="vllm-rollout")
    serve_parser = ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    serve_parser.prog = program
    serve_parser.usage = f"{program} {usage}"
    description = serve_parser.description or ""
    serve_parser.description = re.sub(r"Defaults to \S+", f"Defaults to {DEFAULT_MODEL}", description)
    serve_parser.epilog = EPILOG + (serve_parser.epilog or "").replace("vllm serve", program)
    add_all_flags(serve_parser)
    old_names.refuse(arguments, serve_parser)
    refuse_missing_flags(arguments, serve_parser)
    # vLLM's parser looks for the subcommand, its config file and its help topics in sys.argv.
    sys.argv = ["vllm", "serve", *arguments]
    args = parser.parse_args()
    configure_logging(args)
    refuse_unsupported(args, serve_parser)
    emulate.refuse(args, serve_parser)
    parallelism.refuse(args, serve_parser)
    trainers.refuse(args, serve_parser)
    refuse_ray(args, serve_parser)
    front_ends.refuse(args, serve_parser)
    judge.refuse(args, serve_parser)
    switch_on(args, arguments, serve_parser)
    return args


def add_all_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of ours, in argument groups of their own."""
    add_flags(parser)
    for group in GROUPS:
        group.add_flags(parser)


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title="Rollout",
        description="Group rollouts (POST /v1/rollouts): learning, recording, the page, and access to them.",
    )
    group.add_argument(
        "--rollout-profile",
        metavar="FILE",
        help="Step times of this machine, in a file made by `vllm-rollout profile`. Redundancy auto weighs them, and "
        "live step times are compared with them. Default: redundancy auto runs 1.5 times as many candidates as "
        "wanted.",
    )
    group.add_argument(
        "--rollout-record",
        metavar="FILE",
        help="Append one JSON line per rollout, and one per group of sessions, to this file, for "
        "`vllm-rollout simulate`. A line has lengths, ends and scores of candidates, but no token and no text. "
        "Default: off.",
    )
    group.add_argument(
        "--rollout-record-max-mib",
        type=_mib,
        default=RECORD_MAX_MIB,
        metavar="MIB",
        help="Upper bound for the file of --rollout-record together with its older piece, FILE.1. At half of this "
        "size the file becomes FILE.1. 0: no bound. Default: %(default)s.",
    )
    group.add_argument(
        "--enable-rollout-page",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Serve the page /rollouts, which shows running rollouts, and its feed. If --api-key is set, the feed "
        "needs that key. Default: on.",
    )
    group.add_argument(
        "--rollout-state",
        metavar="FOLDER",
        help="Keep in this folder the server's runs and learned state: calibration, quality heads and lengths. "
        "Learned state is loaded at start. It is written while it changes, every 30 s at most, and when the server "
        "stops. Runs are written with every round. Default: a restart forgets both.",
    )
    group.add_argument(
        "--rollout-admin-key",
        metavar="KEY",
        type=_admin_key,
        help="Key for requests that change the whole server: PUT of quality heads and of the state, drains, weights "
        f"by --rollout-compat. Clients send it in the header {ADMIN_HEADER}, or as a bearer token if there is no "
        "--api-key. Default: every "
        "client of the server may send these requests.",
    )
    group.add_argument(
        "--rollout-allowed-hosts",
        metavar="NAME",
        nargs="+",
        default=[],
        help="Host names under which web pages may use this server. Without --api-key, other clients need one of "
        "these names, too. '*': any name. Default: IP addresses, names without a dot, names that cannot be "
        "registered (.local, .internal), the name of --host, and this host's own name. To read answers, pages need "
        "vLLM's --allowed-origins, too.",
    )
    group.add_argument(
        "--rollout-audit-ratio",
        metavar="SHARE",
        type=emulate.number_in(0, 1),
        default=DEFAULT_AUDIT_RATIO,
        help="Share of groups in which no candidate is stopped, so that learned estimates stay true. It applies to "
        "pruning and to redundancy auto. A request may set its own audit_ratio. Default: %(default)s.",
    )
    group.add_argument(
        "--rollout-train-budget-ms",
        metavar="MS",
        type=_positive,
        default=TRAIN_BUDGET_S * 1e3,
        help="Train a quality head for at most this many milliseconds between two engine steps, plus the rest of one "
        "optimizer step. Default: %(default)s.",
    )
    group.add_argument(
        "--rollout-feature-ring-mib",
        metavar="MIB",
        type=_positive,
        default=FEATURE_RING_BYTES / 2**20,
        help="Host memory for hidden states of scored candidates that wait for their rewards. Default: %(default)s.",
    )
    group.add_argument(
        "--enable-rollout-move-kv",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="If possible, a group that moves to another rank of this host takes its KV cache along. Otherwise the "
        "other rank computes the KV cache again. Default: on.",
    )
    group.add_argument(
        "--enable-rollout-nixl",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Groups that move to ranks on other hosts take their KV cache along, too, by the package nixl. Default: "
        "off.",
    )
    group.add_argument(
        "--enable-rollout-drafts",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Use tokens of a candidate's siblings, and of earlier answers to its prompt, as drafts. vLLM verifies "
        "several drafts at a time where that is faster. Drafts change no probability. They need model runner V1, and "
        "make vLLM schedule synchronously. Default: off.",
    )
    group.add_argument(
        "--rollout-draft-memory-mib",
        metavar="MIB",
        type=_positive,
        default=DRAFT_MEMORY_BYTES / 2**20,
        help="Host memory for answers that serve as drafts. If the memory is full, answers that were not used for "
        "longest are removed first. Default: %(default)s.",
    )


def _admin_key(text: str) -> AdminKey:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty. Leave the flag out for no key")
    return AdminKey(text)


def _mib(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be a whole number of MiB, 0 for no bound, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def refuse_unsupported(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy if groups could not work with these flags."""
    if args.grpc:
        parser.error("--grpc has no rollout endpoints. Leave it out to serve HTTP, or use plain `vllm serve`.")
    try:
        if args.rollout_profile is not None:
            Profile.read(Path(args.rollout_profile))
        if args.rollout_record is not None:
            TraceFile(Path(args.rollout_record))
    except ValueError as error:
        parser.error(f"--rollout-profile: {error}")
    except OSError as error:
        parser.error(f"--rollout-record {args.rollout_record}: {error.strerror}. Name a file that can be written.")
    try:
        if args.rollout_state is not None:
            private_folder(Path(args.rollout_state))
            if not args.headless:
                FolderLock(Path(args.rollout_state)).release()  # the API process takes it when its engine has started
    except FolderTaken as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--rollout-state {args.rollout_state}: {error.strerror}. Name a folder that can be written.")
    if args.enable_rollout_nixl and not args.enable_rollout_move_kv:
        parser.error("--enable-rollout-nixl moves KV cache between hosts. Leave out --no-enable-rollout-move-kv.")
    if args.enable_rollout_nixl and not is_nixl_available():
        parser.error(f"--enable-rollout-nixl needs NIXL on every host: {install_command('nixl')}.")
    if args.enable_rollout_drafts and args.speculative_config is not None:
        parser.error(
            f"--enable-rollout-drafts sets --speculative-config, which is {args.speculative_config!r} here: vLLM has "
            "one source of drafts. Leave out one of them."
        )
    for flag, value, ours in (
        ("--scheduler-cls", args.scheduler_cls, SCHEDULER_CLS),
        ("--worker-cls", args.worker_cls, WORKER_CLS),
    ):
        if value not in (None, "auto", ours):
            parser.error(
                f"{flag} {value} would replace the {flag[2:-4]} that stops candidates ({ours}). Leave it out; "
                "a trainer's worker methods belong in --worker-extension-cls, which stays free."
            )
    if args.runner not in ("auto", "generate"):
        parser.error(f"--runner {args.runner} does not generate; groups need --runner generate.")


def refuse_ray(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy for flags of Ray that vLLM would refuse late, or without a reason."""
    for flag, backend in (
        ("--data-parallel-backend", args.data_parallel_backend),
        ("--distributed-executor-backend", args.distributed_executor_backend),
    ):
        if backend != "ray":
            continue
        if not current_platform.ray_device_key:
            parser.error(
                f"{flag} ray needs devices that Ray hands out, and vLLM's platform {current_platform.device_type} has "
                "none. Leave it out, or start the server where vLLM finds a GPU. docs/guides/deploy.md."
            )
        if find_spec("ray") is None:
            parser.error(f"{flag} ray needs Ray on every host: {install_command('ray')}.")


def switch_on(args: argparse.Namespace, arguments: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Set the arguments of a rollout server. `arguments`: as the user wrote them."""
    if args.model_tag is None and args.model == parser.get_default("model"):
        args.model_tag = DEFAULT_MODEL
    is_embedded = False
    if args.model_tag is not None:
        try:
            resolved = resolve(args.model_tag)
        except RuntimeError as error:  # no network, no room
            sys.exit(f"vllm-rollout serve: {error}")
        is_embedded = resolved != args.model_tag
        if is_embedded and args.served_model_name is None:
            args.served_model_name = [args.model_tag]
        args.model_tag = args.model = resolved
    front_ends.switch_on(args)
    options = ServeOptions(
        args.rollout_train_budget_ms / 1e3,
        int(args.rollout_feature_ring_mib * 2**20),
        emulate.emulation_options(args),
        moves_kv=args.enable_rollout_move_kv,
        moves_kv_by_nixl=args.enable_rollout_nixl,
        audit_ratio=args.rollout_audit_ratio,
        draft_memory_bytes=int(args.rollout_draft_memory_mib * 2**20),
        drafts_file=None if args.rollout_state is None else str(Path(args.rollout_state).resolve() / "drafts"),
        beside_rust=args.rust_front_end is not None,
        forks=args.rollout_parallelism == "fixed" and (args.rollout_emulate is not None or on_cpu.runs_in_core(args)),
    )
    if args.enable_rollout_drafts:
        args.speculative_config = dict(DRAFTS_CONFIG)
    if args.allowed_origins == ["*"] and not _says(arguments, "--allowed-origins"):
        args.allowed_origins = []  # as in vLLM from 0.32 on: pages need the user's permission
    args.additional_config = options.into(args.additional_config)
    args.scheduler_cls = SCHEDULER_CLS
    args.worker_cls = WORKER_CLS
    if args.rollout_emulate is not None:
        emulate.switch_on(args)
    parallelism.switch_on(args)
    on_cpu.switch_on(args, arguments, parser, is_embedded)


def _says(arguments: Sequence[str], flag: str) -> bool:
    return any(word.partition("=")[0].replace("_", "-") == flag for word in arguments)


def allowed_plugins(chosen: str | None) -> list[str]:
    """The value of VLLM_PLUGINS with our plugin in it.

    VLLM_PLUGINS is one allow-list for every kind of plugin, and vLLM loads an endpoint plugin only if it is in the
    list. Unset means all plugins except endpoints. So the list has all installed plugins except other endpoints.
    """
    if chosen is not None:
        names = [name for name in chosen.split(",") if name]
    else:
        groups = entry_points()
        names = sorted(
            {
                entry.name
                for group in groups.groups
                if group.startswith("vllm.") and group != "vllm.endpoint_plugins"
                for entry in groups.select(group=group)
            }
        )
    return [*(name for name in names if name != PLUGIN), PLUGIN]

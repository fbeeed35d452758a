"""`vllm-rollout serve`: vLLM's own serve command with our scheduler, worker and endpoints switched on.

Invariant: flags, bodies, exit codes and help are vLLM's. We add flags that begin with --rollout, and --without. Parts
add flags of their own, and each sets its own arguments.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_rollout
from vllm_rollout import old_names
from vllm_rollout.adapter import PLUGIN
from vllm_rollout.adapter.compat import check_vllm_version, lacking, vllm_version
from vllm_rollout.adapter.names import SCHEDULER_CLS, WORKER_CLS
from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.extras import install_command
from vllm_rollout.kernel.api import on_cpu, server_folder
from vllm_rollout.kernel.api.flags import add_without, flags_of_parts, leave_parts_out, refuse_flags_left_out
from vllm_rollout.kernel.api.state_folder import FolderLock, FolderTaken
from vllm_rollout.kernel.api.versions import configure_logging, refuse_missing_flags, set_up_environment
from vllm_rollout.kernel.http.admin import AdminKey
from vllm_rollout.kernel.http.clients import ADMIN_HEADER
from vllm_rollout.kernel.part_terms import why_unread
from vllm_rollout.kernel.parts import faces
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.private_file import private_folder

logger = init_logger("vllm.vllm_rollout")

EPILOG = f"""
Without MODEL it serves the embedded default, {DEFAULT_MODEL}. It adds POST /v1/rollouts, more endpoints under /v1 for
runs, feeds, sessions, groups, rewards, votes, weights, engines and learned state, and rollout_* fields in vllm_xargs of
the OpenAI endpoints.
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
    with ExitStack() as surroundings:
        for flags in flags_of_parts():
            surroundings.enter_context(flags.around(args))
        surroundings.enter_context(server_folder.of_a_server())
        command.cmd(args)


def parse(arguments: list[str], program: str, usage: str) -> argparse.Namespace:
    """Parse and check vLLM's flags and ours, and switch on the settings of a rollout server.

    Raises: SystemExit as `vllm serve` does.
    """
    says_what_is_left_out = leave_parts_out(arguments, program)
    # Before the parser is built: building it loads the plugins.
    os.environ["VLLM_PLUGINS"] = ",".join(allowed_plugins(os.environ.get("VLLM_PLUGINS")))
    set_up_environment()
    parser = FlexibleArgumentParser(prog="vllm-rollout")
    serve_parser = ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    serve_parser.prog = program
    serve_parser.usage = f"{program} {usage}"
    description = serve_parser.description or ""
    serve_parser.description = re.sub(r"Defaults to \S+", f"Defaults to {DEFAULT_MODEL}", description)
    groups = add_all_flags(serve_parser)
    serve_parser.epilog = epilog(groups) + (serve_parser.epilog or "").replace("vllm serve", program)
    old_names.refuse(arguments, serve_parser)
    refuse_flags_left_out(arguments, serve_parser, says_what_is_left_out)
    refuse_missing_flags(arguments, serve_parser)
    # vLLM's parser looks for the subcommand, its config file and its help topics in sys.argv.
    sys.argv = ["vllm", "serve", *arguments]
    args = parser.parse_args()
    configure_logging(args)
    refuse_unsupported(args, serve_parser)
    for flags in flags_of_parts():
        flags.refuse(args, serve_parser)
    refuse_ray(args, serve_parser)
    switch_on(args, arguments, serve_parser)
    return args


def add_all_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Add every flag of ours, in argument groups of their own. Returns the titles of the groups."""
    theirs = list(parser._action_groups)
    add_flags(parser)
    for flags in flags_of_parts():
        flags.add(parser)
    return [group.title or "" for group in parser._action_groups if group not in theirs]


def epilog(groups: Sequence[str]) -> str:
    """The end of the help. `groups`: titles of our groups of flags."""
    names = " and ".join([", ".join(groups[:-1]), groups[-1]] if len(groups) > 1 else groups)
    return (
        "\n"
        + textwrap.fill(
            f"vllm-rollout is `vllm serve` with group rollouts. It adds the flags of the groups {names} (--help="
            f"{groups[0]}). All other flags are vLLM's own.",
            width=120,
            break_on_hyphens=False,
        )
        + EPILOG
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title="Rollout",
        description="Group rollouts (POST /v1/rollouts): their state, access to them, and the parts around them.",
    )
    add_without(group)
    group.add_argument(
        "--rollout-state",
        metavar="FOLDER",
        help="Keep in this folder the server's runs, feeds and learned state: calibration, quality heads and lengths. "
        "Learned state is loaded at start. It is written while it changes, every 30 s at most, and when the server "
        "stops. Runs and feeds are written as they change. Default: a restart forgets all.",
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


def _admin_key(text: str) -> AdminKey:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty. Leave the flag out for no key")
    return AdminKey(text)


def refuse_unsupported(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy if groups could not work with these flags."""
    if args.grpc:
        parser.error("--grpc has no rollout endpoints. Leave it out to serve HTTP, or use plain `vllm serve`.")
    try:
        if args.rollout_state is not None:
            private_folder(Path(args.rollout_state))
            if not args.headless:
                FolderLock(Path(args.rollout_state)).release()  # the API process takes it when its engine has started
    except FolderTaken as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--rollout-state {args.rollout_state}: {error.strerror}. Name a folder that can be written.")
    for flag, value, ours in (
        ("--scheduler-cls", args.scheduler_cls, SCHEDULER_CLS),
        ("--worker-cls", args.worker_cls, WORKER_CLS),
    ):
        if value not in (None, "auto", ours):
            parser.error(
                f"{flag} {value} would replace the {flag[2:-4]} that stops candidates ({ours}). Leave it out; "
                "a trainer's worker methods belong in --worker-extension-cls, which stays free."
            )
    if (args.api_server_count or 1) > 1 and not several_processes():
        parser.error(f"--api-server-count {args.api_server_count}: {why_unread('processes', lambda _: True)}")
    if args.runner not in ("auto", "generate"):
        parser.error(f"--runner {args.runner} does not generate; groups need --runner generate.")


def several_processes() -> bool:
    """True if a part lets several API processes answer as one server."""
    return any(faces("processes"))


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
    if args.allowed_origins == ["*"] and not _says(arguments, "--allowed-origins"):
        args.allowed_origins = []  # as in vLLM from 0.32 on: pages need the user's permission
    args.scheduler_cls = SCHEDULER_CLS
    args.worker_cls = WORKER_CLS
    args.separate_processes = False
    if not (args.headless or several_processes()):
        args.api_server_count = 1
    for flags in flags_of_parts():
        flags.switch_on(args)
    has_model = ServeOptions.of(args).has_model
    ServeOptions.change(args, forks=not args.separate_processes and (not has_model or on_cpu.runs_in_core(args)))
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

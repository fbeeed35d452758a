"""`VLLM_USE_RUST_FRONTEND=1 vllm-rollout serve`: vLLM's Rust front end on --port, ours beside it on --rollout-port.

Both are clients of the same engine cores, like several API processes. The Rust front end is the first. It serves vLLM's
endpoints, and requests that join a group by their own fields. Ours is the second. It has every endpoint, vLLM's too.

There are two ports, because a client sends both kinds of requests over one connection. One port would need a proxy for
all traffic of the Rust front end.

Invariant: without the environment variable nothing here has an effect.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

from vllm import envs
from vllm.entrypoints.cli import serve
from vllm.entrypoints.launchers.launcher import create_server_socket
from vllm.logger import init_logger
from vllm.v1.utils import APIServerProcessManager, RustFrontendProcessManager, run_api_server_worker_proc

from vllm_rollout.adapter.compat import RUST_LISTENERS, has, vllm_version
from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.kernel.api.flags import Flags

logger = init_logger("vllm.vllm_rollout")

VARIABLE, PATH_VARIABLE = "VLLM_USE_RUST_FRONTEND", "VLLM_RUST_FRONTEND_PATH"
OURS = 1
"""Number of our process among the engine cores' clients. The Rust front end is number 0."""
SCHEDULER_ALONE = "Unset it, or use `vllm serve --scheduler-cls vllm_rollout.Scheduler`: docs/guides/deploy.md."


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title="Front ends", description=f"vLLM's Rust front end beside ours ({VARIABLE}=1). docs/guides/deploy.md."
    )
    group.add_argument(
        "--rollout-port",
        metavar="PORT",
        type=int,
        help=f"With {VARIABLE}=1: the port of the Python front end, which has /v1/rollouts and all other endpoints. "
        "The Rust front end listens on --port. Default: --port + 1.",
    )


def refuse(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy if the two front ends do not work together with these flags."""
    if not envs.VLLM_USE_RUST_FRONTEND:
        if args.rollout_port is not None:
            parser.error(f"--rollout-port is the second of two front ends' ports; set {VARIABLE}=1, or say --port.")
        return
    if not has(RUST_LISTENERS):
        parser.error(f"{VARIABLE}=1: vLLM {vllm_version} cannot have ours beside it, 0.32 can. {SCHEDULER_ALONE}")
    try:
        path = envs.VLLM_RUST_FRONTEND_PATH
    except FileNotFoundError as error:
        parser.error(f"{VARIABLE}=1: {error} vLLM's CUDA wheel has it; {PATH_VARIABLE} names another place.")
    if not os.access(path, os.X_OK):  # type: ignore[arg-type]
        parser.error(f"{PATH_VARIABLE}={path} is no file that can be executed. Name vllm-rs, or unset {VARIABLE}.")
    port = args.port + 1 if args.rollout_port is None else args.rollout_port
    if not 1 <= port <= 65535:
        parser.error(f"--rollout-port must be from 1 to 65535, got {port} (default: --port + 1).")
    balanced = args.data_parallel_hybrid_lb or args.data_parallel_external_lb or args.data_parallel_rank is not None
    for flag, is_set, remedy in (
        ("--api-server-count", (args.api_server_count or 1) > 1, "There is one Python process: leave it out."),
        ("an external or hybrid load balancer", balanced, "Each node would need both. Unset the variable."),
        ("--grpc-port", args.grpc_port is not None, "Use plain `vllm serve`."),
        (
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
            envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING,
            "An adapter loaded at one front end is unknown to the other: name adapters by --lora-modules.",
        ),
        ("--rollout-port", args.rollout_port == args.port, "It must differ from --port."),
    ):
        if is_set:
            parser.error(f"{flag} does not go with {VARIABLE}=1. {remedy}")


def switch_on(args: argparse.Namespace) -> None:
    """Let vLLM start several API processes. `both` makes one of them a Rust process and one a Python process."""
    args.rust_front_end = None
    if not envs.VLLM_USE_RUST_FRONTEND:
        return
    args.rust_front_end = envs.VLLM_RUST_FRONTEND_PATH
    ServeOptions.change(args, beside_rust=True)
    if args.rollout_port is None:
        args.rollout_port = args.port + 1
    for name in (VARIABLE, PATH_VARIABLE):  # with these vLLM starts the Rust front end only
        os.environ.pop(name, None)
    args.mm_device_do_normalize = False  # as vLLM does with the variable: the Rust front end has normalized images
    if not args.headless:
        args.api_server_count = 2


@contextmanager
def both(args: argparse.Namespace) -> Iterator[None]:
    """Context of vLLM's serve command: replaces its API processes by the two front ends.

    Raises: SystemExit if the port is taken.
    """
    if args.rust_front_end is None or args.headless:
        yield
        return
    try:
        sock = create_server_socket((args.host or "", args.rollout_port), reuse_port=False)
    except OSError as error:
        raise SystemExit(f"vllm-rollout serve: --rollout-port {args.rollout_port}: {error.strerror}.") from error
    logger.info(
        "vllm_rollout: two front ends: port %d serves vLLM's endpoints in Rust (n = 1 only; rollout_group_size joins), "
        "port %d /v1/rollouts, /v1/runs, /v1/rewards, /v1/quality_head, /v1/engines and vLLM's endpoints in Python",
        args.port,
        args.rollout_port,
    )
    theirs, serve.APIServerProcessManager = serve.APIServerProcessManager, partial(FrontEnds, our_sock=sock)  # type: ignore[assignment]
    try:
        yield
    finally:
        serve.APIServerProcessManager = theirs


class FrontEnds(APIServerProcessManager):
    """The Rust front end and our API process, in place of two API processes. Overrides: __init__, shutdown."""

    def __init__(self, *, our_sock: socket.socket, **given: Any) -> None:
        """`given`: vLLM's arguments, all by name."""
        args, inputs, outputs = given["args"], given["input_listeners"], given["output_listeners"]
        assert given["num_servers"] == OURS + 1, given["num_servers"]
        self._rust = RustFrontendProcessManager(
            binary_path=args.rust_front_end,
            sock=given["sock"],
            args=args,
            input_listener=inputs[0],
            output_listener=outputs[0],
            engine_start_index=0,
            engine_count=args.data_parallel_size,
            data_parallel_size=args.data_parallel_size,
            stats_update_address=given["stats_update_address"],
        )
        ours = copy(args)
        ours.port, ours.uds = args.rollout_port, None
        given |= {
            "listen_address": f"http://{args.host or '0.0.0.0'}:{ours.port}",
            "sock": our_sock,
            "args": ours,
            "num_servers": 1,
            "input_listeners": inputs[OURS:],
            "output_listeners": outputs[OURS:],
        }
        super().__init__(**given, target_server_fn=serve_beside_rust)
        self.processes = [*self.processes, *self._rust.processes]  # type: ignore[list-item]  # a new list: the base class stops those of its own

    def shutdown(self, timeout: float | None = None) -> None:
        self._rust.shutdown(timeout)
        super().shutdown(timeout)


def serve_beside_rust(
    listen_address: str, sock: socket.socket, args: argparse.Namespace, client_config: dict[str, Any]
) -> None:
    """Run our API process, which vLLM starts as the only one, with its real number."""
    config = {**client_config, "client_index": OURS, "client_count": OURS + 1}
    run_api_server_worker_proc(listen_address, sock, args, config)


FLAGS = Flags(add_flags, refuse, switch_on, both)

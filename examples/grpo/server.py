"""The server of a training: starts or finds it, checks it, and turns the training's flags into request fields."""

import os
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from examples.grpo import task
from examples.grpo.loss import ALGORITHMS
from vllm_rollout import RolloutClient, process

REWARDS = {"chain": "reward", "digit_sum": "digit_sum_reward"}  # functions of `task.py`; the server has the task's name
PRUNING = ("balance", "gradient", "paper", "shadow")
MAX_PROMPT_TOKENS, MAX_CANDIDATES = 128, 256
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
POLICY = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **PENALTIES}
"""Sampling from the unmodified policy. A field left out would come from the model's generation_config.json."""


class Server:
    """Begins with `bring_back`, which replaces `client`. `close` ends a server that it has started."""

    def __init__(self, args: Namespace) -> None:
        self._args, self.client = args, RolloutClient(args.url)
        self._process: process.ServerProcess | None = None

    def close(self) -> None:
        self.client.close()
        if self._process:
            self._process.stop()

    def bring_back(self) -> None:
        """Start a server, or wait for it without --serve. Raises: ServerError, TimeoutError."""
        self.close()
        if self._process:
            self._process.log.replace(self._args.output / "server.lost.log")  # it may say why
        self._process = start(self._args) if self._args.serve else None
        if self._process:
            seconds = self._process.wait_until_healthy(lambda seconds, line: None)
            print(f"server ready after {seconds:.0f} s: {self._process.url}, {self._process.log}", flush=True)
        self.client = RolloutClient(self._process.url if self._process else self._args.url)
        if not self.client.health():
            print(f"no server at {self.client.base_url} yet: waiting for it (--serve starts one)", flush=True)
        self.client.wait_until_ready(self._args.patience)


def start(args: Namespace) -> process.ServerProcess:
    """A server that starts."""
    model, max_len = str(args.model), str(args.max_tokens + MAX_PROMPT_TOKENS)
    command = [sys.executable, "-m", "vllm_rollout.cli", "serve", model, *process.server_flags(MAX_CANDIDATES)]
    command += ["--max-model-len", max_len, "--rollout-reward", f"{args.task}={task.__name__}:{REWARDS[args.task]}"]
    command += ["--rollout-state", str(args.output / "state")] if args.feed else []  # a feed outlives its server
    command += [*(["--dtype", "float32"] if process.runs_on_cpu() else []), *shlex.split(args.serve_flags or "")]
    if shutil.which("setpriv"):
        command = ["setpriv", "--pdeathsig", "TERM", *command]  # a trainer that is killed leaves no server behind
    path = os.pathsep.join([str(Path(task.__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **process.server_environment(model)}  # no core of its own
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path}
    return process.ServerProcess(command, process.free_port(), environment, args.output / "server.log").__enter__()


def nccl_sender(model: Any, url: str) -> Callable[[], None]:
    """A function that sends the weights by vLLM's own transfer, from this process's GPU to the GPUs of the server."""
    from vllm.distributed.weight_transfer import base, clients, nccl_engine

    size = httpx.get(f"{url}/get_world_size", trust_env=False).raise_for_status().json()["world_size"]
    info = nccl_engine.NCCLTrainerInitInfo("127.0.0.1", process.free_port(), 1 + size, rank=0)
    ends = {"client": clients.HTTPVLLMWeightSyncClient(url), "source": base.ModuleSource(model)}
    return nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init(info, **ends).send_weights


def sampling(args: Namespace, seed: int) -> dict[str, Any]:
    return {**POLICY, "max_tokens": args.max_tokens, **({"seed": seed} if args.seeded else {})}


def rollout_fields(args: Namespace) -> tuple[int, dict[str, Any]]:
    """Group size, and the fields of a rollout request that the flags set."""
    size, fields = args.group_size, {}
    spare = size if args.redundancy is None and (args.race or args.dual_end is not None) else args.redundancy
    if args.dual_end is not None:
        fields["selection"] = {"dual_end": {"num_longest": 1, "patience": args.dual_end}}
    if args.prune:
        how = {"mode": "shadow"} if args.prune == "shadow" else {"rule": args.prune}
        fields["pruning"] = {"detection_length": args.detection_length, "keep_ratio": 0.5, **how}
        if spare is None and not args.rounds and args.prune != "shadow":  # twice as many, of which half are kept
            size, fields["pruning"]["allow_fewer"] = 2 * size, True
    fields |= {"audit_ratio": args.audit_ratio} if args.audit_ratio else {}
    fields |= {"include": ["logprobs", "stopped"]} if args.stopped_teach else {}
    fields |= {"redundancy": spare} if spare is not None else {}
    # each prompt samples by a seed of its own, made of this one and its id: none comes twice
    reward = {"name": args.task, "estimator": ALGORITHMS[args.algorithm].estimator}
    return size, {"reward": reward, "sampling_params": sampling(args, args.seed), **fields}


def run_fields(args: Namespace) -> dict[str, Any]:  # the same for a run, once
    _, fields = rollout_fields(args)
    fields |= {"prompt_speculation": args.speculation, "response_speculation": args.speculation}
    return {**fields, "filter": "zero_variance" if args.algorithm == "dapo" else None, "resume": args.resume}


def feed_fields(args: Namespace) -> dict[str, Any]:
    size, fields = rollout_fields(args)
    fields |= {"filter": "zero_variance" if args.algorithm == "dapo" else None, "max_staleness": args.max_staleness}
    return {**fields, "group_size": size, "batch": args.prompts}

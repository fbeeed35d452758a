"""GRPO runs of a few steps on a CPU. Runs in TRL's environment.

TRL's code is unmodified except in one place. Its NCCL broadcast of weights needs a CUDA device, so weights go by disk,
and a call makes the server load them (`/collective_rpc`, with VLLM_SERVER_DEV_MODE=1).
"""

from __future__ import annotations

import queue
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

FLAGS = ("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1")
"""Flags that TRL's documentation asks for."""
RELOAD_TIMEOUT_S = 120.0


@dataclass
class Run:
    """Measurements of a trainer's run, a value per step or per generation."""

    generation_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    num_syncs: int = 0
    completions: list[list[Any]] = field(default_factory=list)
    """Token ids by reward call, as TRL got them for each group."""
    logs: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def weights_by_disk(model_path: str, folder: Path, run: Run) -> Iterator[None]:
    """Within the block, TRL's client sends its weights by files in `folder`."""
    from safetensors.torch import save_file
    from trl.generation.vllm_client import VLLMClient

    kept = VLLMClient.init_communicator, VLLMClient.update_named_params

    def init_communicator(self: Any, device: object = None) -> None:
        assert self.get_world_size() == 1

    def update_named_params(self: Any, metadata: object, named_params: Iterator[tuple[str, Any]]) -> None:
        place = folder / f"weights-{run.num_syncs}"
        place.mkdir(parents=True)
        for file in Path(model_path).iterdir():
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copy(file, place)
        save_file(
            {name: tensor.detach().contiguous().clone() for name, tensor in named_params}, place / "model.safetensors"
        )
        answer = httpx.post(
            f"{self.base_url}/collective_rpc",
            json={"method": "reload_weights", "kwargs": {"weights_path": str(place)}},
            timeout=RELOAD_TIMEOUT_S,
        )
        assert answer.status_code == 200, answer.text
        shutil.rmtree(place)
        run.num_syncs += 1

    VLLMClient.init_communicator, VLLMClient.update_named_params = init_communicator, update_named_params
    try:
        yield
    finally:
        VLLMClient.init_communicator, VLLMClient.update_named_params = kept


def train(
    url: str,
    model_path: str,
    folder: Path,
    *,
    num_steps: int,
    prompts: Sequence[Any],
    reward: Callable[..., list[float]],
    callbacks: Sequence[Any] = (),
    rollout_func: Callable[..., dict[str, Any]] | None = None,
    environment_factory: Callable[[], Any] | None = None,
    chat_template: str | None = None,
    before: Callable[[Any], None] = lambda trainer: None,
    **config: Any,
) -> Run:
    """Run `GRPOTrainer` in server mode for `num_steps` steps.

    `prompts`: prompts, or rows of a data set with their columns. `before` gets the trainer before it begins.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    run = Run()

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            run.step_s.append(time.monotonic() - self.began)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            run.logs.append(dict(logs or {}))

    def seen(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        run.completions.append(completion_ids)
        return reward(completion_ids=completion_ids, **columns)

    settings = {
        "output_dir": str(folder / "out"),
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 30.0,
        "max_steps": num_steps,
        "shuffle_dataset": False,
        "gradient_accumulation_steps": 1,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "seed": 1,
        "disable_tqdm": True,
        **config,
    }
    with weights_by_disk(model_path, folder, run):
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        tokenizer.chat_template = chat_template or tokenizer.chat_template
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
            reward_funcs=[seen],
            args=GRPOConfig(**settings),
            train_dataset=Dataset.from_list([p if isinstance(p, Mapping) else {"prompt": p} for p in prompts]),
            processing_class=tokenizer,
            callbacks=[Clock(), *callbacks],
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        generate = trainer.vllm_generation.vllm_client.generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            answer = generate(*args, **kwargs)
            run.generation_s.append(time.monotonic() - began)
            return answer

        trainer.vllm_generation.vllm_client.generate = timed
        before(trainer)
        trainer.train()
    return run


def by_variety(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Share of different tokens in each completion, a reward that any model can earn."""
    return [len(set(ids)) / len(ids) for ids in completion_ids]


def next_sample(worker: Any) -> Any:
    """The next sample. Raises: RuntimeError if the worker's process has failed, or gives nothing for a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        worker.check_health(60)
        try:
            return worker.rollout_buffer.get(timeout=1)
        except queue.Empty:
            continue
    raise RuntimeError("AsyncGRPO's process has given no sample for 60 s")

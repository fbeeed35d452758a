"""TRL's own GRPOTrainer on the same problems in the same order: on stock vLLM, and with one line of ours.

    make conformance TRAINER=trl     # makes the environment that has trl 1.16, vllm-rollout and vLLM
    .venvs/conformance-trl/bin/python -m benchmarks.time_to_reward.trl models/careful runs/careful --seeds 1 2 3

`trl` rolls out by TRL's client on `vllm serve`. `trl_race` sets `rollout_func=TRLRollouts(url, redundancy=8)`, and its
server is `vllm-rollout serve`. Each run has a server of its own, with the same flags. An interrupted run starts again.
Each run writes the lines of `examples.grpo.train`, so that `report` shows two more arms.

As in the reference trainer are: float32, AdamW (betas 0.9 and 0.95, no weight decay), the learning rate with five steps
of warm-up, a gradient clipped at a norm of 1, one update for 16 x 8 answers, advantages without division by the
deviation, ratios clipped at 0.2, no reference model, one thread of torch, weights by disk. Differences:

- The loss is TRL's dr_grpo, divided by 128 x 512 tokens. The reference and TRL's dapo divide by the sampled tokens. For
  the same answers the gradient differs by that factor only, seven or more, which grows as answers become shorter. Adam
  ignores a constant factor, and no gradient of either trainer came near a norm of 1. `gradient_norm` in the record is
  TRL's in the reference's unit, per sampled token.
- TRL makes two forward passes and a backward one over all answers. The first is for the ratio between policy and
  server, by which it weighs each answer (0 if the ratio is above 3). The reference makes one pass of each, leaves out
  answers whose advantage is 0, and clips the ratio to the server.
- TRL pads each batch (32 answers, four to an update) to the longest answer of the step. The reference batches answers
  of similar length, at most 4,096 padded tokens. So the longest answer decides TRL's seconds of training.
  `learned_from` counts sampled tokens in both.
- TRL grades in its own process after the rollout, which is part of `training`. It sends weights when a step begins: in
  25 steps 25 times, but an evaluation's seconds lack the time to send the evaluated weights.
- Gradient checkpointing, which TRL turns on, is off: the policy is small, and TRL is faster without.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save as to_bytes

from benchmarks.common import server_process
from benchmarks.time_to_reward.arms import RIVALS
from benchmarks.time_to_reward.run import is_done, say_what_runs
from benchmarks.time_to_reward.trl_record import Record, RecordedClient
from examples.grpo.model import load, prompt_ids, write_line
from examples.grpo.server import MAX_CANDIDATES, MAX_PROMPT_TOKENS
from examples.grpo.task import problems, reward
from examples.grpo.train import CLIP_NORM, WARMUP_STEPS
from vllm_rollout.integrations.trl import TRLRollouts
from vllm_rollout.process import exit_on_sigterm, server_flags
from vllm_rollout.whole_file import write_whole

PROMPTS, GROUP_SIZE, MAX_TOKENS, MICRO_BATCHES = 16, 8, 512, 4
EVALUATE_EVERY, HELD_OUT = 5, 256
FLAGS = [*server_flags(MAX_CANDIDATES), "--max-model-len", str(MAX_TOKENS + MAX_PROMPT_TOKENS), "--dtype", "float32"]
FLAGS += ["--logprobs-mode", "processed_logprobs"]  # as TRL's documentation asks for
SERVERS = {"trl": ("stock", FLAGS), "trl_race": ("rollout", [*FLAGS, "--rollout-audit-ratio", "0"])}
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1"}


def weights_by_disk(folder: Path) -> None:
    """Make TRL send weights by disk from now on. TRL's own transfer, by NCCL, needs a CUDA device."""
    from trl.generation.vllm_client import VLLMClient

    def update_named_params(self: Any, metadata: object, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        tensors = {name: tensor.detach().contiguous() for name, tensor in named_params}
        folder.mkdir(exist_ok=True)
        write_whole(folder / "model.safetensors", to_bytes(tensors, {"format": "pt"}))
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        httpx.post(f"{self.base_url}/collective_rpc", json=call, timeout=120, trust_env=False).raise_for_status()

    VLLMClient.init_communicator = lambda self, device=0: None
    VLLMClient.update_named_params = update_named_params


def train(arm: str, url: str, model_path: str, output: Path, *, seed: int, steps: int, lr: float) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = load(model_path)
    asked, held_out = problems("chain", f"train-{seed}", steps * PROMPTS), problems("chain", "held-out", HELD_OUT)
    rows = [{"prompt": f"{tokenizer.bos_token} {problem.text}", "data": problem.data} for problem in asked]
    assert tokenizer(rows[0]["prompt"])["input_ids"] == prompt_ids(tokenizer, asked[0])  # nothing else before it
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP_STEPS))
    settings = {
        "output_dir": str(output / "trl"), "max_steps": steps, "seed": seed, "use_cpu": True, "bf16": False,
        "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "shuffle_dataset": False,
        "num_generations": GROUP_SIZE, "max_completion_length": MAX_TOKENS, "temperature": 1.0,
        "per_device_train_batch_size": PROMPTS * GROUP_SIZE // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES, "gradient_checkpointing": False,
        "loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0, "learning_rate": lr, "max_grad_norm": CLIP_NORM,
        "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    path = output / "record.jsonl"
    path.unlink(missing_ok=True)
    write_line(path, {"kind": "start", "arm": arm, "model": model_path, **settings})
    record = Record(path, GROUP_SIZE, tokens_of_loss=PROMPTS * GROUP_SIZE * MAX_TOKENS)

    def right(completions: list[str], data: list[dict[str, Any]], **_: Any) -> list[float]:
        rewards = [reward(text, its) for text, its in zip(completions, data, strict=True)]
        record.graded(rewards)
        return rewards

    rollouts = None
    if arm == "trl_race":
        client = RecordedClient(url)
        client.record, rollouts = record, TRLRollouts(client, redundancy=GROUP_SIZE)
    weights_by_disk(output / "weights")
    trainer = GRPOTrainer(
        model=model, reward_funcs=right, args=GRPOConfig(**settings), train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[record], optimizers=(optimizer, warm_up), rollout_func=rollouts,
    )  # fmt: skip
    generation = trainer.vllm_generation
    generate, send_weights = generation.vllm_client.generate, generation.sync_weights

    def recorded(*args: Any, **options: Any) -> Any:
        with record.clock("rollout"):
            answer = generate(*args, **options)
        record.generated([len(ids) for ids in answer["completion_ids"]])
        return answer

    def send_and_evaluate() -> None:
        with record.clock("sync"):
            send_weights()
        step = trainer.state.global_step
        if step % EVALUATE_EVERY and step < steps:
            return
        with record.clock("evaluation"):
            ids = [prompt_ids(tokenizer, problem) for problem in held_out]
            answers = generate(ids, n=2, max_tokens=MAX_TOKENS, logprobs=None)["completion_ids"]
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
            twice = [problem for problem in held_out for _ in range(2)]
            its = [(p, len(ids), reward(text, p.data)) for p, ids, text in zip(twice, answers, texts, strict=True)]
        record.evaluated(step, its)

    generation.vllm_client.generate, generation.sync_weights = recorded, send_and_evaluate
    trainer.train()
    generation.sync_weights()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of examples.grpo.pretrain")
    parser.add_argument("runs", type=Path, help="a folder, in which each run gets a folder")
    parser.add_argument("--arms", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--lr", type=float, default=3e-4)
    arguments = parser.parse_args()
    if find_spec("trl") is None:
        parser.error("trl is not installed here: use .venvs/conformance-trl (make conformance TRAINER=trl)")
    torch.set_num_threads(1)
    exit_on_sigterm()
    say_what_runs(arguments.runs, arguments.model, [f"--lr={arguments.lr}", f"--steps={arguments.steps}"])
    for seed in arguments.seeds:
        for arm in arguments.arms:
            output = arguments.runs / f"{arm}-{seed}"
            if is_done(output / "record.jsonl", arguments.steps):
                continue
            print(f"== {arm}, seed {seed}", flush=True)
            output.mkdir(exist_ok=True)
            kind, flags = SERVERS[arm]
            with server_process(kind, arguments.model, flags, output / "server.log", **ENVIRONMENT) as server:
                server.wait_until_healthy(lambda seconds, line: None)
                terms = {"seed": seed, "steps": arguments.steps, "lr": arguments.lr}
                train(arm, server.url, arguments.model, output, **terms)


if __name__ == "__main__":
    main()

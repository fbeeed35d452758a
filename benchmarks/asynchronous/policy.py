"""The small policy of `examples.grpo` as a learner: problems, rewards, updates and evaluations, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.asynchronous.pruned import Pruner
from benchmarks.asynchronous.sampler import Answer, Asked, Name, Sampler, Weights
from benchmarks.asynchronous.train import Graded
from examples.grpo.loss import ALGORITHMS, CORRECTIONS, Update
from examples.grpo.model import load, prompt_ids
from examples.grpo.task import Problem, describe, problems, reward
from examples.grpo.train import CLIP_NORM, WARMUP_STEPS
from vllm_rollout.answers import GroupAnswer, StoppedCandidate, Trajectory
from vllm_rollout.kernel.http.answers import GroupRewards
from vllm_rollout.rewards import advantages
from vllm_rollout.training.stream import StreamTrainer

NUM_HELD_OUT, MICRO_TOKENS = 192, 2048
LEARNING_RATE = 3e-4
TERMS = ALGORITHMS["dr_grpo"]
TRUNCATED = replace(TERMS, correction=CORRECTIONS["tis"])


class Policy:
    def __init__(self, folder: Path | str, seed: int, lr: float = LEARNING_RATE) -> None:
        self.model, self.tokenizer = load(folder)
        self.seed, self.lr, self.num_updates = seed, lr, 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.trainer = StreamTrainer(self.model.parameters(), self.optimizer, max_norm=CLIP_NORM)
        self.pruner = Pruner(self.model.config.hidden_size, seed)
        self.held_out = problems("chain", "held-out", NUM_HELD_OUT)

    def sampler(self, seed: int) -> Sampler:
        return Sampler(Weights(self.model), seed)

    def problem(self, number: int) -> tuple[Problem, list[int]]:
        (problem,) = problems("chain", f"train-{self.seed}", 1, number)
        return problem, prompt_ids(self.tokenizer, problem)

    def reward(self, problem: Problem, answer: Answer) -> float:
        return reward(self.tokenizer.decode(answer.token_ids, skip_special_tokens=True), problem.data)

    def give_weights(self, rollouts: Sampler, *, recompute: bool) -> None:
        rollouts.load(Weights(self.model), recompute=recompute)

    def prune(self, rollouts: Sampler, names: Sequence[Name], at_least: int) -> list[Name]:
        return self.pruner.prune(names, rollouts.states(names), at_least)

    def learn(self, groups: Sequence[Graded], *, truncates: bool = False) -> dict[str, Any]:
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.lr * min(1, (self.num_updates + 1) / WARMUP_STEPS)
        update = Update(self.trainer, self.model, TRUNCATED if truncates else TERMS, MICRO_TOKENS)
        update.add([answer_of(group) for group in groups])
        result = update.finish()
        self.num_updates += 1
        self.pruner.learn(groups)
        return {
            "teaching": sum(len(set(group.rewards)) > 1 for group in groups),
            "gradient_norm": result.gradient_norm if result else 0.0,
            "difference": torch.cat(update.differences).mean().item(),
        }

    def evaluate(self) -> dict[str, Any]:
        """One answer to each held-out problem. Nothing is stopped."""
        sampler = self.sampler(seed=7)
        sampler.launch([Asked(place, prompt_ids(self.tokenizer, each), 1) for place, each in enumerate(self.held_out)])
        answers = list[Answer]()
        while sampler.num_running:
            answers += sampler.step()
        graded = [(self.held_out[answer.name.group], answer) for answer in answers]
        found = describe([(problem, len(answer.token_ids), self.reward(problem, answer)) for problem, answer in graded])
        return {name: found[name] for name in ("success", "easy", "hard", "length", "p50", "p90", "p99")}


def answer_of(group: Graded) -> GroupAnswer:
    """The group as a server would have answered, as far as `examples.grpo.loss` reads it."""
    rewards = GroupRewards.model_construct(advantages=advantages(group.rewards, TERMS.estimator))
    trajectories = [Trajectory.model_construct(**values_of(answer)) for answer in group.answers]
    for trajectory, its in zip(trajectories, group.rewards, strict=True):
        trajectory.reward = its
    return GroupAnswer.model_construct(
        prompt_token_ids=group.prompt_ids,
        trajectories=trajectories,
        candidates=[StoppedCandidate.model_construct(state="surplus", **values_of(each)) for each in group.stopped],
        rewards=rewards,
    )


def values_of(answer: Answer) -> dict[str, Any]:
    return {"token_ids": answer.token_ids, "logprobs": answer.logprobs, "num_tokens": len(answer.token_ids)}

"""The record of a training by TRL, in the lines of `examples.grpo.train`. It does not need TRL itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from examples.grpo.model import write_line
from examples.grpo.task import Problem, describe
from examples.grpo.train import mean
from vllm_rollout import RolloutClient

DIFFERENCE = "sampling/sampling_logp_difference"  # TRL's name for it, a mean and a maximum


class Record(TrainerCallback):
    """Writes a line per step. TRL calls at begin and end, other code adds data. Seconds exclude evaluations."""

    def __init__(self, path: Path, group_size: int, tokens_of_loss: int) -> None:
        """`tokens_of_loss`: divisor of TRL's loss, in tokens."""
        self._path, self._group_size, self._tokens_of_loss = path, group_size, tokens_of_loss
        self._seconds, self._seconds_of_steps, self._began = Counter[str](), 0.0, 0.0
        self._lengths, self._stopped, self._rewards = list[int](), list[int](), list[float]()
        self._usage: dict[str, int] = {}

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - began

    def generated(self, lengths: Sequence[int], stopped: Sequence[int] = (), **usage: int) -> None:
        """Lengths in tokens of returned and of stopped answers. `usage`: counts by the server, if it has counted."""
        self._lengths, self._stopped = list(lengths), list(stopped)
        self._usage = usage or {"generated_tokens": sum(lengths), "num_candidates": len(lengths)}

    def graded(self, rewards: Sequence[float]) -> None:
        """Rewards in the order of `generated`, siblings in a row."""
        self._rewards = list(rewards)

    def evaluated(self, step: int, answers: Sequence[tuple[Problem, int, float]]) -> None:
        """`answers`: problem, tokens and reward of each."""
        line = {"kind": "evaluation", "step": step, "seconds_of_steps": self._seconds_of_steps, **describe(answers)}
        write_line(self._path, {**line, "seconds": self._seconds["evaluation"]})
        print(f"held out after step {step}: success {line['success']:.3f}, length {line['length']:.1f}", flush=True)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._seconds, self._began = Counter(), time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        seconds = self._seconds
        seconds["step"] = time.perf_counter() - self._began - seconds.pop("evaluation", 0.0)
        seconds["training"] = seconds["step"] - seconds["rollout"] - seconds["sync"]
        self._seconds_of_steps += seconds["step"]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "grad_norm" not in logs:  # those of the end, of no step
            return
        size = self._group_size
        groups = [self._rewards[first : first + size] for first in range(0, len(self._rewards), size)]
        line = {"kind": "step", "step": state.global_step - 1, "reward": mean(self._rewards)}
        line |= {"length": mean(self._lengths), "longest": max([*self._lengths, *self._stopped])}
        line |= {"groups": len(groups), "teaching": sum(len(set(group)) > 1 for group in groups), "filtered": 0}
        line |= {"gradient_norm": float(logs["grad_norm"]) * self._tokens_of_loss / sum(self._lengths)}
        line |= {"usage": self._usage, "learned_from": float(sum(self._lengths))}
        line |= {f"difference_{name}": logs[f"{DIFFERENCE}/{name}"] for name in ("mean", "max")}
        line |= {"seconds": dict(self._seconds), "lengths": self._lengths, "rewards": self._rewards}
        write_line(self._path, {**line, "other_lengths": self._stopped})


class RecordedClient(RolloutClient):
    """Adds the lengths and usage of its rollouts to a record. Overrides: rollout."""

    record: Record

    def rollout(self, *args: Any, **options: Any) -> Any:
        with self.record.clock("rollout"):
            answer = super().rollout(*args, **options)
        lengths = [trajectory.num_tokens for group in answer.groups for trajectory in group.trajectories]
        stopped = [candidate.num_tokens for group in answer.groups for candidate in group.candidates]
        self.record.generated(lengths, stopped, **{name: count for name, count in answer.usage if count})
        return answer

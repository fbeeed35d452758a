"""TRL's GRPOTrainer with vLLM in its own process (`vllm_mode="colocate"`): one line makes its groups race.

    colocate(redundancy=8)
    trainer = GRPOTrainer(...)

TRL asks its engine for each completion separately. Environment variables (`parts/in_process/api/environment.py`)
replace the engine by ours. It runs equal prompts in a row as a group and returns the answers as TRL's rows. Tools,
group size and reward function are checked when a trainer is built.

Invariant: a trainer gets as many completions as it asked for, in its order.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import BoundArguments, signature
from typing import Any

from typing_extensions import Unpack

from vllm_rollout import RolloutOptions
from vllm_rollout.integrations.trl_rollouts import GroupsOfSize, Placed, TRLRollouts
from vllm_rollout.kernel.parts import face, has

IN_PROCESS = "in_process"
"""The part by which TRL's engine races groups."""
NAME = "reward"
"""Name of the reward function in the engine."""


class colocate:
    """Race the groups of every GRPOTrainer (or subclass) that is built from now on with `use_vllm=True,
    vllm_mode="colocate"`.

    redundancy: spare candidates per group. max_num_seqs is raised for them, and they take KV cache.
    num_generations: group size for trainers that do not derive from GRPOTrainer. A GRPOTrainer uses its own.
    reward: one of the trainer's `reward_funcs`. It grades each completion as soon as the completion ends, in processes
    beside the engine, and TRL reads the result.
    options: those of `RolloutClient.rollout`, such as `pruning`. They need `reward`.

    A group that is split between two processes does not race: give each process a multiple of num_generations
    completions. This sets the environment variables of docs/guides/in_process.md, which processes that start later
    inherit. In a `with` statement all of it holds until the end of the block.

    Raises: ValueError for sizes that are too small, for options without a reward, and if VLLM_PLUGINS excludes
    vllm_rollout. Building a trainer then raises ValueError if it has tools or no whole group. With a reward, it also
    raises ValueError for a trainer that lacks the function, has a rollout_func, sleeps, or shares its engine with other
    processes.
    """

    def __init__(
        self,
        redundancy: int = 8,
        num_generations: int | None = None,
        reward: Callable[..., Any] | None = None,
        **options: Unpack[RolloutOptions],
    ) -> None:
        for name, value, least in (("redundancy", redundancy, 0), ("num_generations", num_generations, 2)):
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if not has(IN_PROCESS):
            raise ValueError(f"colocate needs the part {IN_PROCESS}, which is left out.")
        if options and reward is None:
            raise ValueError(f"{', '.join(options)} must come with reward. Give one of the trainer's reward_funcs.")
        plugins = os.environ.get("VLLM_PLUGINS")
        if plugins is not None and "vllm_rollout" not in plugins.split(","):
            raise ValueError(f"VLLM_PLUGINS must name vllm_rollout, got {plugins!r}. Unset it, or add the name.")
        from trl import GRPOTrainer

        self._redundancy, self._reward, self._options = redundancy, reward, options
        self._trainer, self._before = GRPOTrainer, GRPOTrainer.__init__
        GRPOTrainer.__init__ = self._racing(getattr(self._before, "__before_colocate__", self._before))
        wanted = {"VLLM_ROLLOUT": "scheduler,worker", "VLLM_ROLLOUT_REDUNDANCY": str(redundancy)}
        self._environment = {name: os.environ.get(name) for name in (*wanted, "VLLM_ROLLOUT_GROUP_SIZE")}
        os.environ.update(wanted)
        _set("VLLM_ROLLOUT_GROUP_SIZE", None if num_generations is None else str(num_generations))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._trainer.__init__ = self._before
        for name, value in self._environment.items():
            _set(name, value)

    def _racing(self, init: Callable[..., None]) -> Callable[..., None]:
        """Wrap `init`, a trainer's `__init__`, so that its groups race. An earlier call of `colocate` has no effect on
        it.
        """

        @wraps(init)
        def racing(trainer: Any, *args: Any, **kwargs: Any) -> None:
            given = signature(init).bind(trainer, *args, **kwargs)
            config = given.arguments.get("args")
            if config is None or not config.use_vllm or config.vllm_mode != "colocate":
                warnings.warn(
                    "colocate has no effect on this trainer: it races groups of vLLM in the trainer's process. Set "
                    'use_vllm=True and vllm_mode="colocate" in its GRPOConfig.',
                    stacklevel=2,
                )
                init(trainer, *args, **kwargs)
                return
            self._check(given, config)
            _set("VLLM_ROLLOUT_GROUP_SIZE", str(config.num_generations))
            init(trainer, *args, **kwargs)
            if self._reward is not None:
                self._grade(trainer, self._reward)

        racing.__before_colocate__ = init  # type: ignore[attr-defined]
        return racing

    def _check(self, given: BoundArguments, config: Any) -> None:
        """Raises: ValueError if the trainer cannot race."""
        its = given.arguments
        if its.get("tools") or its.get("environment_factory"):
            raise ValueError(
                "tools and environment_factory must be None under colocate: each turn would race by itself, and short "
                'turns would win. Leave colocate out, or use TRLAgents with vllm_mode="server".'
            )
        num_rows = config.per_device_train_batch_size * config.steps_per_generation * config.vllm_tensor_parallel_size
        if num_rows < config.num_generations:
            raise ValueError(
                f"each process must have a whole group, got {num_rows} completions a generation for num_generations="
                f"{config.num_generations}. Raise per_device_train_batch_size or steps_per_generation."
            )
        if self._reward is None:
            return
        functions = its.get("reward_funcs")
        if self._reward not in (functions if isinstance(functions, list) else [functions]):
            raise ValueError(f"reward_funcs must have the reward of colocate ({self._reward!r:.80}). Add it.")
        refused = {
            "rollout_func must be None": its.get("rollout_func") is not None,
            "vllm_enable_sleep_mode must be False": config.vllm_enable_sleep_mode,
            "vllm_tensor_parallel_size must be 1": config.vllm_tensor_parallel_size > 1,
        }
        for said, is_so in refused.items():
            if is_so:
                raise ValueError(f"{said} where colocate has a reward. Leave reward out: TRL then grades by itself.")

    def _grade(self, trainer: Any, reward: Callable[..., Any]) -> None:
        """Let the engine call the reward function, and TRL read its results."""
        become_ours = face(IN_PROCESS, "become_ours")
        assert become_ours is not None, "a colocate needs it"
        engine = become_ours(trainer.vllm_generation.llm, rewards={NAME: reward})
        if engine is None:  # it stayed vLLM's, and the log has the reason
            return
        rollouts = ColocatedRollouts(engine, redundancy=self._redundancy, **{**self._options, "reward": NAME})
        trainer.rollout_func = rollouts
        trainer.reward_funcs = [rollouts.graded if each == reward else each for each in trainer.reward_funcs]


class ColocatedRollouts(TRLRollouts):
    """Groups of an engine in this process, which only the calling thread steps. Overrides: _of_sizes."""

    def _of_sizes(self, sizes: Sequence[int], roll_out: GroupsOfSize) -> list[Placed]:
        return [found for size in sizes for found in roll_out(size)]


def _set(name: str, value: str | None) -> None:
    """Set an environment variable, or unset it if `value` is None."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value

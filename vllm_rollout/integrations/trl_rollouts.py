"""A `rollout_func` for TRL's GRPOTrainer: groups by our client, with spare candidates, pruning, and posted rewards.

    rollouts = TRLRollouts("http://127.0.0.1:8000", redundancy=8, pruning={"detection_length": 64})
    GRPOTrainer(..., rollout_func=rollouts, reward_funcs=[rollouts.teaching(is_right), style])

    rollouts = TRLRollouts("http://127.0.0.1:8000", reward="accuracy")  # the server grades, by that reward
    GRPOTrainer(..., rollout_func=rollouts, reward_funcs=[rollouts.graded])

TRL computes rewards after `rollout_func` has returned, and passes every extra field of the result to reward functions.
So each completion carries its address (rollout, prompt, index). A reward function wrapped by `teaching` posts its
rewards to that address. The server's reward comes back as another field. The server's reward function gets the columns
of the data set. They are looked up by prompt, because TRL does not pass them to a `rollout_func`.

Invariant: a prompt that comes G times gets exactly G completions.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Protocol, TypeVar

from typing_extensions import Unpack

from vllm_rollout import RolloutClient, RolloutError, RolloutOptions
from vllm_rollout.integrations.trl_rows import (
    INDEX,
    PROMPT,
    REWARD,
    ROLLOUT,
    Columns,
    rows_of,
    runs_of,
    sampling_of,
    seeded,
    tokenized,
    with_columns,
)
from vllm_rollout.kernel.client.body import PromptLike, Redundancy
from vllm_rollout.kernel.client.connection import DEFAULT_URL
from vllm_rollout.kernel.http.answers import GroupAnswer

RewardFunction = TypeVar("RewardFunction", bound=Callable[..., Any])
Placed = tuple[int, str, GroupAnswer]
"""Position of a prompt, its rollout's id, and its group."""
GroupsOfSize = Callable[[int], list[Placed]]


class RollsOut(Protocol):
    """A client, or an LLM in this process."""

    rollout: Callable[..., Any]
    post_rewards: Callable[..., Any]


class TRLRollouts:
    """Generates for a GRPOTrainer. Weights are synchronized by TRL: `use_vllm=True, vllm_mode="server"`."""

    def __init__(
        self,
        server: str | RollsOut = DEFAULT_URL,
        *,
        redundancy: Redundancy = 0,
        **options: Unpack[RolloutOptions],
    ) -> None:
        """`server`: a URL or a client. The other arguments are those of `RolloutClient.rollout`. Sampling parameters
        given here override the trainer's configuration.

        Raises: ValueError for options that allow a group smaller than TRL needs.
        """
        pruning = options.get("pruning")
        if pruning is not None and dict(pruning).get("allow_fewer"):
            raise ValueError(
                "pruning.allow_fewer must be false, got true: TRL takes groups of exactly num_generations. Give "
                "redundancy instead, from which pruning may take."
            )
        self._client: RollsOut = RolloutClient(server) if isinstance(server, str) else server
        self._redundancy = redundancy
        self._sampling = dict(options.pop("sampling_params", None) or {})
        included = dict.fromkeys([*(options.get("include") or ()), "logprobs"])  # TRL needs those
        self._options: RolloutOptions = {**options, "include": list(included)}
        self._columns = Columns()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Called by TRL as its `rollout_func`: one completion per prompt, in the order of the prompts.

        Returns columns of `[num_prompts]`. Raises: RolloutError with the server's words. RuntimeError if a group could
        not be completed.
        """
        trainer.accelerator.wait_for_everyone()  # TRL's main process may still send weights
        training = trainer.model.training
        runs = runs_of(prompts, trainer.num_generations if training else trainer.num_generations_eval)
        asked = self._asked([prompt for prompt, _ in runs], trainer)
        sampling = seeded({**sampling_of(trainer), **self._sampling}, trainer)

        def roll_out(size: int) -> list[Placed]:
            places = [place for place, (_, count) in enumerate(runs) if count == size]
            chosen = [asked[place] for place in places]
            redundancy = self._redundancy if size == trainer.num_generations else 0  # else a part, or an evaluation's
            options: Any = self._options if training else {**self._options, "pruning": None}
            answer = self._client.rollout(chosen, size, redundancy, sampling_params=sampling, **options)
            return [(place, answer.id, group) for place, group in zip(places, answer.groups, strict=True)]

        # Usually one size. Two or three if a group is split between processes.
        sizes = sorted({count for _, count in runs})
        groups = sorted(self._of_sizes(sizes, roll_out), key=lambda found: found[0])
        rows = [row for place, rollout, group in groups for row in rows_of(rollout, group, runs[place][1])]
        return {field: [row[field] for row in rows] for field in rows[0]}

    def _of_sizes(self, sizes: Sequence[int], roll_out: GroupsOfSize) -> list[Placed]:
        """Groups of all sizes, requested at the same time."""
        with ThreadPoolExecutor(len(sizes)) as pool:
            return [found for part in pool.map(roll_out, sizes) for found in part]

    def _asked(self, prompts: Sequence[Any], trainer: Any) -> Sequence[PromptLike]:
        """Prompts as token ids, by the trainer's tokenizer. If the server grades, it gets the messages of chats too,
        because TRL's reward functions read messages.

        Raises: ValueError for a prompt that is not in the data set.
        """
        token_ids = tokenized(prompts, trainer)
        if self._options.get("reward") is None:
            return token_ids
        known = with_columns(prompts, self._columns.of(trainer))
        return [
            {"prompt_token_ids": ids, **({} if isinstance(prompt, str) else {"messages": prompt}), "data": columns}
            for (prompt, columns), ids in zip(known, token_ids, strict=True)
        ]

    def graded(self, **columns: Any) -> Sequence[float | None]:
        """Reward function for TRL: the server's reward of each completion, `[num_completions]`. None: no reward.

        Raises: ValueError without the option `reward`.
        """
        if self._options.get("reward") is None or REWARD not in columns:
            raise ValueError("graded needs TRLRollouts(..., reward=NAME), which is the trainer's rollout_func too.")
        rewards: Sequence[float | None] = columns[REWARD]
        return rewards

    def teaching(self, reward_function: RewardFunction, *, threshold: float | None = None) -> RewardFunction:
        """Wrap a reward function so that it also posts its rewards. Pruning learns from them.

        Wrap the function that checks whether an answer is right. A reward above `threshold` (None: the server's
        default, 0.5) is positive. A reward of None is not posted. Nothing is posted without the option `pruning`.

        Raises: TypeError for a reward model, which TRL calls in another way.
        """
        if not callable(reward_function) or hasattr(reward_function, "forward"):
            raise TypeError(f"teaching takes a function, got {reward_function!r:.80}. Wrap the model in one.")

        # TRL asks an object with an async __call__ the same way.
        if inspect.iscoroutinefunction(reward_function) or inspect.iscoroutinefunction(reward_function.__call__):

            @wraps(reward_function)
            async def later(*args: Any, **columns: Any) -> Any:
                rewards = await reward_function(*args, **columns)
                await asyncio.to_thread(self._post, rewards, columns, threshold)
                return rewards

            return later  # type: ignore[return-value]

        @wraps(reward_function)
        def at_once(*args: Any, **columns: Any) -> Any:
            rewards = reward_function(*args, **columns)
            self._post(rewards, columns, threshold)
            return rewards

        return at_once  # type: ignore[return-value]

    def _post(self, rewards: Sequence[float | None], columns: Mapping[str, Any], threshold: float | None) -> None:
        if self._options.get("pruning") is None:  # a server that prunes nothing has nothing to learn
            return
        if ROLLOUT not in columns:
            raise ValueError(f"the reward function got no {ROLLOUT}: give the trainer rollout_func too.")
        by_rollout: dict[str, list[tuple[str, int, float]]] = {}
        for rollout, prompt, index, reward in zip(
            *(columns[c] for c in (ROLLOUT, PROMPT, INDEX)), rewards, strict=True
        ):
            if reward is not None and math.isfinite(reward):
                by_rollout.setdefault(rollout, []).append((prompt, index, float(reward)))
        for rollout, posted in by_rollout.items():
            try:
                counts = self._client.post_rewards(rollout, posted, threshold).counts
            except RolloutError as error:
                if error.status != 404:
                    raise
                # The server has been restarted: training goes on, and these rewards are lost.
                warnings.warn(f"rewards of {rollout} were not taken: {error}", stacklevel=2)
            else:
                columns.get("log_metric", lambda *_: None)("rollout/rewards_accepted", float(counts.accepted))

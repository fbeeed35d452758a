"""A `rollout_func` for TRL's GRPOTrainer: groups by our client, with spare candidates, pruning, rewards posted back.

    rollouts = TRLRollouts("http://127.0.0.1:8000", redundancy=8, pruning={"detection_length": 64})
    GRPOTrainer(..., rollout_func=rollouts, reward_funcs=[rollouts.teaching(is_right), style])

    rollouts = TRLRollouts("http://127.0.0.1:8000", reward="accuracy")  # the server grades, by that reward
    GRPOTrainer(..., rollout_func=rollouts, reward_funcs=[rollouts.graded])

TRL computes rewards after `rollout_func` has returned, and gives a reward function every field that this returned
beside its own. So each completion carries its address (rollout, prompt, index), and a reward function that is marked
with `teaching` posts what it says to that address. The server's reward comes the same way. Its function gets the
columns of the data set, looked up by prompt, since TRL does not hand them to a `rollout_func`. Invariant: a prompt that
comes G times gets exactly G completions.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from itertools import chain, groupby
from typing import Any, TypeVar

from typing_extensions import Unpack

from vllm_rollout.client.body import PromptLike
from vllm_rollout.client.client import Redundancy, RolloutClient, RolloutError, RolloutOptions
from vllm_rollout.client.connection import DEFAULT_URL
from vllm_rollout.server.answers import GroupAnswer

ROLLOUT, PROMPT, INDEX = "rollout_id", "rollout_prompt_id", "rollout_index"
SURVIVAL, REWARD = "rollout_survival_probability", "rollout_reward"
SEED_STRIDE, MAX_SEED = 0x9E3779B97F4A7C15, 1 << 62
RewardFunction = TypeVar("RewardFunction", bound=Callable[..., Any])


class colocate:
    """Race the groups of a GRPOTrainer that has vLLM in its own process (`vllm_mode="colocate"`).

        colocate(redundancy=8, num_generations=config.num_generations)
        trainer = GRPOTrainer(...)

    TRL asks for each completion by itself. Equal prompts in a row become groups of `num_generations`, with `redundancy`
    spare candidates, and TRL gets its rows in their order. A group that is cut between two processes is not raced: give
    each process whole groups (`per_device_train_batch_size * steps_per_generation` a multiple of num_generations).
    Spare candidates need places and KV cache: max_num_seqs grows by `redundancy / num_generations`.

    It sets the environment variables of docs/in_process.md, which processes that are started later inherit; in a `with`
    statement, until its end. Raises: ValueError for sizes that are no group's, and where VLLM_PLUGINS leaves us out.
    """

    def __init__(self, redundancy: int = 8, num_generations: int = 8) -> None:
        for name, value, least in (("redundancy", redundancy, 0), ("num_generations", num_generations, 2)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        plugins = os.environ.get("VLLM_PLUGINS")
        if plugins is not None and "vllm_rollout" not in plugins.split(","):
            raise ValueError(f"VLLM_PLUGINS must name vllm_rollout, got {plugins!r}. Unset it, or add the name.")
        wanted = {
            "VLLM_ROLLOUT": "scheduler,worker",
            "VLLM_ROLLOUT_REDUNDANCY": str(redundancy),
            "VLLM_ROLLOUT_GROUP_SIZE": str(num_generations),
        }
        self._before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class TRLRollouts:
    """Generates for a GRPOTrainer. Its weights are synchronized as ever: `use_vllm=True, vllm_mode="server"`."""

    def __init__(
        self,
        server: str | RolloutClient = DEFAULT_URL,
        *,
        redundancy: Redundancy = 0,
        **options: Unpack[RolloutOptions],
    ) -> None:
        """`server`: its URL, or a client. The others are those of `RolloutClient.rollout`.

        `sampling` goes before what the trainer's configuration says. Raises: ValueError for options by which a group
        could come back smaller than TRL needs.
        """
        pruning = options.get("pruning")
        if pruning is not None and dict(pruning).get("allow_fewer"):
            raise ValueError(
                "pruning.allow_fewer must be false, got true: TRL takes groups of exactly num_generations. Give "
                "redundancy instead, from which pruning may take."
            )
        self._client = server if isinstance(server, RolloutClient) else RolloutClient(server)
        self._redundancy = redundancy
        self._sampling = dict(options.pop("sampling", None) or {})
        self._options: RolloutOptions = {**options, "return_logprobs": True}
        self._columns: dict[bool, dict[str, Any]] = {}
        """Columns of the data sets of training and of evaluation, by prompt."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """What TRL asks of a `rollout_func`: a completion per prompt, siblings in a row as the prompts come.

        Raises: RolloutError with the server's words, RuntimeError when a group could not be completed.
        """
        training = trainer.model.training
        num_generations = trainer.num_generations if training else trainer.num_generations_eval
        runs = runs_of(prompts, num_generations)
        asked = self._asked([prompt for prompt, _ in runs], trainer)
        sampling = seeded({**sampling_of(trainer), **self._sampling}, trainer)

        def roll_out(size: int) -> list[tuple[int, str, GroupAnswer]]:
            places = [place for place, (_, count) in enumerate(runs) if count == size]
            chosen = [asked[place] for place in places]
            answer = self._client.rollout(chosen, size, self._redundancy, sampling=sampling, **self._options)
            return [(place, answer.id, group) for place, group in zip(places, answer.groups, strict=True)]

        # One size as a rule; two or three where a group is cut in two between processes.
        sizes = sorted({count for _, count in runs})
        with ThreadPoolExecutor(len(sizes)) as pool:
            groups = sorted((found for part in pool.map(roll_out, sizes) for found in part), key=lambda found: found[0])
        rows = [row for place, rollout, group in groups for row in rows_of(rollout, group, runs[place][1])]
        return {field: [row[field] for row in rows] for field in rows[0]}

    def _asked(self, prompts: Sequence[Any], trainer: Any) -> Sequence[PromptLike]:
        """As token ids, by the trainer's tokenizer. A chat that is graded is one for the server, too: TRL's reward
        functions look at messages. Raises: ValueError for a prompt that is not in the data set.
        """
        token_ids = tokenized(prompts, trainer)
        if self._options.get("reward") is None:
            return token_ids
        training = trainer.model.training
        if training not in self._columns:
            self._columns[training] = columns_by_prompt(trainer.train_dataset if training else trainer.eval_dataset)
        return [
            {**({"prompt_token_ids": ids} if isinstance(prompt, str) else {"messages": prompt}), "data": columns}
            for (prompt, columns), ids in zip(with_columns(prompts, self._columns[training]), token_ids, strict=True)
        ]

    def graded(self, **columns: Any) -> Sequence[float | None]:
        """A reward function for TRL, which says what the server has said; None where there is no reward.

        Raises: ValueError without the option `reward`.
        """
        if self._options.get("reward") is None or REWARD not in columns:
            raise ValueError("graded needs TRLRollouts(..., reward=NAME), which is the trainer's rollout_func too.")
        rewards: Sequence[float | None] = columns[REWARD]
        return rewards

    def teaching(self, reward_function: RewardFunction, *, threshold: float | None = None) -> RewardFunction:
        """The same reward function, which also posts what it says: from it pruning learns whom to stop.

        Mark the one that says whether an answer is right. A reward above `threshold` (0.5) is positive; None is not
        posted. Raises: TypeError for a reward model, which TRL calls in a way of its own.
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
                # The server was started anew since: training goes on, what it would have learned is lost.
                warnings.warn(f"rewards of {rollout} were not taken: {error}", stacklevel=2)
            else:
                columns.get("log_metric", lambda *_: None)("rollout/rewards_accepted", float(counts.accepted))


def runs_of(prompts: Sequence[Any], num_generations: int) -> list[tuple[Any, int]]:
    """Each prompt once, with how often it comes in a row; at most `num_generations`, the rest is the next group."""
    runs: list[tuple[Any, int]] = []
    for prompt, same in groupby(prompts):
        count = len(list(same))
        sizes = [num_generations] * (count // num_generations) + [count % num_generations]
        runs += [(prompt, size) for size in sizes if size]
    return runs


def columns_by_prompt(data_set: Iterable[Mapping[str, Any]] | Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What TRL does not hand to a `rollout_func`: the other columns of each row, of one data set or several by name.

    Raises: ValueError for two rows that ask the same and differ in another column: nobody could tell them apart.
    """
    columns: dict[str, dict[str, Any]] = {}
    for row in chain.from_iterable(data_set.values() if isinstance(data_set, Mapping) else [data_set]):
        row = dict(row)
        prompt = row.pop("prompt")
        if (known := columns.setdefault(json.dumps(prompt), row)) != row:
            both = known.keys() & row.keys()
            name = next(name for name in {**known, **row} if name not in both or row[name] != known[name])
            raise ValueError(
                f"two rows have the prompt {prompt!r:.80} and another {name}, and a rollout_func is told the prompt "
                "alone. Make prompts differ, or leave that column out."
            )
    return columns


def seeded(sampling: dict[str, Any], trainer: Any) -> dict[str, Any]:
    """With a seed of this process's own: TRL asks each for its own prompts, of which two may have halves of a group."""
    process = trainer.accelerator.process_index
    if sampling.get("seed") is None or not process:
        return sampling
    return {**sampling, "seed": (sampling["seed"] + process * SEED_STRIDE) % MAX_SEED}


def with_columns(prompts: Sequence[Any], columns: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Raises: ValueError for a prompt that is not in the data set."""
    if missing := [prompt for prompt in prompts if json.dumps(prompt) not in columns]:
        raise ValueError(f"the columns of each prompt are needed, and the data set has no {missing[0]!r:.80}.")
    return [(prompt, columns[json.dumps(prompt)]) for prompt in prompts]


def tokenized(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Token ids by the trainer's own tokenizer and chat template. Raises: ValueError for images."""
    if isinstance(prompts[0], str):
        return [list(ids) for ids in trainer.processing_class(text=list(prompts))["input_ids"]]
    contents = [message.get("content") for prompt in prompts for message in prompt]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if any(part["type"] != "text" for part in parts):
        raise ValueError(
            "prompts must be text for this rollout_func, got a message with images. Leave rollout_func out, and set "
            'generation_kwargs={"vllm_xargs": {"rollout_redundancy": …}}.'
        )
    template = {"chat_template": trainer.chat_template, "tools": trainer.tools or None, **trainer.chat_template_kwargs}
    settings = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **template}
    apply = trainer.processing_class.apply_chat_template
    return [list(apply(conversation=[prompt], **settings)["input_ids"][0]) for prompt in prompts]


def sampling_of(trainer: Any) -> dict[str, Any]:
    """The sampling fields of the trainer's configuration, as TRL's own client sends them."""
    args = trainer.args
    sampling = {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        "max_tokens": trainer.max_completion_length,
    }
    if args.vllm_structured_outputs_regex is not None:
        sampling["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    more = dict(args.generation_kwargs or {})
    if more.pop("vllm_xargs", None):
        raise ValueError(
            "generation_kwargs has vllm_xargs beside rollout_func: name these options in TRLRollouts(...)."
        )
    return {**sampling, **more}


def rows_of(rollout: str, group: GroupAnswer, size: int) -> list[dict[str, Any]]:
    """A row per completion: what TRL needs, and its address. Raises: RuntimeError for an incomplete group."""
    if len(group.trajectories) != size:
        raise RuntimeError(
            f"group {group.prompt_id} of {rollout} has {len(group.trajectories)} trajectories, {size} are needed: "
            f"{group.reason}. Repeat the step, or let TRL resume from its checkpoint."
        )
    return [
        {
            "prompt_ids": group.prompt_token_ids,
            "completion_ids": trajectory.token_ids,
            "logprobs": trajectory.logprobs,
            ROLLOUT: rollout,
            PROMPT: group.prompt_id,
            INDEX: trajectory.index,
            SURVIVAL: trajectory.survival_probability,
            REWARD: trajectory.reward,
        }
        for trajectory in group.trajectories
    ]

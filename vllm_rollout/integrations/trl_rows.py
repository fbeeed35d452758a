"""Conversion between the rows of TRL's trainer and our groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from vllm_rollout.kernel.http.answers import GroupAnswer

ROLLOUT, PROMPT, INDEX = "rollout_id", "rollout_prompt_id", "rollout_index"
SURVIVAL, REWARD = "rollout_survival_probability", "rollout_reward"
SEED_STRIDE, MAX_SEED = 0x9E3779B97F4A7C15, 1 << 62


def runs_of(prompts: Sequence[Any], num_generations: int) -> list[tuple[Any, int]]:
    """Runs of equal prompts with their counts. A count is at most `num_generations`, and the rest starts
    another run.
    """
    runs: list[tuple[Any, int]] = []
    for prompt, same in groupby(prompts):
        count = len(list(same))
        sizes = [num_generations] * (count // num_generations) + [count % num_generations]
        runs += [(prompt, size) for size in sizes if size]
    return runs


def columns_by_prompt(data_set: Iterable[Mapping[str, Any]] | Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Columns of the data set except `prompt`, by the prompt's JSON. TRL does not pass them to a `rollout_func`.

    `data_set`: rows, or several data sets by name. Raises: ValueError for two rows with the same prompt and different
    columns.
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


class Columns:
    """Columns of a trainer's data sets by prompt, of the newest for training and of the newest for evaluation."""

    def __init__(self) -> None:
        self._known: dict[bool, tuple[Any, dict[str, dict[str, Any]]]] = {}

    def of(self, trainer: Any) -> dict[str, dict[str, Any]]:
        """Columns of the data set that is used now. Raises: ValueError without one, and as `columns_by_prompt`."""
        training = trainer.model.training
        data_set = trainer.train_dataset if training else trainer.eval_dataset
        if data_set is None:
            raise ValueError(
                "the trainer must have eval_dataset to evaluate with this rollout_func, got None. Give it to the "
                "trainer, because TRL tells a rollout_func no columns of the data set that evaluate() gets."
            )
        if training not in self._known or self._known[training][0] is not data_set:
            self._known[training] = data_set, columns_by_prompt(data_set)
        return self._known[training][1]


def seeded(sampling: dict[str, Any], trainer: Any) -> dict[str, Any]:
    """Sampling parameters with a different seed per trainer process. Two processes can have parts of one group."""
    process = trainer.accelerator.process_index
    if sampling.get("seed") is None or not process:
        return sampling
    return {**sampling, "seed": (sampling["seed"] + process * SEED_STRIDE) % MAX_SEED}


def with_columns(prompts: Sequence[Any], columns: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Prompts with their columns. Raises: ValueError for a prompt that is not in the data set."""
    if missing := [prompt for prompt in prompts if json.dumps(prompt) not in columns]:
        raise ValueError(f"the columns of each prompt are needed, and the data set has no {missing[0]!r:.80}.")
    return [(prompt, columns[json.dumps(prompt)]) for prompt in prompts]


def tokenized(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Token ids by the trainer's tokenizer and chat template. Raises: ValueError for images."""
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
    """Sampling parameters of the trainer's configuration, as TRL's own client sends them.

    Raises: ValueError if `generation_kwargs` has `vllm_xargs`.
    """
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
    """One row per completion: TRL's fields, and the completion's address. Raises: RuntimeError for an
    incomplete group.
    """
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

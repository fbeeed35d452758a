"""Rows that are asked for one by one, as trainers do: equal prompts in a row are a group, and come back as rows.

Invariant: as many rows as prompts, in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from vllm_rollout.group.plans.xargs import NAMES, rollout_xargs


class Run(NamedTuple):
    """Equal prompts in a row."""

    prompt: Any
    num: int


def runs_of(prompts: Any, params: object, group_size: int | None) -> list[Run] | None:
    """The groups that these prompts are; None where they are answered as they are.

    group_size: of each group; None: however many are equal. Greedy and seeded requests are left as they are, since they
    say the same however often they are asked for.
    """
    if not isinstance(prompts, Sequence) or isinstance(prompts, str) or not isinstance(params, SamplingParams):
        return None
    if params.n > 1 or params.temperature == 0 or params.seed is not None or rollout_xargs(params.extra_args or {}):
        return None
    runs: list[Run] = []
    for prompt in prompts:
        if runs and runs[-1].num != group_size and _are_same(runs[-1].prompt, prompt):
            runs[-1] = Run(prompt, runs[-1].num + 1)
        else:
            runs.append(Run(prompt, 1))
    return runs if any(run.num > 1 for run in runs) else None


def with_spares(params: SamplingParams, num: int, group_size: int | None) -> SamplingParams:
    """These parameters with `num` spare candidates. Single requests, parts of groups and requests with `rollout_*`
    fields keep theirs."""
    is_whole = params.n > 1 and group_size in (None, params.n)
    if not is_whole or rollout_xargs(params.extra_args or {}):
        return params
    raced = copy(params)
    raced.extra_args = {**(params.extra_args or {}), NAMES["redundancy"]: num}
    return raced


def sized(params: SamplingParams, num: int) -> SamplingParams:
    """These parameters for `num` completions."""
    group = copy(params)
    group.n = num
    return group


def rows_of(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """An output for each completion."""
    rows = []
    for output in outputs:
        for completion in output.outputs:
            row, one = copy(output), copy(completion)
            one.index, row.outputs = 0, [one]
            rows.append(row)
    return rows


def _are_same(first: Any, second: Any) -> bool:
    """Whether two prompts are equal, images and other data in them included."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_are_same(value, second[key]) for key, value in first.items())
    if isinstance(first, (list, tuple)):
        if len(first) != len(second):
            return False
        return first == second if _are_plain(first) else all(map(_are_same, first, second))
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and np.array_equal(first, second)
    if isinstance(first, torch.Tensor):
        return (first.dtype, first.device) == (second.dtype, second.device) and torch.equal(first, second)
    return first is second or bool(first == second)


def _are_plain(values: Sequence[Any]) -> bool:
    """Token ids: all are compared at once."""
    return not values or isinstance(values[0], (int, str))

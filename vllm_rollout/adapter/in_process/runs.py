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
    """Equal prompts in a row, with equal parameters."""

    prompt: Any
    params: SamplingParams
    num: int

    @property
    def of_all(self) -> SamplingParams:
        """The parameters of one request for all of them."""
        if self.num == 1:
            return self.params
        group = copy(self.params)
        group.n = self.num
        return group


def runs_of(prompts: Any, params: Any, group_size: int | None) -> list[Run] | None:
    """The groups that these prompts are; None where they are answered as they are.

    params: of all, or of each. group_size: of each group; None: however many are equal.
    """
    if not isinstance(prompts, Sequence) or isinstance(prompts, str):
        return None
    each = params if isinstance(params, Sequence) else [params] * len(prompts)
    if len(each) != len(prompts) or not all(isinstance(its, SamplingParams) for its in each):
        return None
    runs: list[Run] = []
    for prompt, its in zip(prompts, each, strict=True):
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.num != group_size
            and _draws(its)
            and (last.params is its or last.params == its)
            and _are_same(last.prompt, prompt)
        ):
            runs[-1] = Run(prompt, its, last.num + 1)
        else:
            runs.append(Run(prompt, its, 1))
    return runs if any(run.num > 1 for run in runs) else None


def _draws(params: SamplingParams) -> bool:
    """Whether equal requests draw anew, one completion each. Greedy and seeded ones say the same again."""
    is_drawn = params.n == 1 and params.temperature != 0 and params.seed is None
    return is_drawn and not rollout_xargs(params.extra_args or {})


def with_spares(params: SamplingParams, num: int, group_size: int | None) -> SamplingParams:
    """These parameters with `num` spare candidates. Single requests, parts of groups and requests with `rollout_*`
    fields keep theirs."""
    is_whole = params.n > 1 and group_size in (None, params.n)
    if not is_whole or rollout_xargs(params.extra_args or {}):
        return params
    raced = copy(params)
    raced.extra_args = {**(params.extra_args or {}), NAMES["redundancy"]: num}
    return raced


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

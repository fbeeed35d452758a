"""Prompts that trainers send as separate rows. Equal prompts in a row become a group, and come back as rows.

Invariant: there are as many rows as prompts, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from vllm_rollout.kernel.xargs import NAMES, rollout_xargs

logger = init_logger("vllm.vllm_rollout")


class Run(NamedTuple):
    """Equal prompts in a row, with equal parameters."""

    prompt: Any
    params: SamplingParams
    num: int

    @property
    def of_all(self) -> SamplingParams:
        """Parameters of one request for the whole run."""
        if self.num == 1:
            return self.params
        group = copy(self.params)
        group.n = self.num
        return group


def runs_of(prompts: Any, params: Any, group_size: int | None) -> list[Run] | None:
    """Groups of equal prompts. None if there are no such groups, so that the prompts are answered unchanged.

    params: one for all prompts, or one per prompt. group_size: maximum size of a group. None: no maximum.
    """
    if not isinstance(prompts, Sequence) or isinstance(prompts, str) or _is_one_of_tokens(prompts):
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
    """True if equal requests sample independently, one completion each. Greedy and seeded requests repeat
    their output.
    """
    is_drawn = params.n == 1 and params.temperature != 0 and params.seed is None
    return is_drawn and not rollout_xargs(params.extra_args or {})


def _is_one_of_tokens(prompts: Sequence[Any]) -> bool:
    """True if vLLM takes this list for a single prompt of token ids."""
    return bool(prompts) and all(isinstance(each, int) for each in prompts)


def with_spares(params: SamplingParams, num: int, group_size: int | None, most: int) -> SamplingParams:
    """The parameters with `num` spare candidates, in an engine of at most `most` candidates.

    Single requests, partial groups, requests with a seed or with `rollout_*` fields, and groups without a place for
    their spare candidates are returned unchanged.
    """
    is_whole = params.n > 1 and group_size in (None, params.n) and params.seed is None
    if not is_whole or rollout_xargs(params.extra_args or {}):
        return params
    if params.n + num > most:
        logger.warning_once(
            "vllm_rollout: %d candidates and %d spare ones do not fit into max_num_seqs %d: such groups do not race.",
            params.n,
            num,
            most,
        )
        return params
    raced = copy(params)
    raced.extra_args = {**(params.extra_args or {}), NAMES["redundancy"]: num}
    return raced


def rows_of(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """One output per completion."""
    rows = []
    for output in outputs:
        for completion in output.outputs:
            row, one = copy(output), copy(completion)
            one.index, row.outputs = 0, [one]
            rows.append(row)
    return rows


def _are_same(first: Any, second: Any) -> bool:
    """True if two prompts are equal, including images and other data in them."""
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
    """True for token ids and texts: they are compared as a whole."""
    return not values or isinstance(values[0], (int, str))

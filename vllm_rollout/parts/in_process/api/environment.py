"""Engines of other code get groups by environment variables, without an engine argument.

    VLLM_ROLLOUT=scheduler,worker VLLM_ROLLOUT_REDUNDANCY=8 python train.py

vLLM loads our plugin when it makes engine arguments, in a class that a trainer has imported long before. So classes are
not replaced: an `LLM` becomes one of ours at its first call, an `AsyncLLM` when it is created.

Invariant: without the variable nothing changes. An engine that cannot be taken over stays vLLM's, with one warning.
With VLLM_ROLLOUT_STRICT=1 it is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from math import ceil
from typing import Any, NamedTuple

import vllm
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.v1.engine import async_llm

from vllm_rollout.adapter.names import SCHEDULER_CLS
from vllm_rollout.kernel.parts import face
from vllm_rollout.parts.in_process.api.async_llm import AsyncLLM
from vllm_rollout.parts.in_process.api.engine_args import with_groups
from vllm_rollout.parts.in_process.api.llm import LLM

logger = init_logger("vllm.vllm_rollout")

ASKED = "VLLM_ROLLOUT"
ALLOWED = "scheduler,worker"
REDUNDANCY, GROUP_SIZE, STRICT = "VLLM_ROLLOUT_REDUNDANCY", "VLLM_ROLLOUT_GROUP_SIZE", "VLLM_ROLLOUT_STRICT"
EMULATE = "VLLM_ROLLOUT_EMULATE"
ASSUMED_GROUP_SIZE = 8
"""Group size for the number of spare places, if VLLM_ROLLOUT_GROUP_SIZE is not set."""
SPARES = "rollout_spares"
"""Key of an engine's spare candidates in its additional_config."""
METHODS = ("generate", "chat", "enqueue", "enqueue_chat", "beam_search")


class Wanted(NamedTuple):
    """Settings from the environment."""

    redundancy: int = 0
    group_size: int | None = None
    strict: bool = False
    emulate: str | None = None
    """A file as for `serve --rollout-emulate`: the engine has no model, and its step times come from this file."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Wanted:
        """Read the settings. Raises: ValueError."""
        parts = {part.strip() for part in environment.get(ASKED, "").split(",")}
        if parts != set(ALLOWED.split(",")):
            raise ValueError(f"{ASKED} must be {ALLOWED!r}, got {environment.get(ASKED)!r}. Unset it for stock vLLM.")
        return cls(
            _number(environment, REDUNDANCY, 0) or 0,
            _number(environment, GROUP_SIZE, 2),
            environment.get(STRICT, "0") not in ("", "0"),
            environment.get(EMULATE),
        )


def _number(environment: Mapping[str, str], name: str, least: int) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name} must be a number of at least {least}, got {text!r}.")
    return int(text)


def created(create: Callable[..., VllmConfig], engine_args: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
    """Create the configuration, with groups if the model generates. `create`: vLLM's own function.

    An engine that names our scheduler itself takes only its device from the environment.
    """
    if engine_args.scheduler_cls == SCHEDULER_CLS:
        device = Wanted.of(os.environ).emulate
        return create(engine_args if device is None else _emulated(engine_args, device), *args, **kwargs)
    ours = taken_over(engine_args)
    if ours is not engine_args:
        try:
            config = create(ours, *args, **kwargs)
            runner = config.model_config.runner_type
            if runner != "generate":
                raise ValueError(f"its runner is {runner!r}, and groups need one that generates. Unset {ASKED}.")
        except Exception as error:
            if Wanted.of(os.environ).strict:
                raise
            logger.warning("vllm_rollout: this engine stays vLLM's own, because %s", error)
        else:
            logger.info(
                "vllm_rollout: this engine has groups (%s). Requests with n, and equal prompts in a row, have %d spare "
                "candidates; max_num_seqs is %s for it, and they take KV cache.",
                ASKED, Wanted.of(os.environ).redundancy, config.scheduler_config.max_num_seqs,
            )  # fmt: skip
            return config
    return create(engine_args, *args, **kwargs)


def taken_over(engine_args: EngineArgs) -> EngineArgs:
    """Engine arguments with groups, and with places for spare candidates.

    Raises: ValueError for invalid variables. With VLLM_ROLLOUT_STRICT, any error if the engine cannot be taken over.
    """
    wanted = Wanted.of(os.environ)
    try:
        ours = with_groups(engine_args)
        if wanted.redundancy:
            ours = _with_spares(ours, wanted)
        if wanted.emulate is not None:
            ours = _emulated(ours, wanted.emulate)
        _let_become_ours()
    except Exception as error:
        if wanted.strict:
            raise
        logger.warning("vllm_rollout: this engine stays vLLM's own, because %s", error)
        return engine_args
    return ours


def _with_spares(engine_args: EngineArgs, wanted: Wanted) -> EngineArgs:
    """Engine arguments with places for spare candidates, if the number of places is set. A step has a token for each
    place.
    """
    places, most = engine_args.max_num_seqs, engine_args.max_num_batched_tokens
    if places is not None:
        grown = places + ceil(places / (wanted.group_size or ASSUMED_GROUP_SIZE)) * wanted.redundancy
        places = grown if most is None else max(places, min(grown, most))
    said = {**(engine_args.additional_config or {}), SPARES: (wanted.redundancy, wanted.group_size)}
    return replace(engine_args, max_num_seqs=places, additional_config=said)


def _emulated(engine_args: EngineArgs, file: str) -> EngineArgs:
    """Engine arguments for an emulated device. Raises: ValueError for a file that describes no device."""
    if (on_device := face("emulation", "engine_args")) is None:
        raise ValueError(f"{EMULATE} is for the part 'emulation', and it is left out. Unset it.")
    emulated: EngineArgs = on_device(engine_args, file)
    return emulated


def _let_become_ours() -> None:
    """Let engines with our scheduler become ours. Changes vLLM's classes once per process."""
    for name in METHODS:
        method = getattr(vllm.LLM, name)
        if not hasattr(method, "__wrapped__"):
            setattr(vllm.LLM, name, _of_ours(name, method))
    now = async_llm.AsyncLLM  # ours, where VLLM_PLUGINS names us. A trainer may have imported vLLM's own before
    stock = next(cls for cls in now.__mro__ if cls.__module__ == async_llm.__name__)

    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("vllm_config", args[0] if args else None)
        if cls not in (stock, now) or config is None or not _is_ours(config):
            return object.__new__(cls)
        engine = object.__new__(AsyncLLM)
        engine.spares, engine.group_size = _spares_of(config)
        return engine

    stock.__new__ = new  # type: ignore[assignment]


def _is_ours(config: VllmConfig) -> bool:
    return config.scheduler_config.scheduler_cls == SCHEDULER_CLS


def _spares_of(config: VllmConfig) -> tuple[int, int | None]:
    """Spare candidates and group size of this engine, which may be one of several in a process."""
    return (config.additional_config or {}).get(SPARES, (0, None))


def become_ours(llm: vllm.LLM, **settings: Any) -> LLM | None:
    """Give an LLM groups, once, and return it. None if its engine stayed vLLM's. `settings`: as of
    `LLM.begin_groups`.
    """
    if isinstance(llm, LLM):
        return llm
    config = llm.llm_engine.vllm_config
    if not _is_ours(config):
        return None
    cls = type(llm)
    llm.__class__ = LLM if cls is vllm.LLM else type(f"Rollout{cls.__name__}", (LLM, cls), {})
    assert isinstance(llm, LLM)
    llm.begin_groups(**settings)
    llm.spares, llm.group_size = _spares_of(config)
    if said := too_little_memory(config, llm.spares, llm.group_size or ASSUMED_GROUP_SIZE):
        logger.warning("vllm_rollout: %s", said)
    return llm


def too_little_memory(config: VllmConfig, spares: int, group_size: int) -> str | None:
    """A warning if the KV cache does not hold one group with its spare candidates at full length, else None."""
    cache, num_tokens = config.cache_config, config.model_config.max_model_len
    num_blocks, num_candidates = cache.num_gpu_blocks, group_size + spares
    held = (num_blocks or 0) * cache.block_size
    if not spares or num_blocks is None or held >= num_candidates * num_tokens:
        return None
    return (
        f"the KV cache holds {held} tokens, and {group_size} candidates with {spares} spare ones of max_model_len "
        f"({num_tokens}) need {num_candidates * num_tokens}. Long groups will be preempted: raise "
        f"gpu_memory_utilization, or lower {REDUNDANCY}."
    )


def _of_ours(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(self: vllm.LLM, *args: Any, **kwargs: Any) -> Any:
        is_own = type(self) is vllm.LLM  # else a subclass has begun its own method, which must not begin again
        ours = None if isinstance(self, LLM) else become_ours(self)
        return method(self, *args, **kwargs) if ours is None or not is_own else getattr(ours, name)(*args, **kwargs)

    return called

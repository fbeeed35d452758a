"""Settings of an engine in a trainer's own process on a CPU. The caller's own settings stay."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch._dynamo.config
from vllm import AsyncEngineArgs

from vllm_rollout.adapter.names import CPU_EXECUTOR_CLS
from vllm_rollout.on_cpu import GIB, Cpu
from vllm_rollout.parts.in_process.api import engine_args
from vllm_rollout.parts.in_process.api.engine_args import group_settings, with_groups

SLOW = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2 * GIB}


@pytest.fixture(autouse=True)
def slow_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # else vLLM looks for the model at once
    monkeypatch.setattr(engine_args, "resolve", lambda name: f"/cache/{name}" if name == "tiny-random" else name)
    monkeypatch.setattr(engine_args, "compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(engine_args, "this_cpu", lambda: Cpu("Old Xeon", frozenset({"avx2"}), 2))


def of_keywords(model: str, **chosen: Any) -> dict[str, Any]:
    return group_settings(model, chosen)


def of_engine_args(model: str, **chosen: Any) -> dict[str, Any]:
    return vars(with_groups(AsyncEngineArgs(model=model, **chosen)))


@pytest.mark.parametrize("settings_of", [of_keywords, of_engine_args])
def test_an_embedded_model_gets_what_this_cpu_is_fast_with(settings_of):
    settings = settings_of("tiny-random")
    assert settings.items() >= SLOW.items()
    assert (settings["model"], settings["served_model_name"]) == ("/cache/tiny-random", "tiny-random")
    assert (settings["block_size"], settings["distributed_executor_backend"]) == (32, CPU_EXECUTOR_CLS)


@pytest.mark.parametrize("settings_of", [of_keywords, of_engine_args])
def test_what_the_caller_has_chosen_stays(settings_of):
    chosen = {"dtype": "bfloat16", "block_size": 64, "served_model_name": "mine", "distributed_executor_backend": "mp"}
    settings = settings_of("tiny-random", **chosen, gpu_memory_utilization=0.5)
    assert settings.items() >= chosen.items()
    assert settings.get("kv_cache_memory_bytes") is None
    assert not of_keywords("tiny-random", enforce_eager=False)["enforce_eager"]


@pytest.mark.parametrize("settings_of", [of_keywords, of_engine_args])
def test_another_model_keeps_vllms_number_type_and_compilation(settings_of):
    settings = settings_of("/some/model", block_size=None)
    assert settings.get("dtype", "auto") == "auto"
    assert not settings.get("enforce_eager")
    assert (settings["block_size"], settings["distributed_executor_backend"]) == (32, CPU_EXECUTOR_CLS)


@pytest.mark.parametrize("settings_of", [of_keywords, of_engine_args])
def test_several_workers_and_bound_threads_are_vllms_own_affair(settings_of, monkeypatch):
    assert settings_of("/some/model", tensor_parallel_size=2).get("distributed_executor_backend") is None
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    assert settings_of("/some/model").get("distributed_executor_backend") is None


@pytest.mark.parametrize("settings_of", [of_keywords, of_engine_args])
def test_without_a_compiler_torch_compiles_nothing(settings_of, monkeypatch):
    monkeypatch.setattr(engine_args, "compiler", lambda: None)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    with torch._dynamo.config.patch(disable=False):
        assert settings_of("/some/model")["enforce_eager"]
        assert torch._dynamo.config.disable
    assert os.environ["TORCH_COMPILE_DISABLE"] == "1"

"""Imports and engine configurations under a fake H100, of a site with vLLM for CUDA and our wheel: check.py FOLDER."""

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

import fake_h100  # noqa: F401  (first: it says what the device is)
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
from vllm.v1.worker.gpu_worker import Worker

import vllm_rollout
from benchmarks.gpu_check import served
from benchmarks.gpu_check.engine_child import engine_options
from benchmarks.gpu_check.models import Models
from benchmarks.gpu_check.pieces import ENGINES, PIECES, sources_of
from vllm_rollout.kernel.api.serve import parse
from vllm_rollout.kernel.worker.runner import RunnerV1Mixin, RunnerV2Mixin
from vllm_rollout.kernel.worker.worker import RolloutWorker
from vllm_rollout.kernels import confidence, quality_head, token_confidence
from vllm_rollout.parts.observing.tracker.dispatch import active_implementation, extension_fault


def check(what: str, holds: bool, found: object = "") -> None:
    print(f"{'ok ' if holds else 'NOT'} {what} {found}", flush=True)
    if not holds:
        sys.exit(1)


def main(folder: Path) -> None:
    where = Path(vllm_rollout.__file__).parent
    check("our package is the wheel's", where.is_relative_to(sys.prefix), where)
    check("the C++ operators load", extension_fault() is None, extension_fault())
    check("operators of the CPU are C++", active_implementation("cpu").name == "c++")
    for operator, module in (
        ("token_confidence", token_confidence), ("quality_head", quality_head), ("update_confidence", confidence)
    ):  # fmt: skip
        found = active_implementation("cuda", operator)
        check(f"{operator} on CUDA is Triton", found.name == "triton" and hasattr(module, f"{operator}_triton"), found)
    plugins = {entry.name for entry in entry_points() if entry.value.startswith("vllm_rollout")}
    check("vLLM finds our plugins", len(plugins) >= 2, sorted(plugins))
    check("all pieces have sources", all(len(sources_of(name, "cuda")) == 16 for name in PIECES))
    models = Models(folder, small=False)
    for name, settings in ENGINES.items():
        options = engine_options(settings)
        os.environ |= settings.environment
        config = EngineArgs(model=str(models.path(settings.model)), **options).create_engine_config(
            usage_context=UsageContext.LLM_CLASS
        )
        is_v2, is_async = config.use_v2_model_runner, bool(config.scheduler_config.async_scheduling)
        for variable in settings.environment:  # it is read when the property is
            del os.environ[variable]
        said = f"V2 {is_v2}, asynchronous {is_async}, {config.compilation_config.cudagraph_mode}"
        if settings.kind == "drafts" or name.startswith("v1"):
            check(name, not is_v2, said)
        else:
            check(name, is_v2, said)
        if name == "v1 synchronous" or settings.kind == "drafts":
            check(f"{name} is synchronous", not is_async)
        elif settings.kind == "rollout" and settings.model == "8b":
            check(f"{name} is asynchronous", is_async)
    check("our server takes the flags of its piece", bool(parse(["m", *served.FLAGS], "serve", "")))
    check("our worker is the GPU's", issubclass(RolloutWorker, Worker))
    for mixin, runner in ((RunnerV1Mixin, RunnerV1), (RunnerV2Mixin, RunnerV2)):
        missing = [
            name for name in ("execute_model", "sample_tokens", "_dummy_sampler_run") if not hasattr(runner, name)
        ]
        check(f"{mixin.__name__} finds what it overrides", not missing, missing)
    check("torch", torch.__version__.startswith("2.11.0"), torch.__version__)


main(Path(sys.argv[1]))

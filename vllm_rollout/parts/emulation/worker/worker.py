"""The worker of an emulated device: no model, made-up tokens, at the times of the device.

Invariant: the scheduler gets outputs with the form and timing of a model runner's outputs, in vLLM's asynchronous loop
and in the synchronous one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_rollout.adapter.weights import Changes
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.worker.worker_calls import WorkerCalls
from vllm_rollout.parts.emulation.device import Device, DeviceSpan
from vllm_rollout.parts.emulation.fate import Fates
from vllm_rollout.parts.emulation.options import EmulationOptions
from vllm_rollout.parts.emulation.settings import Settings
from vllm_rollout.parts.emulation.step_log import LoggedStep, StepLog
from vllm_rollout.parts.emulation.worker.ports import SaidRow
from vllm_rollout.parts.emulation.worker.runner import EmulatedRunner, LaunchedStep

logger = init_logger("vllm.vllm_rollout")


class EmulatedOutput(AsyncModelRunnerOutput):
    """Output of a step, readable once the device is done with it. Overrides: get_output, get_kv_connector_output."""

    def __init__(self, step: LaunchedStep, span: DeviceSpan, log: StepLog) -> None:
        self._step, self._span, self._log = step, span, log

    def get_output(self) -> ModelRunnerOutput:
        while (left := self._span.end - time.perf_counter()) > 0:
            time.sleep(left)
        step, span = self._step, self._span
        self._log.add(
            LoggedStep(*span, time.perf_counter(), time.thread_time(), step.goes_on, step.num_sampled, *step.work)
        )
        return step.output

    def get_kv_connector_output(self) -> None:
        """There is no connector."""


class EmulatedWorker(WorkerCalls, WorkerBase):
    """Implements the calls of an engine core with one worker. Adds the methods of `WorkerCalls`."""

    def init_device(self) -> None:
        emulation = EmulationOptions.of(self.vllm_config)
        assert emulation.file is not None, "an emulated device has its settings"
        self.device = torch.device("cpu")
        parallel = self.vllm_config.parallel_config
        self.emulation = Settings.read(emulation.file).at(parallel.tensor_parallel_size)
        fates = Fates(self.emulation, parallel.data_parallel_index, emulation.num_ranks)
        self.emulated_device = Device(self.emulation, emulation.speed)
        self.quality_heads = None
        self.runner = EmulatedRunner(fates, self.vocab_size, self._marker())
        self.runner.parts = [(name, part) for name, make in faces("emulated") if (part := make(self)) is not None]
        self.step_log = StepLog(
            None if emulation.log is None else Path(emulation.log),
            rank=parallel.data_parallel_index,
            speed=emulation.speed,
            say=logger.info,
            num_ranks=emulation.num_ranks,
            goes_on=emulation.log_goes_on,
        )
        self._launched: LaunchedStep | None = None
        self._said: Sequence[SaidRow] = ()
        """Rows of the last step that was launched."""

    def _marker(self) -> list[int]:
        """Tokens with which a turn asks for a tool. Raises: ValueError without a tokenizer."""
        if self.emulation.turns is None:
            return []
        tokenizer = cached_tokenizer_from_config(self.model_config)
        if tokenizer is None:
            raise ValueError(
                "turns.marker is a text, and --skip-tokenizer-init leaves no tokenizer. Leave one of them out."
            )
        return tokenizer.encode(self.emulation.turns.marker, add_special_tokens=False)

    def load_model(self, **_: Any) -> None:
        """There is no model to load."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=self.model_config.get_num_kv_heads(self.parallel_config),
            head_size=self.model_config.get_head_size(),
            dtype=self.model_config.dtype,  # type: ignore[arg-type]
        )
        return {"emulated": spec}

    def determine_available_memory(self) -> int:
        spec = self.get_kv_cache_spec()["emulated"]
        assert self.emulation.kv_tokens is not None, "Settings.at() has said how many"
        return self.emulation.kv_tokens // spec.block_size * spec.page_size_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """The KV cache has no memory."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def execute_dummy_batch(self) -> None:
        """Do nothing, in no time, on a rank without requests beside ranks with some (shared experts)."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        self._launched = self.runner.step(scheduler_output)
        return EMPTY_MODEL_RUNNER_OUTPUT if self._launched is None else None

    def sample_tokens(self, grammar_output: Any) -> EmulatedOutput | None:
        step, self._launched = self._launched, None
        if step is None:
            return None
        span = self.emulated_device.launch(time.perf_counter(), step.work)
        for _, part in self.runner.parts:
            part.took(step.work, span.end - span.start)
        self._said = step.rows
        return EmulatedOutput(step, span, self.step_log)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts for the next step."""
        rows, self._said = self._said, ()
        proposed = (part.propose(rows) for _, part in self.runner.parts if rows)
        return next((drafts for drafts in proposed if drafts is not None), None)

    def shutdown(self) -> None:
        self.step_log.close()

    def sleep(self, level: int = 1) -> None:
        """There are no weights to offload, load, update or reset. Only their changes are counted."""

    def wake_up(self, tags: list[str] | None = None) -> None: ...

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None: ...

    def reset_encoder_cache(self) -> None: ...

    def compute_weight_checksums(self) -> dict[str, str]:
        return {}

    def reset_weights(self) -> None: ...

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        Changes.num += 1

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        Changes.num += 1

    def finish_weight_update(self) -> None:
        Changes.num += 1

"""The worker that `--worker-cls` names: the platform's own, with an observed model runner and quality heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_rollout.adapter.call_table import Features, Refusal
from vllm_rollout.adapter.options import RolloutOptions, observing_refusal
from vllm_rollout.adapter.worker.runner import observe_runner
from vllm_rollout.group.report import HeadInfo
from vllm_rollout.tracker.feature_ring import FeatureRing
from vllm_rollout.tracker.ops import active_implementation
from vllm_rollout.tracker.quality_head import HeadMismatch, warm_up_training
from vllm_rollout.tracker.quality_heads import QualityHeads

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

logger = init_logger("vllm.vllm_rollout")

STEP_OPERATORS = ("token_stats", "update_confidence", "quality_head")
"""What a step calls, the last one only when a candidate is due."""


class RolloutWorker(PlatformWorker):
    """Overrides: init_device. Adds the methods that begin with `rollout_`, for `collective_rpc`; of all ranks only the
    one whose outputs are read scores and learns, the others answer None. `worker_extension_cls` stays free for the
    trainer.
    """

    def init_device(self, *args: Any, **kwargs: Any) -> None:
        super().init_device(*args, **kwargs)
        self.quality_heads: QualityHeads | None = None
        ring = None
        hidden_size, dtype = self.model_config.get_hidden_size(), self.model_config.dtype
        if get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0:
            ring = FeatureRing(hidden_size, dtype, RolloutOptions.of(self.vllm_config).feature_ring_bytes)
        refusal = observing_refusal(self.vllm_config)
        seen_by = ring if refusal is None else None
        observe_runner(self.model_runner, seen_by, v2=self.use_v2_model_runner, cpu=current_platform.is_cpu())
        logger.info_once(
            "vllm_rollout worker: model runner %s, %s",
            "V2" if self.use_v2_model_runner else "V1",
            ", ".join(_described(operator, self.device.type) for operator in STEP_OPERATORS),
        )
        if refusal is not None:
            logger.warning_once("vllm_rollout worker: candidates are not observed, because %s", refusal)
        if ring is None:
            return
        warm_up_training()
        self.quality_heads = QualityHeads(
            self.model_runner.candidate_tracker,
            ring,
            hidden_size=hidden_size,
            model=self.model_config.served_model_name or self.model_config.model,
            device=self.device,
        )
        logger.info_once(
            "vllm_rollout worker: features of up to %d scored candidates (hidden size %d) wait for their rewards in "
            "at most %d MB of host memory, used as they come",
            ring.capacity,
            hidden_size,
            round(ring.capacity * hidden_size * dtype.itemsize / 2**20),
        )

    def rollout_learn(
        self, detection_length: int, request_ids: list[str], positives: list[bool], weights: list[float]
    ) -> list[int] | None:
        """Plan training on the features kept for these requests; returns positions of those that were still there."""
        if (heads := self.quality_heads) is None:
            return None
        features, found = heads.take_features(request_ids)
        heads.learn(detection_length, features, [positives[i] for i in found], [weights[i] for i in found])
        return found

    def rollout_take_features(self, request_ids: list[str]) -> tuple[Features, list[int]] | None:
        """Features for another rank to learn from, and their positions in `request_ids`."""
        if (heads := self.quality_heads) is None:
            return None
        features, found = heads.take_features(request_ids)
        dtype = str(features.dtype).removeprefix("torch.")
        return Features(features.contiguous().view(torch.uint8).numpy().tobytes(), dtype), found

    def rollout_learn_features(
        self, detection_length: int, features: Features, positives: list[bool], weights: list[float]
    ) -> None:
        """Plan training on another rank's features."""
        if (heads := self.quality_heads) is not None and positives:
            dtype = getattr(torch, features.dtype)
            rows = torch.frombuffer(bytearray(features.data), dtype=dtype).reshape(len(positives), -1)
            heads.learn(detection_length, rows, positives, weights)

    def rollout_train(self, budget_s: float) -> int | None:
        """Train for `budget_s` seconds at most, or one step; returns how many planned steps are left."""
        return None if self.quality_heads is None else self.quality_heads.train(budget_s)

    def rollout_heads(self) -> list[HeadInfo] | None:
        return None if self.quality_heads is None else self.quality_heads.infos()

    def rollout_head_losses(self, detection_length: int) -> list[float] | None:
        return None if self.quality_heads is None else self.quality_heads.losses(detection_length)

    def rollout_put_head(self, data: bytes, known: list[int], spare: int | None) -> HeadInfo | Refusal | None:
        return None if self.quality_heads is None else _answer(self.quality_heads.put, data, known, spare)

    def rollout_forget_heads(self, detection_lengths: list[int]) -> None:
        if (heads := self.quality_heads) is not None:
            for detection_length in detection_lengths:
                heads.forget(detection_length)

    def rollout_open_head(self, reader: str, detection_length: int) -> int | None:
        """Begin to read a trained head; returns how many bytes there are, None without one."""
        return None if self.quality_heads is None else self.quality_heads.open(reader, detection_length)

    def rollout_copy_head_state(self, reader: str, detection_length: int) -> int | None:
        """Begin to read a head with its optimizer; returns how many bytes there are, 0: call again."""
        return None if self.quality_heads is None else self.quality_heads.copy_state(reader, detection_length)

    def rollout_read(self, reader: str, start: int, end: int) -> bytes | None:
        """A part of what is open."""
        return None if self.quality_heads is None else self.quality_heads.read(reader, start, end)

    def rollout_restore_heads(self, states: list[bytes], known: list[int]) -> list[int] | Refusal | None:
        """Answers the heads' detection lengths."""
        return None if self.quality_heads is None else _answer(self.quality_heads.restore, states, known)


def _described(operator: str, device_type: str) -> str:
    implementation = active_implementation(device_type, operator)
    return f"{operator}: {implementation.name}" + (f" ({implementation.reason})" if implementation.reason else "")


def _answer(put: Callable[..., Any], *args: Any) -> Any:
    """Errors as values: of an exception only its text would cross the executor."""
    try:
        return put(*args)
    except HeadMismatch as error:
        return Refusal("mismatch", str(error))
    except ValueError as error:
        return Refusal("invalid", str(error))

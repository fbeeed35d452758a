"""Our own settings of an engine. They travel in vLLM's `additional_config`, which every process gets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm.config import VllmConfig

from vllm_rollout.config import DEFAULT_AUDIT_RATIO, DRAFT_MEMORY_BYTES, FEATURE_RING_BYTES, TRAIN_BUDGET_S
from vllm_rollout.parts.drafts.rules import MAX_DRAFT_TOKENS

KEY = "vllm_rollout"

DRAFTS_CONFIG = {
    "method": "custom_class",
    "model": "vllm_rollout.Drafts",
    "num_speculative_tokens": MAX_DRAFT_TOKENS,
}
"""`--speculative-config` of a server whose candidates are drafts for each other."""


@dataclass(frozen=True, slots=True)
class EmulationOptions:
    """Values of the emulation flags."""

    file: str
    speed: float
    log: str | None
    async_scheduling: bool
    """The user's setting. The platform may have switched vLLM's own setting off."""
    num_ranks: int
    """Number of data-parallel ranks. (An engine core of a dense model knows only itself.)"""
    log_goes_on: bool = False
    """True if the engine replaces another one, whose steps stay in the log."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Values of our own flags of `vllm-rollout serve`."""

    train_budget_s: float = TRAIN_BUDGET_S
    feature_ring_bytes: int = FEATURE_RING_BYTES
    emulation: EmulationOptions | None = None
    forks: bool = False
    """True if engine cores begin as copies of the server on the CPU platform too, where vLLM starts new processes."""
    moves_kv: bool = True
    """True if a group that moves takes its KV blocks along."""
    moves_kv_by_nixl: bool = False
    """True if it takes them to other hosts too."""
    audit_ratio: float = DEFAULT_AUDIT_RATIO
    """Audit ratio of requests that learn and set none."""
    draft_memory_bytes: int = DRAFT_MEMORY_BYTES
    """Host memory of answers that serve as drafts, in bytes."""
    drafts_file: str | None = None
    """Path of the file for drafts between two starts. A rank appends its number."""
    beside_rust: bool = False
    """True if vLLM's Rust front end is the engine cores' first client. It knows no groups, held ranks or dead ranks."""

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> ServeOptions:
        fields = dict(vllm_config.additional_config.get(KEY, {}))
        emulation = fields.pop("emulation", None)
        return cls(**fields, emulation=emulation and EmulationOptions(**emulation))

    @property
    def of_next_engine(self) -> ServeOptions:
        """Settings of an engine that replaces one with these."""
        emulation = self.emulation
        return self if emulation is None else replace(self, emulation=replace(emulation, log_goes_on=True))

    def into(self, additional_config: dict[str, Any]) -> dict[str, Any]:
        """`additional_config` with these settings. Unchanged for default settings, because vLLM's compile cache depends
        on it.
        """
        return additional_config if self == ServeOptions() else {**additional_config, KEY: asdict(self)}


def observing_refusal(vllm_config: VllmConfig) -> str | None:
    """Reason if rows of the sampler's logits are not this step's requests, else None. Then no candidate can be observed
    or scored.
    """
    if vllm_config.speculative_config is not None and (
        vllm_config.scheduler_config.async_scheduling or vllm_config.use_v2_model_runner
    ):
        method = vllm_config.speculative_config.method
        return f"speculative decoding (--speculative-config) by {method!r} says a step late how many tokens there are"
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        return "--enable-batch-sharded-sampling gives each rank's sampler a part of the batch"
    if each_worker_schedules(vllm_config):
        return (
            "with distributed_executor_backend 'external_launcher' each of its workers has a scheduler of its own, and "
            "only one of them would know of scores"
        )
    return None


def each_worker_schedules(vllm_config: VllmConfig) -> bool:
    """True if several schedulers must decide alike, each from its own worker's report: an engine of several workers
    that a trainer has launched (torchrun).
    """
    parallel = vllm_config.parallel_config
    is_launched = parallel.distributed_executor_backend == "external_launcher"
    return is_launched and parallel.world_size > parallel.data_parallel_size

"""Settings of an engine: the kernel's own, and the base of those of parts.

They travel in vLLM's `additional_config`, which every process gets. Each part has a class of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from vllm_rollout.config import DEFAULT_AUDIT_RATIO

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "vllm_rollout"


class Configured(Protocol):
    """vLLM's configuration, its engine arguments, or the arguments of a command line."""

    additional_config: Any


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the kernel, or of one part. Every field has a default.

    Invariant: only values that differ from their defaults are written, because vLLM's compile cache depends on them.
    """

    PART: ClassVar[str]

    @classmethod
    def of(cls, configured: Configured) -> Self:
        return cls(**configured.additional_config.get(KEY, {}).get(cls.PART, {}))

    @classmethod
    def change(cls, configured: Configured, **values: Any) -> None:
        """Give some of these settings other values."""
        configured.additional_config = replace(cls.of(configured), **values).into(configured.additional_config)

    def into(self, additional_config: dict[str, Any]) -> dict[str, Any]:
        """`additional_config` with these settings."""
        changed = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}
        ours = {**additional_config.get(KEY, {}), self.PART: changed}
        kept = {part: values for part, values in ours.items() if values}
        others = {key: value for key, value in additional_config.items() if key != KEY}
        return {**others, KEY: kept} if kept else others


@dataclass(frozen=True, slots=True)
class ServeOptions(Options):
    """The kernel's settings."""

    PART = "kernel"

    forks: bool = False
    """True if engine cores begin as copies of the server on the CPU platform too, where vLLM starts new processes."""
    has_model: bool = True
    """False if the worker makes tokens up, so that no model runs."""
    num_local_ranks: int = 1
    """Data-parallel ranks on this host. In ranks of a dense model vLLM's own configuration says 1."""
    audit_ratio: float = DEFAULT_AUDIT_RATIO
    """Audit ratio of requests that learn and set none."""
    beside_rust: bool = False
    """True if vLLM's Rust front end is the engine cores' first client. It knows no groups, held ranks or dead ranks."""


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

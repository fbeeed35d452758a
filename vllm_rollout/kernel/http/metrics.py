"""The metric table: name, unit, help (docs/reference/metrics.md). Served with vLLM's own on `/metrics`.

The kernel's metrics stand here. Each part has a class of its own, which is its face `metrics`.

The prefix is `vllm_rollout:`, not `vllm:`: vLLM unregisters every name of that prefix which it does not own. The client
library appends `_total` to counters.

Invariant: the values of a label divide what is counted, so that a sum over them counts nothing twice. Shares and ratios
end in `_ratio`, times in `_seconds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TypeVar, get_args

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm_rollout.kernel.http.engine import Engine
from vllm_rollout.kernel.http.engine_totals import EngineTotals, Reading
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.types import STOP_STATES, Ending, GroupResult, GroupStatus, RankCounts

PREFIX = "vllm_rollout:"
LATENCY_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
TAIL_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


LeftBy = Literal["rollout", "choices", "joined"]
"""Requests whose client may leave before their end.

rollout  a request to `/v1/rollouts`, or a round
choices  a request to an OpenAI endpoint with a group of its own
joined   a request that joins a group
"""

TokenFate = Literal["returned", "wasted", "deferred"]
"""returned  in a selected trajectory
wasted    all other tokens of a group that is over
deferred  of a group that goes on in a later round, or starts anew there
"""

Metric = TypeVar("Metric", Counter, Histogram)
Own = TypeVar("Own", bound="PartMetrics")
Shared = TypeVar("Shared")


class MetricMaker:
    """Makes metrics of one registry. Has what metrics of several parts share."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.totals = EngineTotals()
        self._shared: dict[Callable[[], Any], Any] = {}

    def counter(self, name: str, help: str, **labels: Iterable[str]) -> Counter:
        """A counter with a series for each known value of its label, starting at 0."""
        return _begun(Counter(f"{PREFIX}{name}", help, tuple(labels), registry=self._registry), labels)

    def histogram(self, name: str, help: str, buckets: Sequence[float], **labels: Iterable[str]) -> Histogram:
        """A histogram with a series for each known value of its label, starting at 0."""
        made = Histogram(f"{PREFIX}{name}", help, tuple(labels), buckets=buckets, registry=self._registry)
        return _begun(made, labels)

    def gauge(self, name: str, help: str, *labels: str, each: bool = False) -> Gauge:
        """A gauge. Of several API processes the one that looked last knows best, unless `each` counts its own."""
        mode: Literal["livesum", "mostrecent"] = "livesum" if each else "mostrecent"
        return Gauge(f"{PREFIX}{name}", help, labels, registry=self._registry, multiprocess_mode=mode)

    def shared(self, kind: Callable[[], Shared]) -> Shared:
        """The one object of this kind, for all parts that ask for it."""
        if kind not in self._shared:
            self._shared[kind] = kind()
        shared: Shared = self._shared[kind]
        return shared


def _begun(metric: Metric, labels: Mapping[str, Iterable[str]]) -> Metric:
    for value in chain(*labels.values()):
        metric.labels(value)
    return metric


class PartMetrics:
    """Metrics of a part, made once per process. `Metrics` passes on what happens in the kernel."""

    def __init__(self, make: MetricMaker) -> None:
        """Makes the metrics."""

    def group_over(self, result: GroupResult, plan: GroupPlan | None) -> None:
        """Count a group that is over. `plan`: None for a group of sessions."""

    def noted(self, parts: Mapping[str, Any]) -> None:
        """Count a candidate by what parts say of its end, by part."""

    async def refresh(self, engine: Engine, ranks: Mapping[int, RankCounts]) -> Iterable[Reading]:
        """Set the gauges that are read from the engine. Returns the engine's own numbers for counters.

        Raises: EngineStopped.
        """
        return ()


class Metrics:
    """Counters and gauges of an API process: groups and ranks. Those of parts: `of`."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        make = MetricMaker(registry)
        self._totals = make.totals
        self._groups = make.counter("groups", "Groups that are over, by status.", status=get_args(GroupStatus))
        states = ("finished", *STOP_STATES, "failed")
        self._candidates = make.counter("candidates", "Candidates that ended, by end state.", state=states)
        self._left = make.counter(
            "clients_left", "Requests whose client left before their end, by kind of request.", request=get_args(LeftBy)
        )
        self._tokens = make.counter(
            "tokens",
            "Output tokens that candidates generated: returned in trajectories, wasted, or deferred with their group.",
            kind=get_args(TokenFate),
        )
        self._latency = make.histogram(
            "group_latency_seconds", "Time from the start of the rollout to the end of the group.", LATENCY_BUCKETS_S
        )
        tail = "Share of a group's tokens that is not returned."
        self._tail = make.histogram("group_wasted_ratio", tail, TAIL_BUCKETS)
        held = "Groups in the engine: running, or idle because they wait for requests that are to join them."
        self._held = make.gauge("groups_held", held, "state")
        unmet = "Groups of joining requests that did not all come to one engine."
        self._unmet = make.counter("joined_groups_unmet", unmet)
        self._internal_errors = make.counter(
            "internal_errors",
            "Exceptions in the code of vllm_rollout on a rank. They failed candidates or groups.",
            rank=(),
        )
        self._weight_changes = make.counter("weight_changes", "Updates of a rank's weights.", rank=())
        self._task_errors = make.counter(
            "background_task_errors", "Exceptions in background tasks, by task. The exceptions are in the log.", task=()
        )
        self._parts: dict[type[PartMetrics], PartMetrics] = {kind: kind(make) for _, kind in faces("metrics")}

    def of(self, kind: type[Own]) -> Own:
        """The metrics of a part, by their class."""
        metrics = self._parts[kind]
        assert isinstance(metrics, kind)
        return metrics

    def group_over(self, result: GroupResult, latency_s: float, plan: GroupPlan | None = None) -> None:
        """Count a group. `plan`: None for a group of sessions."""
        self._groups.labels(result.status).inc()
        for ending, fate in token_fates(result):
            self._count(ending, fate)
        self._latency.observe(latency_s)
        if num_tokens := result.generated_tokens + result.resumed_tokens:
            self._tail.observe(result.wasted_tokens / num_tokens)
        for part in self._parts.values():
            part.group_over(result, plan)

    def client_left(self, request: LeftBy, endings: Iterable[Ending] = ()) -> None:
        """Count a request whose client left. `endings`: candidates that are not counted elsewhere."""
        self._left.labels(request).inc()
        for ending in endings:
            self._count(ending, "wasted")

    def joined_over(self, ending: Ending) -> None:
        """Count one candidate of a group whose members are separate requests. If it finished, its request returns
        it."""
        self._count(ending, "returned" if ending.state == "finished" else "wasted")

    def _count(self, ending: Ending, fate: TokenFate) -> None:
        self._candidates.labels(ending.state).inc()
        self._tokens.labels(fate).inc(ending.num_tokens - ending.num_resumed)

    def noted(self, parts: Mapping[str, Any]) -> None:
        for part in self._parts.values():
            part.noted(parts)

    def task_failed(self, task: str) -> None:
        self._task_errors.labels(task).inc()

    async def refresh(self, engine: Engine) -> None:
        """Show the engine's own numbers. Files of other API processes are read once.

        Raises: EngineStopped.
        """
        ranks = await engine.rank_counts()
        self._held.labels("running").set(sum(rank.groups.num_running for rank in ranks.values()))
        self._held.labels("idle").set(sum(rank.groups.num_idle for rank in ranks.values()))
        readings = [Reading(self._unmet, {}, sum(rank.num_unmet for rank in ranks.values()))]
        for rank, counts in ranks.items():
            readings.append(Reading(self._internal_errors, {"rank": str(rank)}, counts.num_internal_errors))
            readings.append(Reading(self._weight_changes, {"rank": str(rank)}, counts.num_weight_changes))
        for part in self._parts.values():
            readings += await part.refresh(engine, ranks)
        self._totals.read(readings)


def token_fates(result: GroupResult) -> Iterator[tuple[Ending, TokenFate]]:
    """Each candidate of a group that is over, with what became of its tokens."""
    rest: TokenFate = "deferred" if result.status == "deferred" else "wasted"
    selected = set(result.selected)
    for ending in result.endings:
        yield ending, "returned" if ending.index in selected else rest

"""The metrics that `/metrics` adds to vLLM's: name, type, unit, labels, help."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from docs_tools.reference.markdown import prose, table
from vllm_rollout.kernel.http.metrics import PREFIX, Metrics

UNITS = {"seconds": "seconds", "bytes": "bytes", "tokens": "tokens", "ratio": "ratio"}
"""Last word of a name -> unit. Other metrics are counts, or numbers without a unit."""


class Collected(CollectorRegistry):
    """A registry that remembers its metrics in order."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[MetricWrapperBase] = []

    def register(self, collector: object) -> None:
        super().register(collector)  # type: ignore[arg-type]
        assert isinstance(collector, MetricWrapperBase)
        self.metrics.append(collector)


def all_metrics() -> list[MetricWrapperBase]:
    registry = Collected()
    Metrics(registry)
    return sorted(registry.metrics, key=name_of)


def name_of(metric: MetricWrapperBase) -> str:
    """The name in `/metrics`, where a counter ends in `_total`."""
    name: str = metric._name
    return f"{name}_total" if metric._type == "counter" else name


def part() -> str:
    rows = ((f"`{name_of(m)}`", m._type, _unit(m), _labels(m), prose(m._documentation)) for m in all_metrics())
    return f"All names begin with `{PREFIX}`.\n\n" + table(
        ("name", "type", "unit", "labels", "what it says"),
        ((name.replace(PREFIX, ""), *others) for name, *others in rows),
    )


def _unit(metric: MetricWrapperBase) -> str:
    words = metric._name.split("_")
    return UNITS.get(words[-1], "") or ("count" if metric._type == "counter" else "")


def _labels(metric: MetricWrapperBase) -> str:
    """Each label. A single label is followed by its known values."""
    values = sorted(key[0] for key in metric._metrics) if len(metric._labelnames) == 1 else []
    shown = [f"`{label}`" for label in metric._labelnames]
    return ", ".join(shown) + (f": {', '.join(f'`{value}`' for value in values)}" if values else "")

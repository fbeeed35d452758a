"""The dashboard that is committed is the one that its script makes, and asks for metrics that there are."""

from __future__ import annotations

import json
import re

from prometheus_client import CollectorRegistry

from examples.grafana import FILE, OURS, dashboard
from vllm_rollout.kernel.http.metrics import Metrics

OF_A_HISTOGRAM = {"_bucket": {"le"}, "_sum": set(), "_count": set()}


def test_the_file_is_what_the_script_makes() -> None:
    assert json.loads(FILE.read_text()) == dashboard()


def test_every_query_asks_for_a_metric_and_labels_that_there_are() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    known: dict[str, set[str]] = {}
    for collector in set(registry._names_to_collectors.values()):
        labels = set(collector._labelnames)  # type: ignore[attr-defined]
        for metric in collector.describe() if hasattr(collector, "describe") else ():
            names = {"counter": {"_total": set()}, "histogram": OF_A_HISTOGRAM}.get(metric.type, {"": set()})
            known |= {f"{metric.name}{ending}": labels | more for ending, more in names.items()}
    asked: set[str] = set()
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            names = re.findall(rf"{OURS}\w+", target["expr"])
            assert names
            assert set(names) <= known.keys(), panel["title"]
            labels = set.intersection(*(known[name] for name in names))
            used = re.findall(r"by \(([^)]*)\)|\{(\w+)=", target["expr"])
            said = {label.strip() for groups in used for words in groups for label in words.split(",") if label.strip()}
            said |= set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert said <= labels, panel["title"]
            asked |= set(names)
    assert len(asked) >= 14

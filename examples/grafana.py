"""Writes a Grafana dashboard of the server's metrics to `grafana.json` beside this file: `python -m examples.grafana`.

Import the file (Dashboards, New, Import) and choose the Prometheus that scrapes `/metrics`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
WIDTH, HEIGHT = 8, 7
OURS = "vllm_rollout:"
RETURNED = '{kind="returned"}'


def rate(name: str, by: str = "", of: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({OURS}{name}{of}[$__rate_interval]))"


def quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', 'le')})"


PANELS: list[tuple[str, str, dict[str, str]]] = [
    ("Groups", "ops", {"{{status}}": rate("groups_total", "status")}),
    ("Candidates, by how they ended", "ops", {"{{state}}": rate("candidates_total", "state")}),
    ("Tokens", "ops", {"{{kind}}": rate("tokens_total", "kind")}),
    (
        "Share of the tokens that came back",
        "percentunit",
        {"returned": f"{rate('tokens_total', of=RETURNED)} / {rate('tokens_total')}"},
    ),
    ("Seconds to the end of a group", "s", {f"P{p}": quantile(p / 100, "group_latency_seconds") for p in (50, 90, 99)}),
    ("Groups in the engine", "short", {"{{state}}": f"sum by (state) ({OURS}groups_held)"}),
    ("Rewards by the server", "ops", {"{{reward}} {{status}}": rate("grades_total", "reward, status")}),
    ("Seconds to grade", "s", {f"P{p}": quantile(p / 100, "grading_seconds") for p in (50, 99)}),
    ("Trajectories that wait for a grade", "short", {"{{reward}}": f"sum by (reward) ({OURS}trajectories_to_grade)"}),
    ("AUC of scores", "percentunit", {"{{signal}} at {{detection_length}}": f"{OURS}auc"}),
    ("Brier score", "short", {"{{signal}} at {{detection_length}}": f"{OURS}calibration_brier"}),
    ("Labels", "ops", {"{{outcome}}": rate("labels_total", "outcome")}),
    ("Mean length, in tokens", "short", {"{{adapter}}": f"{OURS}length_mean_tokens"}),
    ("Rounds", "ops", {"{{kind}}": rate("rounds_total", "kind")}),
    ("Groups that moved", "ops", {"{{outcome}}": rate("moves_total", "outcome")}),
]  # fmt: skip


def panel(place: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": place % 3 * WIDTH, "y": place // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": query, "legendFormat": legend}
            for i, (legend, query) in enumerate(queries.items())
        ],
    }


def dashboard() -> dict[str, Any]:
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "title": "vllm_rollout",
        "uid": "vllm-rollout",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "timezone": "browser",
        "templating": {"list": [source]},
        "panels": [panel(place, *each) for place, each in enumerate(PANELS)],
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
    print(FILE)

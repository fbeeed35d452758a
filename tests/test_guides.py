"""Requests of the guides are accepted, and the numbers of a worked example follow from its table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.rewards import RewardsRequest
from vllm_rollout.parts.pruning.http.votes import VoteRequest
from vllm_rollout.parts.rounds.http.body import RoundRequest, RunRequest
from vllm_rollout.parts.sessions.http.body import FinishRequest, SessionGroupRequest

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
FORMS = {
    "/v1/rollouts": RolloutRequest,
    "/v1/runs": RunRequest,
    "/v1/runs/demo/rounds": RoundRequest,
    "/v1/groups": SessionGroupRequest,
    "/v1/sessions/g1.0/finish": FinishRequest,
}
"""Bodies by the path to which guides send them."""


def test_bodies_of_the_guides_are_accepted() -> None:
    pages = "".join(page.read_text() for page in GUIDES.glob("*.md"))
    sent = re.findall(r"curl -s http://[\d.:]+(/\S+) .*?-d '(.*?)'", pages, re.DOTALL)
    for path, body in sent:
        if path in FORMS:
            FORMS[path].model_validate_json(body)
    assert FORMS.keys() <= {path for path, _ in sent}
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", pages, re.DOTALL)]
    RewardsRequest.model_validate(next(block for block in blocks if "rewards" in block))
    VoteRequest.model_validate(next(block for block in blocks if "texts" in block))


def test_weights_of_the_guide_to_pruning_follow_from_their_table() -> None:
    text = (GUIDES / "pruning.md").read_text()
    section = text[text.index("## Weights") :].partition("\n## ")[0]
    rows = [[float(cell) for cell in row] for row in re.findall(r"^\| \d \|" + r" (\S+) \|" * 5, section, re.MULTILINE)]
    rewards, inclusion, weights, plain, corrected = map(list, zip(*rows, strict=True))
    assert weights == pytest.approx([1 / p for p in inclusion])
    for weighing, expected in (([1.0] * len(rows), plain), (weights, corrected)):
        mean = sum(w * r for w, r in zip(weighing, rewards, strict=True)) / sum(weighing)
        assert f"{mean:.2f}" in section
        found = [(r - mean) / (mean * (1 - mean)) ** 0.5 for r in rewards]
        assert expected == pytest.approx(found, abs=0.005)

"""Requests that trainers have really sent, replayed as far as there is need of no engine.

Bodies of vLLM's endpoints go through its own request models down to the sampling parameters, and our fields in them
through our parser; bodies of our endpoints through ours. What is recorded is in conformance/recorded/, made by
`python -m conformance TRAINER --record`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.sampling_params import SamplingParams

from conformance.recording import samples
from vllm_rollout.kernel.http.rewards import RewardsRequest
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.xargs import plan_from_xargs, rollout_xargs

RECORDED = sorted((Path(__file__).parents[2] / "conformance" / "recorded").glob("*.json"))
MAX_CANDIDATES = 64
"""As many as the servers took at once that the requests were sent to."""
BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/inference/v1/generate": GenerateRequest,
}


def recorded(*paths: str) -> list[Any]:
    """Requests to these paths, or to any path."""
    found = []
    for file in RECORDED:
        for place, request in enumerate(json.loads(file.read_text())["requests"]):
            path = request["path"].partition("?")[0]
            if path in paths:
                found.append(pytest.param(path, request["body"], id=f"{file.stem}-{place}-{path}"))
    return found


def sampling_of(body: CompletionRequest | ChatCompletionRequest | GenerateRequest) -> SamplingParams:
    if isinstance(body, GenerateRequest):
        return body.sampling_params
    return body.to_sampling_params(max_tokens=16, default_sampling_params={})


def unknown_fields(body: Mapping[str, Any], parsed: BaseModel) -> set[str]:
    """Names that vLLM takes, and makes nothing of."""
    return {*(parsed.model_extra or {}), *(body.keys() - type(parsed).model_fields.keys())}


def test_of_every_file_each_kind_of_request_is_there_once_and_names_no_folder():
    assert RECORDED
    for file in RECORDED:
        requests = json.loads(file.read_text())["requests"]
        assert samples(requests) == requests
        for request in requests:
            said = json.dumps({name: value for name, value in request.items() if name != "path"})
            assert re.findall(r"/[\w.-]+/", said.replace("FOLDER/", "")) == []
            assert not Path("/", request["path"].split("/")[1]).is_dir()


@pytest.mark.parametrize(
    ("path", "body"), recorded("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
)
def test_every_field_a_trainer_sends_to_vllm_is_known_and_arrives(path, body):
    parsed = BODIES[path](**body)
    assert unknown_fields(body, parsed) == set()
    params, sent = sampling_of(parsed), body.get("sampling_params", body)
    for name in ("n", "temperature", "top_p", "min_p", "repetition_penalty", "seed"):
        if sent.get(name) is not None:
            assert getattr(params, name) == sent[name]


@pytest.mark.parametrize(
    ("path", "body"), recorded("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
)
def test_our_fields_make_a_plan_of_n_choices_and_are_not_there_unless_asked_for(path, body):
    params = sampling_of(BODIES[path](**body))
    xargs = rollout_xargs(params.extra_args or {})
    sent = body.get("vllm_xargs") or (body.get("sampling_params", {}).get("extra_args")) or {}
    assert xargs.keys() == {name for name in sent if name.startswith("rollout_")}
    plan = plan_from_xargs(xargs, params.n, max_candidates=MAX_CANDIDATES)
    if isinstance(plan, GroupPlan):
        assert plan.group_size == params.n


def test_rewards_are_understood():
    bodies = [
        request["body"]
        for file in RECORDED
        for request in json.loads(file.read_text())["requests"]
        if request["path"].endswith("/rewards")
    ]
    for body in bodies:
        assert len(RewardsRequest.model_validate(body).rewards) == len(body["rewards"])

"""Allowed `sampling_params` of a rollout, on each vLLM."""

import pytest
from pydantic import ValidationError

from vllm_rollout.adapter.compat import SCALE_OUT_FLAG, has, vllm_version
from vllm_rollout.kernel.api.sampling import ALLOWED, FIELDS, OURS, sampling_params
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.protocol import RolloutRequest

LATER = ("prompt_logprob_start", "prompt_logprob_token_ids", "watermarking")
"""Fields that some supported versions lack."""
SCALE_OUT = " of a server with --enable-scale-out" if has(SCALE_OUT_FLAG) else ""


def refusal(sampling):
    with pytest.raises(RequestError) as refused:
        sampling_params(sampling, {}, want_logprobs=True, want_text=False)
    return refused.value


@pytest.mark.parametrize("field", [*(field for field in LATER if field not in FIELDS), "no_such_field"])
def test_a_field_that_this_vllm_lacks_is_refused_with_its_version_and_what_is_allowed(field):
    error = refusal({"temperature": 1, field: 1})
    assert (error.status, error.param) == (400, f"sampling_params.{field}")
    assert str(error).startswith(f"sampling_params.{field}: vLLM {vllm_version} has no such sampling field; allowed: ")
    assert str(error).endswith(f"{', '.join(ALLOWED)}.")


@pytest.mark.parametrize("field", sorted(OURS.keys() & FIELDS))
def test_a_field_that_the_server_sets_is_refused_with_what_to_use(field):
    error = refusal({field: 1})
    assert (error.param, str(error)) == (f"sampling_params.{field}", f"sampling_params.{field}: {OURS[field]}.")


def test_what_a_rollout_does_not_take_is_a_field_of_some_supported_vllm():
    assert set(OURS) - FIELDS <= set(LATER)


@pytest.mark.parametrize("logprobs", [1, 5, -1, True, "all"])
def test_log_probabilities_that_a_rollout_does_not_return_are_refused(logprobs):
    error = refusal({"logprobs": logprobs})
    assert error.param == "sampling_params.logprobs"
    assert f"/inference/v1/generate{SCALE_OUT} for those of other tokens" in str(error)


def test_another_endpoint_is_named_with_the_flag_that_it_needs():
    for field in ("prompt_logprobs", "logprob_token_ids"):
        assert OURS[field].endswith(f"use /inference/v1/generate{SCALE_OUT}")


@pytest.mark.parametrize("logprobs", [0, None])
def test_those_of_sampled_tokens_may_be_asked_for_as_vllm_calls_them(logprobs):
    params = sampling_params({"logprobs": logprobs}, {}, want_logprobs=True, want_text=False)
    assert params.logprobs == 0


@pytest.mark.parametrize("field", ALLOWED)
def test_a_field_that_stands_beside_sampling_is_told_where_it_belongs(field):
    with pytest.raises(ValidationError) as error:
        RolloutRequest.model_validate({"prompts": [{"prompt": "a"}], field: 1})
    place = "include" if field == "logprobs" else f"sampling_params.{field}"
    assert f"Write {place} instead" in str(error.value)


@pytest.mark.parametrize("sampling", [{"temperature": -1}, {"max_tokens": 0}, {"temperature": "hot"}, {"top_k": []}])
def test_a_value_that_vllm_refuses_names_its_field(sampling):
    (field,) = sampling
    error = refusal(sampling)
    assert error.param == f"sampling_params.{field}"
    assert field in str(error)


def test_fields_stand_on_top_of_the_models_defaults_of_which_unknown_ones_are_left_out():
    defaults = {"temperature": 0.5, "top_k": 7, "of_a_later_vllm": 1}
    params = sampling_params({"top_k": 3}, defaults, want_logprobs=True, want_text=False)
    assert (params.temperature, params.top_k, params.logprobs, params.detokenize) == (0.5, 3, 0, False)

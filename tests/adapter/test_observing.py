"""Engines whose sampler does not see this step's requests observe nobody."""

from types import SimpleNamespace

import pytest

from vllm_rollout.adapter.options import observing_refusal


def config(
    *, speculative: bool = False, sharded: bool = False, asynchronous: bool = True, v2: bool = False
) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method="eagle") if speculative else None,
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        use_v2_model_runner=v2,
        parallel_config=SimpleNamespace(enable_batch_sharded_sampling=sharded),
    )


def test_an_ordinary_engine_observes_its_candidates():
    assert observing_refusal(config()) is None


def test_drafts_whose_fate_is_known_with_the_step_are_observed():
    assert observing_refusal(config(speculative=True, asynchronous=False)) is None
    assert "eagle" in observing_refusal(config(speculative=True, asynchronous=False, v2=True))


@pytest.mark.parametrize(
    ("flag", "kind"), [("--speculative-config", "speculative"), ("--enable-batch-sharded-sampling", "sharded")]
)
def test_a_sampler_that_does_not_see_whole_requests_is_refused_with_the_flag_to_leave_out(flag, kind):
    assert flag in observing_refusal(config(**{kind: True}))

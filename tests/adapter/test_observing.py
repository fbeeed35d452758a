"""Engines whose sampler does not see this step's requests observe nobody."""

from types import SimpleNamespace

import pytest

from vllm_rollout.adapter.options import observing_refusal


def config(*, speculative: bool = False, sharded: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=SimpleNamespace() if speculative else None,
        parallel_config=SimpleNamespace(enable_batch_sharded_sampling=sharded),
    )


def test_an_ordinary_engine_observes_its_candidates():
    assert observing_refusal(config()) is None


@pytest.mark.parametrize(
    ("flag", "kind"), [("--speculative-config", "speculative"), ("--enable-batch-sharded-sampling", "sharded")]
)
def test_a_sampler_that_does_not_see_whole_requests_is_refused_with_the_flag_to_leave_out(flag, kind):
    assert flag in observing_refusal(config(**{kind: True}))

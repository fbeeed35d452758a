"""Engines whose sampler does not see this step's requests observe nobody."""

from types import SimpleNamespace

import pytest

from vllm_rollout.adapter.options import observing_refusal


def config(
    *,
    speculative: bool = False,
    sharded: bool = False,
    asynchronous: bool = True,
    v2: bool = False,
    launched: bool = False,
    num_workers: int = 2,
) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method="eagle") if speculative else None,
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        use_v2_model_runner=v2,
        parallel_config=SimpleNamespace(
            enable_batch_sharded_sampling=sharded,
            distributed_executor_backend="external_launcher" if launched else None,
            world_size=num_workers,
            data_parallel_size=1,
        ),
    )


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({}, None),
        ({"speculative": True, "asynchronous": False}, None),  # the fate of drafts is known with the step
        ({"speculative": True, "asynchronous": False, "v2": True}, "eagle"),
        ({"speculative": True}, "--speculative-config"),
        ({"sharded": True}, "--enable-batch-sharded-sampling"),
        ({"launched": True}, "'external_launcher'"),
        ({"launched": True, "num_workers": 1}, None),
    ],
)
def test_a_sampler_that_does_not_see_whole_requests_is_refused_with_what_to_leave_out(engine, said):
    refusal = observing_refusal(config(**engine))
    assert refusal is None if said is None else said in refusal

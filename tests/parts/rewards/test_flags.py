"""`vllm-rollout serve --rollout-judge MODEL`: what needs it, and what it changes."""

from vllm_rollout.adapter.options import ServeOptions


def test_a_flag_of_a_judge_needs_a_judge(refusal):
    assert "name one with --rollout-judge MODEL" in refusal("--rollout-judge-cores", "0")


def test_beside_a_judge_the_worker_is_a_process_of_its_own(parsed):
    args = parsed("--rollout-judge", "judge")
    assert args.distributed_executor_backend is None
    assert not ServeOptions.of(args).forks

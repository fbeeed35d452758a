"""`vllm-rollout serve --rollout-reward`, `--rollout-judge MODEL`: what they need, and what they change."""

import pytest

from vllm_rollout.adapter.options import ServeOptions


def test_a_flag_of_a_judge_needs_a_judge(refusal):
    assert "name one with --rollout-judge MODEL" in refusal("--rollout-judge-cores", "0")


def test_beside_a_judge_the_worker_is_a_process_of_its_own(parsed):
    args = parsed("--rollout-judge", "judge")
    assert args.distributed_executor_backend is None
    assert not ServeOptions.of(args).forks


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("foo", "the reward 'foo' must be exact, regex, math, code, package.module:function"),
        ("a=nomod:func", "there is no reward function at 'nomod:func'"),
        ("a=json:no_function", "there is no reward function at 'json:no_function'"),
        ("a=absent.toml", "the judge file absent.toml: No such file"),
    ],
)
def test_a_reward_that_does_not_work_is_refused_before_anything_starts(refusal, reward, said):
    refused = refusal("--rollout-reward", reward)
    assert "error: --rollout-reward: " in refused
    assert said in refused


def test_a_reward_that_works_is_served(parsed):
    assert parsed("--rollout-reward", "a=posixpath:commonprefix").rollout_reward == [("a", "posixpath:commonprefix")]

"""Log messages of the worker about the operators of pruning."""

from tests.parts.observing.test_worker_log import said  # noqa: F401
from vllm_rollout.parts.observing.worker.part import say_what_serves


def test_the_operator_of_the_head_is_named_beside_those_of_the_kernel(said):  # noqa: F811
    say_what_serves("of a test of pruning", "cpu")
    assert "quality_head: torch" in said[-1].getMessage()

"""Rewards of trajectories, graded in processes that can be killed: a library without vLLM and without a server.

from vllm_rollout.rewards import Grader, Trajectory

async with Grader({"math": "math", "mine": my_function}) as grader:
    grade = await grader.grade("math", Trajectory("What is 6 * 7?", "It is \\boxed{42}.", {"answer": "42"}))
"""

from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.grading.grader import Grader
from vllm_rollout.parts.rewards.grading.slots import GraderBusy, Urgency
from vllm_rollout.parts.rewards.grading.values import VOID, Trajectory

__all__ = ["VOID", "Grade", "Grader", "GraderBusy", "Trajectory", "Urgency"]

"""Rewards in a program of your own: the grader of the part `rewards`, and advantages.

from vllm_rollout.rewards import Grader, Trajectory

async with Grader({"math": "math", "mine": my_function}) as grader:
    grade = await grader.grade("math", Trajectory("What is 6 * 7?", "It is \\boxed{42}.", {"answer": "42"}))
"""

from vllm_rollout.kernel.rules.rewards import Estimator, Grade
from vllm_rollout.parts.rewards.grading import VOID, Grader, GraderBusy, Trajectory
from vllm_rollout.parts.rewards.rules.estimates import advantages

__all__ = ["VOID", "Estimator", "Grade", "Grader", "GraderBusy", "Trajectory", "advantages"]

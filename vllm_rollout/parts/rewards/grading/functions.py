"""Calls users' reward functions, recognized by their signature, and reads their results.

Invariant: every result or exception of a function becomes a `Grade`. No exception passes on.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, get_args

from vllm_rollout.checks import shown
from vllm_rollout.config import MAX_REWARD
from vllm_rollout.kernel.rules.rewards import Grade, GradeStatus
from vllm_rollout.parts.rewards.grading.values import Trajectory, failed, written

RewardFunction = Callable[..., Any]
"""A user's reward function. `caller` lists its signatures."""
_loop = asyncio.Runner()
"""One event loop for all trajectories: a function may keep a client, whose connections belong to a loop."""
TRL_PARAMETERS = {"prompts", "completions", "completion_ids"}
VERL_COLUMNS = {"data_source", "ground_truth", "extra_info"}
TOTALS = ("score", "reward")
"""Names under which functions, verl's among them, return the reward itself beside further numbers."""


def load(where: str) -> RewardFunction:
    """The function at `package.module:function`. Raises: ValueError with what is missing."""
    module_name, _, name = where.partition(":")
    if not module_name or not name:
        raise ValueError(f"a reward function is named package.module:function, got {where!r}")
    try:
        found = import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"there is no reward function at {where!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"{where!r} must be a function, got a {type(found).__name__}")
    return found


def caller(function: RewardFunction) -> Callable[[Trajectory], Any]:
    """Function that calls a reward function with one trajectory. Raises: ValueError for an unknown signature.

    - with `prompts`, `completions` or `completion_ids`: TRL's `f(prompts, completions, **columns)`, with a batch of one
    - with `ground_truth`: verl's `compute_score`, with `data_source` and `extra_info` if it takes them. The text is
      `solution_str`, or the first of its other parameters
    - else: `f(text, data)`, or `f(text)`
    """
    signature = inspect.signature(function)
    parameters = signature.parameters
    if parameters.keys() & TRL_PARAMETERS:
        return lambda trajectory: _first(function(**_trl_arguments(trajectory, parameters)))
    if "ground_truth" in parameters and (text := _verl_text(parameters)):
        return lambda trajectory: function(**_verl_arguments(trajectory, parameters, text))
    if _takes(signature, 2):
        return lambda trajectory: function(trajectory.text, trajectory.data)
    if _takes(signature, 1):
        return lambda trajectory: function(trajectory.text)
    raise ValueError(
        f"a reward function is f(text, data), TRL's f(prompts, completions, **columns) or verl's "
        f"compute_score(data_source, solution_str, ground_truth, extra_info), got {signature}"
    )


def _takes(signature: inspect.Signature, num_arguments: int) -> bool:
    try:
        signature.bind(*range(num_arguments))
    except TypeError:
        return False
    return True


def grade(call: Callable[[Trajectory], Any], trajectory: Trajectory) -> Grade:
    """Call the function, and make a `Grade` of its result or exception."""
    try:
        returned = call(trajectory)
        if inspect.isawaitable(returned):
            returned = _loop.run(_awaited(returned))
            for left in asyncio.all_tasks(_loop.get_loop()):
                left.cancel()
        return grade_of(returned)
    except MemoryError:
        return failed("the reward function used up its memory")
    except Exception as error:  # a user's function: its exception belongs to this trajectory alone
        return failed(f"the reward function raised {described(error)}")


def grade_of(returned: Any) -> Grade:
    """Grade from a number, None (void), verl's dictionary with a `score`, or parts: `{name: number or (number,
    weight)}`."""
    if isinstance(returned, Grade):
        return _checked(returned)
    if returned is None:
        return Grade("void", reason="the reward function says that the trajectory must not count")
    if not isinstance(returned, Mapping):
        reward = _number(returned)
        return failed(_not_a_number("", returned)) if reward is None else Grade("ok", reward)
    total = next((name for name in TOTALS if name in returned), None)
    numbers, weights = {}, {}
    for name, value in returned.items():
        amount, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
        number, weighed = _number(amount), _number(weight)
        if number is not None and weighed is not None:
            numbers[name], weights[name] = number, weighed
        elif total is None or name == total:
            return failed(_not_a_number(f" as its part {name!r}", value))
    if not numbers:
        return failed("the reward function returned no part")
    parts = {written(str(name)): number for name, number in numbers.items() if name != total}
    reward = _number(numbers[total] if total else sum(numbers[name] * weights[name] for name in numbers))
    return failed(_not_a_number("", returned)) if reward is None else Grade("ok", reward, parts=parts or None)


def _checked(returned: Grade) -> Grade:
    """Check a grade that the function made itself, and keep the parts that can be sent."""
    if returned.status not in get_args(GradeStatus):
        return failed(f"the reward function returned a grade with status {shown(returned.status)}")
    reward = 0.0 if returned.status == "timeout" else _number(returned.reward)
    wants_none = returned.status in ("error", "void")
    if returned.reward is not None if wants_none else reward is None:
        return failed(_not_a_number(f" with status {returned.status}", returned.reward))
    reason = None if returned.reason is None else written(str(returned.reason))
    numbers = {written(str(name)): _number(value) for name, value in (returned.parts or {}).items()}
    parts = {name: number for name, number in numbers.items() if number is not None}
    return Grade(returned.status, reward, reason, parts or None)


def _trl_arguments(trajectory: Trajectory, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    chat = not isinstance(trajectory.prompt, str)
    completion: Any = [{"role": "assistant", "content": trajectory.text}] if chat else trajectory.text
    columns = trajectory.data if isinstance(trajectory.data, Mapping) else {"data": trajectory.data}
    arguments = {name: [value] for name, value in columns.items()}
    if trajectory.token_ids:
        arguments["completion_ids"] = [list(trajectory.token_ids)]
    arguments |= {"prompts": [trajectory.prompt], "completions": [completion]}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if takes_all or name in parameters}


def _verl_text(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    if "solution_str" in parameters:
        return "solution_str"
    return next((name for name in parameters if name not in VERL_COLUMNS), None)


def _verl_arguments(trajectory: Trajectory, parameters: Mapping[str, inspect.Parameter], text: str) -> dict[str, Any]:
    """Arguments of verl's `compute_score`. Raises: ValueError without a ground truth, since many would compare with
    None."""
    data = trajectory.data if isinstance(trajectory.data, Mapping) else {"ground_truth": trajectory.data}
    row = data.get("reward_model", data)  # the place of verl's data sets
    truths = [row[name] for name in ("ground_truth", "answer") if isinstance(row, Mapping) and name in row]
    if not truths or trajectory.data is None:
        raise ValueError(f'the prompt needs "data": {{"ground_truth": "…"}}, got {shown(trajectory.data)}')
    arguments = {text: trajectory.text, "ground_truth": truths[0]}
    nothing: dict[str, Any] = {"data_source": "", "extra_info": {}}
    for name in nothing.keys() & parameters.keys():
        # A default that says something stays, also one of `functools.partial`.
        if name in data or parameters[name].default in (inspect.Parameter.empty, None):
            arguments[name] = data.get(name, nothing[name])
    return arguments


def _first(returned: Any) -> Any:
    """The reward of a batch of one. TRL's functions return one per completion. Raises: ValueError for another
    number."""
    if inspect.isawaitable(returned):
        return _first_awaited(returned)
    rewards = list(returned)
    if len(rewards) != 1:
        raise ValueError(f"it returned {len(rewards)} rewards for 1 completion")
    return rewards[0]


async def _first_awaited(returned: Any) -> Any:
    return _first(await returned)


def described(error: Exception) -> str:
    """Text of a user's exception, even if formatting the exception fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


async def _awaited(returned: Any) -> Any:
    return await returned


def _number(value: Any) -> float | None:
    """A finite number up to MAX_REWARD, from a number or a numpy or torch scalar. None for others, also strings."""
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= MAX_REWARD else None


def _not_a_number(where: str, value: Any) -> str:
    return f"the reward function returned {shown(value)}{where}; a finite number is needed, or None for void"

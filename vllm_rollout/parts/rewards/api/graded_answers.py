"""`rollout_reward` among the fields of an OpenAI request: the answer's choices are graded before it is sent.

The grades are in the answer's `kv_transfer_params`, the one field that every answer passes on from the engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_rollout.adapter.joining import answer_name
from vllm_rollout.adapter.output_text import MARK_KEY
from vllm_rollout.kernel.api.claims import AskedRequest
from vllm_rollout.kernel.api.open_paths import refuse_on_open_path
from vllm_rollout.kernel.api.refusals import raise_as_vllms
from vllm_rollout.kernel.http.clients import client_namespace
from vllm_rollout.kernel.http.ended import reward_of
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.protocol import RewardOptions
from vllm_rollout.kernel.http.reward_door import RewardDoor
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward
from vllm_rollout.kernel.xargs import NAMES
from vllm_rollout.parts.rewards.grading.slots import Urgency
from vllm_rollout.parts.rewards.grading.values import Trajectory
from vllm_rollout.parts.rewards.http.service import GradingService

Generate = Callable[..., AsyncGenerator[RequestOutput, None]]
REWARD, DATA = "rollout_reward", "rollout_data"
ANSWER_KEY = "rollout_rewards"
LEARNS, NAMESPACE = "rollout_detection_length", NAMES["namespace"]


class AnswerGrader:
    """Grades the choices of OpenAI answers."""

    def __init__(self, grading: GradingService, door: RewardDoor, generate: Generate) -> None:
        """`generate`: answers a request without reward fields."""
        self._grading = grading
        self._door = door
        self._generate = generate

    def claim(self, asked: AskedRequest) -> AsyncGenerator[RequestOutput, None] | None:
        """Graded outputs. None for a request without a reward. Raises: VLLMValidationError, GracefulHTTPError."""
        if REWARD not in asked.fields:
            return None
        refuse_on_open_path(asked.fields)
        options = self._options(asked.fields, asked.params)
        outputs = self._generate(asked.prompt, without_reward(asked.params), asked.id, **asked.options)
        return self._graded(outputs, options, asked.fields, asked.id)

    def _options(self, xargs: Mapping[str, Any], params: SamplingParams) -> RewardOptions:
        """Reward options of a request. Raises: VLLMValidationError, GracefulHTTPError if too many wait for grades."""
        if not isinstance(name := xargs[REWARD], str) or not name:
            raise _invalid(REWARD, f"must be the name of a reward, got {name!r:.100}.")
        if params.output_kind != RequestOutputKind.FINAL_ONLY:
            raise _invalid(REWARD, "a stream has no place for rewards. Set stream to false, or use /v1/rollouts.")
        options = RewardOptions.model_construct(name=name)  # a name that is too long is refused as any unknown one
        try:
            self._grading.check(options, params.n)
        except RequestError as error:
            field = f"vllm_xargs.{REWARD}"
            raise_as_vllms(RequestError(f"{field}: {error}", status=error.status, param=field))
        return options

    async def _graded(
        self,
        outputs: AsyncGenerator[RequestOutput, None],
        options: RewardOptions,
        xargs: Mapping[str, Any],
        request_id: str,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs. The last one carries the grade of each choice, null for a stopped choice."""
        async with aclosing(outputs):
            async for output in outputs:
                if output.finished:
                    prompt, data = output.prompt or "", _data_of(xargs)
                    self._grading.promise(options.name, len(output.outputs))
                    try:
                        works = [self._grade(options, prompt, data, choice) for choice in output.outputs]
                        grades = await asyncio.gather(*works)
                    finally:
                        self._grading.promise(options.name, -len(output.outputs))
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), ANSWER_KEY: grades}
                    if LEARNS in xargs:
                        await self._learn(options, grades, xargs, request_id)
                yield output

    async def _grade(
        self, options: RewardOptions, prompt: str, data: Any, choice: CompletionOutput
    ) -> dict[str, Any] | None:
        if choice.finish_reason in ("abort", "error"):
            return None
        trajectory = Trajectory(prompt, choice.text, data, choice.token_ids)
        return reward_of(await self._grading.grade(options, trajectory, Urgency()))

    async def _learn(
        self, options: RewardOptions, grades: list[dict[str, Any] | None], xargs: Mapping[str, Any], request_id: str
    ) -> None:
        namespace = str(xargs.get(NAMESPACE, ""))
        answer = answer_name(request_id, client_namespace(), len(grades), namespace)
        rewards = [
            NamedReward("request", answer.name, Reward("", answer.choice + at, reward, reward > options.threshold))
            for at, grade in enumerate(grades)
            if grade is not None and (reward := grade["reward"]) is not None
        ]
        await self._door.tell(rewards)


def without_reward(params: SamplingParams) -> SamplingParams:
    """Copy of the parameters without the reward fields."""
    plain = params.clone()
    extra_args = {key: value for key, value in (params.extra_args or {}).items() if key not in (REWARD, DATA)}
    plain.extra_args = {**extra_args, MARK_KEY: True}
    return plain


def _data_of(xargs: Mapping[str, Any]) -> Any:
    """The request's `rollout_data`. `vllm_xargs` takes no objects, so a text that is JSON is parsed."""
    data = xargs.get(DATA)
    if isinstance(data, str):
        with suppress(ValueError, RecursionError):
            return json.loads(data)
    return data


def _invalid(field: str, message: str) -> VLLMValidationError:
    return VLLMValidationError(f"vllm_xargs.{field}: {message}", parameter=f"vllm_xargs.{field}")

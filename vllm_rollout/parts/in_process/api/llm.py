"""`vllm_rollout.LLM`: vLLM's LLM with groups, in a trainer's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import vllm
from vllm.entrypoints.generate.beam_search.utils import BeamSearchOutput
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.xargs import rollout_xargs
from vllm_rollout.parts.in_process.api.async_llm import AsyncLLM
from vllm_rollout.parts.in_process.api.engine_args import group_settings, uninterrupted
from vllm_rollout.parts.in_process.api.interrupts import HeldInterrupts, WaitingLoop
from vllm_rollout.parts.in_process.api.methods import done, streamed
from vllm_rollout.parts.in_process.api.rollouts import Rewards, Rollouts
from vllm_rollout.parts.in_process.api.runs import rows_of, runs_of, with_spares
from vllm_rollout.parts.in_process.api.stepped_client import SteppedClient

logger = init_logger("vllm.vllm_rollout")
T = TypeVar("T")


if TYPE_CHECKING:
    from vllm_rollout import LLMMethods
else:
    LLMMethods = type("LLMMethods", tuple(methods for _, methods in faces("llm")), {})


class LLM(LLMMethods, vllm.LLM):
    """LLM with `rollout`, `stream`, `post_rewards` and related methods.

    `generate` and `chat` run a group for each prompt whose sampling parameters have `rollout_*` fields in `extra_args`:
    `n` outputs, of `n + rollout_redundancy` candidates.

    All work happens during a method call: a quality head is trained before `post_rewards` returns. If a method raises
    anything (such as Ctrl-C, or an error for a bad prompt), no work that it has begun runs on.

    Overrides: __init__, generate, chat, beam_search, enqueue, enqueue_chat, _add_request, _run_engine.
    """

    rollout = done(AsyncLLM.rollout)
    stream = streamed(AsyncLLM.stream)
    post_rewards = done(AsyncLLM.post_rewards)
    post_named_rewards = done(AsyncLLM.post_named_rewards)

    spares = 0
    """Spare candidates of requests with `n` that have no group fields. Equal prompts in a row count as such
    a request.
    """
    group_size: int | None = None
    """Size of groups that get spare candidates. None: any size."""

    def __init__(
        self,
        model: str,
        *args: Any,
        rollout_profile: str | None = None,
        rollout_record: str | None = None,
        rewards: Rewards | None = None,
        **kwargs: Any,
    ) -> None:
        """Arguments as of `vllm.LLM`, and:

        `rollout_profile`: a file of `vllm-rollout profile`, with step costs for redundancy "auto".
        `rollout_record`: a file for `vllm-rollout simulate`: one line per rollout.
        `rewards`: functions that grade trajectories as they end, by the names that `reward=` uses.
        """
        settings = group_settings(model, kwargs)
        with uninterrupted():
            super().__init__(settings.pop("model"), *args, **settings)
        self.begin_groups(profile=rollout_profile, record=rollout_record, rewards=rewards)

    def begin_groups(
        self, profile: str | None = None, record: str | None = None, rewards: Rewards | None = None
    ) -> None:
        """Set up the groups. Called once, after the engine is built."""
        self._settings = {"profile": profile, "record": record, "rewards": rewards}
        self._loop = WaitingLoop()
        self._client = SteppedClient(self.llm_engine)
        self._groups: list[AsyncGenerator[RequestOutput, None]] = []
        """Groups of `generate`, `chat` or `enqueue` that are not started."""
        self._rollouts: Rollouts | None = None

    async def rollouts(self) -> Rollouts:
        """The service of this engine, created by the first call."""
        if self._rollouts is None:
            self._rollouts = await Rollouts.around(self._client, chat_template=self.chat_template, **self._settings)  # type: ignore[arg-type]
        return self._rollouts

    def run_to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, and the training that it starts, to the end. Returns its result.

        Raises: RuntimeError if an event loop runs already, and while requests are enqueued.
        """
        if self._groups or self._client.has_others:
            work.close()
            raise RuntimeError("requests are enqueued in this LLM. Call wait_for_completion first.")
        return self._loop.run(self._settled(work))

    def end(self, events: AsyncGenerator[Any, None]) -> None:
        """Stop the running work of a stream."""
        self._loop.run(self._settled(events.aclose()))

    async def _settled(self, work: Awaitable[T]) -> T:
        result = await work
        if self._rollouts is not None:
            await self._rollouts.settled()
        return result

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> list[RequestOutput]:
        with self._all_or_nothing():
            per_prompt = any(isinstance(kwargs.get(name), Sequence) for name in ("lora_request", "priority"))
            runs = runs_of(prompts, sampling_params, self.group_size) if self.spares and not per_prompt else None
            if runs is None:
                return super().generate(prompts, sampling_params, **kwargs)
            if self.group_size is not None and any(run.num != self.group_size for run in runs):
                logger.warning_once(
                    "vllm_rollout: %d equal prompts in a row are no group of %d, and are not raced. Give each process "
                    "whole groups.",
                    next(run.num for run in runs if run.num != self.group_size), self.group_size,
                )  # fmt: skip
            params = [run.of_all for run in runs]
            return rows_of(super().generate([run.prompt for run in runs], params, **kwargs))

    def chat(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        with self._all_or_nothing():
            return super().chat(*args, **kwargs)

    def beam_search(self, *args: Any, **kwargs: Any) -> list[BeamSearchOutput]:
        if self.spares:
            logger.warning_once("vllm_rollout: beams are not raced. beam_search answers as vLLM's own.")
        return super().beam_search(*args, **kwargs)

    def enqueue(self, *args: Any, **kwargs: Any) -> list[str]:
        with self._all_or_nothing():
            return super().enqueue(*args, **kwargs)

    def enqueue_chat(self, *args: Any, **kwargs: Any) -> list[str]:
        with self._all_or_nothing():
            return super().enqueue_chat(*args, **kwargs)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Remove all requests that the block has added if it raises.

        vLLM alone removes the requests that it has added before it steps, unless it is interrupted, and knows no
        groups.
        """
        num_groups, before = len(self._groups), frozenset(self._client.others())
        try:
            yield
        except BaseException:
            with HeldInterrupts(lambda: None):
                del self._groups[num_groups:]
                self._client.abort_others(but=before)
            raise

    def _add_request(
        self, prompt: Any, params: Any, lora_request: LoRARequest | None = None, priority: int = 0, **kwargs: Any
    ) -> str:
        if self._client.is_read:  # vLLM would take its outputs for answers
            raise RuntimeError("a stream of this LLM is open. Read it to its end, or close it.")
        if self.spares and isinstance(params, SamplingParams):
            params = with_spares(params, self.spares, self.group_size, self._client.max_candidates)
        if not isinstance(params, SamplingParams) or not rollout_xargs(params.extra_args or {}):
            return super()._add_request(prompt, params, lora_request=lora_request, priority=priority, **kwargs)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        request_id = str(next(self.request_counter))
        if not self._groups:
            self._client.first_of_batch = request_id
        group = self._client.generate(prompt, params, request_id, lora_request=lora_request, priority=priority)
        self._groups.append(group)
        return request_id

    def _run_engine(self, output_type: Any, **kwargs: Any) -> list[Any]:
        try:
            groups, self._groups = self._groups, []
            outputs = self._loop.run(_last_of_each(groups)) if groups else []
            outputs += self._client.take_unclaimed()
            outputs += super()._run_engine(output_type, **kwargs)
        except BaseException:
            with HeldInterrupts(lambda: None):
                self._client.abort_others()
            raise
        return sorted(outputs, key=lambda output: int(output.request_id))


async def _last_of_each(groups: Sequence[AsyncGenerator[RequestOutput, None]]) -> list[RequestOutput]:
    """Answers of groups that run together. If one fails, none runs on."""

    async def last(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
        return [output async for output in outputs][-1]

    tasks = [asyncio.ensure_future(last(group)) for group in groups]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

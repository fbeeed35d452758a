"""TRL's GRPOTrainer: conversations with the tools of an environment that race, each a session (docs/guides/agents.md).

Give the environment to this `rollout_func` instead of to the trainer:

    agents = TRLAgents("http://127.0.0.1:8000", environment_factory=Calculator, redundancy=8)
    GRPOTrainer(..., rollout_func=agents, reward_funcs=[agents.rewards])

TRL's own loop (`_tool_call_loop`) sends the turns of all conversations in one request and waits for the longest. Here
each conversation continues by itself, with TRL's template, its parser of tool calls and its limits.

Invariant: TRL trains on the tokens that the server recorded, with the tools' tokens masked.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from typing_extensions import Unpack

from vllm_rollout import AsyncRolloutClient
from vllm_rollout.background import outside_of_loops
from vllm_rollout.integrations.trl_rows import Columns, runs_of, sampling_of, seeded, with_columns
from vllm_rollout.integrations.whole import whole
from vllm_rollout.kernel.client.connection import DEFAULT_URL
from vllm_rollout.parts.sessions.client.agent_group import AgentGroup, AgentResult
from vllm_rollout.parts.sessions.client.agent_session import AgentSession
from vllm_rollout.parts.sessions.client.agents import MAX_CONCURRENT, AgentOptions

NOT_TOOLS = ("reset", "get_reward")


class TRLAgents:
    """Runs a GRPOTrainer's conversations. Weights are synchronized by TRL: `use_vllm=True, vllm_mode="server"`."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        environment_factory: Callable[[], Any],
        redundancy: int = 0,
        max_concurrent: int = MAX_CONCURRENT,
        **options: Unpack[AgentOptions],
    ) -> None:
        """`environment_factory`: as TRL takes it. It is called once per conversation. The other arguments are those of
        `AsyncRolloutClient.agents`.
        """
        self._url, self._factory, self._redundancy = url, environment_factory, redundancy
        self._options: dict[str, Any] = {**options, "max_concurrent": max_concurrent}
        self._threads = ThreadPoolExecutor(max_concurrent, "tools")
        """Runs tools. asyncio's own executor would wait for the tools of conversations that lost."""
        self._rendering: Rendering | None = None
        self._columns = Columns()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Called by TRL as its `rollout_func`: one completion per prompt, in the order of the prompts.

        Returns columns of `[num_prompts]`. Raises: RolloutError with the server's words. RuntimeError if a group could
        not be completed. ValueError for a trainer that has tools of its own.
        """
        if trainer.tools:
            raise ValueError(
                "the trainer has tools or an environment_factory beside this rollout_func: TRL would then train on the "
                "tools' words. Give environment_factory to TRLAgents only."
            )
        trainer.accelerator.wait_for_everyone()  # TRL's main process may still send weights
        self._rendering = self._rendering or Rendering(trainer, tools_of(self._factory()))
        with outside_of_loops():
            rows = asyncio.run(self._rows(prompts, trainer))
        return {field: [row[field] for row in rows] for field in rows[0]}

    @staticmethod
    def rewards(environment_reward: Sequence[float | None], **columns: Any) -> Sequence[float | None]:
        """Reward function for TRL: the result of each environment's `get_reward`, `[num_completions]`."""
        return environment_reward

    async def _rows(self, prompts: Sequence[Any], trainer: Any) -> list[dict[str, Any]]:
        training = trainer.model.training
        runs = runs_of(prompts, trainer.num_generations if training else trainer.num_generations_eval)
        known = with_columns([prompt for prompt, _ in runs], self._columns.of(trainer))
        played: dict[str, Played] = {}

        async def run(session: AgentSession) -> float | None:
            played[session.id] = Played(self._factory(), *session.prompt)
            return await self._converse(session, played[session.id], trainer)

        async def race(size: int, client: AsyncRolloutClient) -> list[tuple[int, AgentGroup]]:
            places = [place for place, (_, count) in enumerate(runs) if count == size]
            asked = [known[place] for place in places]
            redundancy = self._redundancy if size == trainer.num_generations else 0  # evaluations wait for all
            groups = client.agents(asked, size, redundancy, run=run, **self._options)
            return [(places[group.position], whole(group, size)) async for group in groups]

        async with AsyncRolloutClient(self._url) as client:
            sizes = {count for _, count in runs}
            found = [each for part in await asyncio.gather(*(race(size, client) for size in sizes)) for each in part]
        ordered = [group for _, group in sorted(found, key=lambda each: each[0])]
        return [played[each.session_id].row(each) for group in ordered for each in group.trajectories]

    async def _converse(self, session: AgentSession, its: Played, trainer: Any) -> float | None:
        """Play turns and tool calls until a turn calls no tool or a limit of TRL is reached. Returns the environment's
        reward.
        """
        assert self._rendering is not None
        sampling = seeded(sampling_of(trainer), trainer)
        if "seed" in sampling:
            sampling["seed"] += session.number  # as `n` would give each choice its own
        observation = await self._called(its.environment.reset, prompt=its.prompt, **its.columns)
        its.begin(self._rendering, observation)
        tools = {tool.__name__: tool for tool in tools_of(its.environment)}
        for turn in range(trainer.max_tool_calling_iterations + 1):
            sampling["max_tokens"] = trainer.max_completion_length - its.num_tokens
            answer = await session.complete(its.token_ids, return_token_ids=True, **sampling)
            message = its.say(self._rendering, answer["choices"][0]["token_ids"])
            if not message.get("tool_calls") or turn == trainer.max_tool_calling_iterations:
                break
            said = [await self._tool(tools, each["function"]) for each in message["tool_calls"]]
            suffix = trainer._get_tool_suffix_ids(said)
            if its.num_tokens + len(suffix) >= trainer.max_completion_length:
                break
            if len(its.token_ids) + len(suffix) >= trainer.model.config.max_position_embeddings:
                break
            its.messages += said
            its.token_ids += suffix
        if not hasattr(its.environment, "get_reward"):
            return None
        return await self._called(its.environment.get_reward)

    async def _tool(self, tools: Mapping[str, Callable[..., Any]], call: Mapping[str, Any]) -> dict[str, Any]:
        """Message with the tool's result. If the tool raises, the message has the error, as in TRL."""
        name = call["name"]
        try:
            if name not in tools:
                raise ValueError(f"Tool {name} not found.")
            result = await self._called(tools[name], **call["arguments"])
        except Exception as error:
            result = {"error": str(error)}
        return {"role": "tool", "name": name, "content": str(result)}

    async def _called(self, function: Callable[..., Any], **arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(**arguments))


class Rendering:
    """Renders chats as tokens and parses them back, like a trainer that has the tools itself."""

    def __init__(self, trainer: Any, tools: list[Callable[..., Any]]) -> None:
        from trl import chat_template_utils as trl

        self._parse = trl.parse_response
        self._tools = tools
        self._tokenizer = copy.deepcopy(trainer.processing_class)  # the trainer's own tokenizer stays as it is
        if all(getattr(self._tokenizer, name, None) is None for name in ("response_template", "response_schema")):
            self._tokenizer = trl.add_response_schema(self._tokenizer)
        if trainer.chat_template is None and not trl.is_chat_template_prefix_preserving(self._tokenizer):
            trainer.chat_template = trl.get_training_chat_template(self._tokenizer)
        self._settings = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}

    def of_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        settings = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **self._settings}
        rendered = self._tokenizer.apply_chat_template(conversation=[messages], tools=self._tools or None, **settings)
        return list(rendered["input_ids"][0])

    def parsed(self, token_ids: list[int], before: list[int]) -> dict[str, Any]:
        return self._parse(self._tokenizer, token_ids, prefix=before, tools=self._tools)


class Played:
    """One conversation, its environment, and the values that TRL needs of both."""

    def __init__(self, environment: Any, prompt: list[dict[str, Any]], columns: Mapping[str, Any]) -> None:
        self.environment, self.prompt, self.columns = environment, prompt, columns
        self.messages: list[dict[str, Any]] = []
        """Messages after the prompt."""
        self.token_ids: list[int] = []
        """Tokens of the prompt, of all turns, and of the tools' messages."""
        self._num_prompt_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self._num_prompt_tokens

    def begin(self, rendering: Rendering, observation: str | None) -> None:
        last = self.prompt[-1]
        messages = [*self.prompt[:-1], {**last, "content": last["content"] + (observation or "")}]
        self.token_ids = rendering.of_prompt(messages)
        self._num_prompt_tokens = len(self.token_ids)

    def say(self, rendering: Rendering, token_ids: list[int]) -> dict[str, Any]:
        message = rendering.parsed(token_ids, self.token_ids)
        self.messages.append(message)
        self.token_ids = self.token_ids + token_ids
        return message

    def row(self, result: AgentResult) -> dict[str, Any]:
        """One row for TRL: the tokens that the server recorded, and further columns for reward functions."""
        assert result.segments is not None
        (segment,) = result.segments
        assert segment.logprobs is not None
        after = slice(self._num_prompt_tokens, None)
        return {
            "prompt_ids": segment.token_ids[: self._num_prompt_tokens],
            "completion_ids": segment.token_ids[after],
            "logprobs": segment.logprobs[after],
            "env_mask": segment.mask[after],
            "environment_reward": result.reward,
            "environments": self.environment,
            "messages": self.messages,
        }


def tools_of(environment: Any) -> list[Callable[..., Any]]:
    """The environment's public methods except `reset` and `get_reward`, as TRL finds them."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return [getattr(environment, name) for name in names if not name.startswith("_") and name not in NOT_TOOLS]

"""Agents of verifiers: a conversation with a tool, held open turn by turn (`Agent.interaction`), is a session of ours.

verifiers sends the id of a trace as X-Session-ID. Either `on_trace` sets that id before the first request, or the
sampling parameters name the group.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from renderers.configs import DefaultRendererConfig

from conformance.agents import GROUP_SIZE, LONG, QUESTION, ROLES, SHORT, TOOL_SAYS, TURNS, Role, Sessions, Tool, race
from conformance.checks import Kit, check

sys.path.insert(0, str(Path(__file__).parent))  # verifiers looks for harnesses among top-level modules

FLAGS = ("--enable-scale-out",)
"""Flags that /inference/v1/generate needs."""
COMPAT = (*FLAGS, "--rollout-compat", "prime-rl")
LOOP = asyncio.new_event_loop()
"""One event loop for all checks, because objects that the renderers share are bound to it."""


class Sum(vf.Task):
    """A task whose rollout ends with a turn that was stopped."""

    @vf.stop
    async def lost(self, response: vf.Response) -> bool:
        return response.finish_reason is None


def eval_config(url: str) -> vf.EvalClientConfig:
    return vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY")


def train_config(url: str, model: str, **fields: Any) -> vf.TrainClientConfig:
    return vf.TrainClientConfig(
        base_url=f"{url}/v1",
        api_key_var="NO_KEY",
        renderer=DefaultRendererConfig(),
        renderer_model_name=model,
        **fields,
    )


async def converse(
    model: str, client: vf.ClientConfig, id: str, tool: Tool, num_turns: int = TURNS, **sampling: Any
) -> vf.Trace:
    """An agent of verifiers, and a caller that passes it the tool's answers."""
    agent = vf.make_agent(
        vf.AgentConfig(
            model=model,
            client=client,
            sampling=vf.SamplingConfig(**sampling),
            harness={"id": "one-request"},
            runtime=vf.SubprocessConfig(),
        )
    )
    task = Sum(vf.TaskData(idx=0, prompt=QUESTION))
    async with agent, agent.interaction(task, on_trace=lambda trace: setattr(trace, "id", id)) as chat:
        segment = await chat.turn()
        while not segment.terminated and chat.trace.stop_condition is None and chat.trace.num_turns < num_turns:
            await tool()
            segment = await chat.turn(TOOL_SAYS)
    return chat.trace


async def no_tool() -> None:
    pass


@check("unmodified")
def agents_get_the_turns_of_stock_vllm(kit: Kit) -> str:
    """Conversations without a group: session ids change nothing."""
    found = []
    for kind in ("rollout", "stock"):
        with kit.recording(kit.server(kind, flags=FLAGS)) as recorder:
            sampling = {"max_tokens": SHORT, "temperature": 1, "seed": 5}
            id = uuid.uuid4().hex
            trace = LOOP.run_until_complete(
                converse(kit.model_path(), eval_config(recorder.url), id, no_tool, **sampling)
            )
        sent = [request["headers"].get("x-session-id") for request in recorder.requests]
        assert sent == [trace.id] * TURNS
        found.append([message.content for message in trace.branches[-1].messages])
    assert found[0] == found[1]
    return f"EvalClient: {TURNS} turns with {TURNS - 1} words of a tool between them, the same texts"


@check("on")
def agents_of_a_declared_group_race(kit: Kit) -> dict[str, Any]:
    """TrainClient, with the id of a declared session as the id of the trace."""
    server, model = kit.server(flags=COMPAT), kit.model_path()
    group = Sessions(server.url)
    ids = dict(zip(group.declare(), ROLES, strict=True))
    config = train_config(server.url, model)

    async def play(id: str, role: Role, tool: Tool) -> vf.Trace:
        return await converse(model, config, id, tool, **sampling_of(role))

    traces = LOOP.run_until_complete(race(group, ids, play))
    numbers = group.assert_raced(ids)
    for trace, role in zip(traces, ROLES, strict=True):
        reasons = [call.finish_reason for call in trace.calls]
        assert trace.ok, trace.errors
        assert trace.stop_condition == ("user_closed" if role == "finishes" else "lost"), (role, trace.stop_condition)
        assert len(reasons) == {"finishes": TURNS, "in a turn": 1, "at its tool": 2}[role], (role, reasons)
        assert (reasons[-1] is None) == (role != "finishes"), (role, reasons)
        if role == "finishes":
            segments = [segment["token_ids"] for segment in group.trajectory(trace.id)["segments"]]
            assert [list(branch.token_ids) for branch in trace.branches] == segments
    return {
        "detail": f"`on_trace=lambda trace: setattr(trace, 'id', id)`: {GROUP_SIZE} of {len(ROLES)} finish with the "
        f"tokens that GET /v1/sessions has; two were stopped after {numbers['stopped_after_tokens']} of {LONG} tokens "
        "of their first turn, two asked again after the race and never reached the engine",
        **numbers,
    }


@check("on")
def agents_race_by_a_group_in_their_sampling(kit: Kit) -> dict[str, Any]:
    """EvalClient, with traces that have their own ids, as behind an environment server."""
    server, model = kit.server(flags=COMPAT), kit.model_path()
    group = Sessions(server.url)
    group.id = uuid.uuid4().hex
    ids = {uuid.uuid4().hex: role for role in ROLES}
    fields = {"rollout_group_id": group.id, "rollout_group_size": GROUP_SIZE, "rollout_num_candidates": len(ROLES)}
    xargs = {**fields, "rollout_cut_turn": "goes_on"}

    async def play(id: str, role: Role, tool: Tool) -> vf.Trace:
        return await converse(model, eval_config(server.url), id, tool, vllm_xargs=xargs, **sampling_of(role))

    traces = LOOP.run_until_complete(race(group, ids, play))
    numbers = group.assert_raced(ids)
    for trace, role in zip(traces, ROLES, strict=True):
        said = [error.message for error in trace.errors]
        assert (trace.ok, len(said)) == ((True, 0) if role == "finishes" else (False, 1)), (role, said)
        assert role == "finishes" or "abort" in said[0], said
    return {
        "detail": f"`vllm_xargs = {{rollout_group_id, …}}` in the sampling: {GROUP_SIZE} of {len(ROLES)} finish; "
        f"losers are rollouts with a ProviderError, since EvalClient knows no finish reason abort: {said[0][:160]}",
        **numbers,
    }


def sampling_of(role: Role) -> dict[str, Any]:
    num_tokens = LONG if role == "in a turn" else SHORT
    return {"max_tokens": num_tokens, "min_tokens": num_tokens}

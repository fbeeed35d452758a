"""verl 0.9 in its own server actor: `vLLMHttpServer` launched as verl launches it, called by verl's own clients.

vLLM's own parser reads the command line, and verl's load balancer routes the calls. verl's trainer needs a GPU.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

os.environ["VERL_USE_EXTERNAL_MODULES"] = "vllm_rollout.integrations.verl"  # before verl is imported

from conformance import gain
from conformance.agents import TURNS
from conformance.asynchronous import assert_exact, make_versions, num_straddling, sampled_by
from conformance.checks import CAP, REAL_MODEL, Kit, assert_raced, check, main
from conformance.in_process import assert_best, by_environment, ray_cluster, summary, watch
from conformance.verl.agents import agents, overrides
from conformance.verl.asynchronous import let_pause, names_its_versions, over_updates, prompt_of, spans_of
from conformance.verl.rewards import compute_score_grades_as_it_is  # noqa: F401 (a check, by its name here)

N = 4
PROMPTS = [[11, 12, 13, 14], [21, 22, 23, 24]]
OURS = "+actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls=vllm_rollout.Scheduler"
AT_ONCE_LENGTH, AT_ONCE_TOKENS = 4096, 4000
"""verl takes no more tokens than the model's own length."""
SPARES = f"+actor_rollout_ref.rollout.custom.rollout_redundancy={N}"


def config_of(kit: Kit, *overrides: str, model: str | None = None, n: int = N) -> Any:
    """verl's own configuration, for a small model on a CPU."""
    import verl
    from hydra import compose, initialize_config_dir

    rollout = {
        "name": "vllm", "n": n, "tensor_model_parallel_size": 1, "max_model_len": 2048, "prompt_length": 64,
        "response_length": CAP,
        "enforce_eager": True, "max_num_seqs": 32, "dtype": "float32", "load_format": "auto",
        "gpu_memory_utilization": 0.5,
    }  # fmt: skip
    settings = [f"actor_rollout_ref.rollout.{name}={value}" for name, value in rollout.items()]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={kit.model_path(model)}",
                "+actor_rollout_ref.rollout.enable_sleep_mode=false",
                *settings,
                *overrides,
            ],
        )


class Server:
    """A replica's server in an actor of Ray, and verl's clients of it."""

    def __init__(self, config: Any, actor: Any, balancer: Any) -> None:
        self.config, self.actor, self.balancer = config, actor, balancer

    def client(self, name: str) -> Any:
        from verl.workers.rollout import llm_server

        return getattr(llm_server, name)(self.config, self.balancer)

    async def ask(
        self, client: Any, n: int = N, prompts: Sequence[list[int]] = PROMPTS, **sampling: Any
    ) -> list[list[Any]]:
        """One call per sample, as `AgentLoopWorker.generate_sequences` and `SingleTurnAgentLoop.run` make it."""
        params = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "logprobs": True,
            **sampling,
        }

        def ask_one(prompt: list[int]) -> Any:
            return client.generate(request_id=uuid4().hex, prompt_ids=prompt, sampling_params=dict(params), priority=0)

        return [
            list(outputs)
            for outputs in await asyncio.gather(
                *[asyncio.gather(*[ask_one(prompt) for _ in range(n)]) for prompt in prompts]
            )
        ]

    async def seen(self) -> list[dict[str, Any]]:
        def take(server: Any) -> list[dict[str, Any]]:
            rows = list(server.engine.seen)
            server.engine.seen.clear()
            return rows

        return await self.actor.__ray_call__.remote(take)


@asynccontextmanager
async def server_of(kit: Kit, *overrides: str, integration: bool = True, **sizes: Any) -> AsyncGenerator[Server, None]:
    import ray
    from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry
    from verl.workers.rollout.router import get_router_handle
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from vllm_rollout.integrations.verl import load_replica, load_server

    assert RolloutReplicaRegistry._registry["vllm"] is load_replica
    config = config_of(kit, *overrides, **sizes)
    with ray_cluster():
        server_class = load_server() if integration else vLLMHttpServer
        actor = ray.remote(server_class).remote(
            config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, RolloutMode.STANDALONE, [], 0, 0, 1, 1, ""
        )
        await actor.launch_server.remote()
        await actor.__ray_call__.remote(lambda server: watch(server.engine))
        yield Server(config, actor, get_router_handle({"server": actor}))


def flat(outputs: list[list[Any]]) -> list[Any]:
    return [output for group in outputs for output in group]


@check("unmodified")
def tokens_are_those_of_the_stock_scheduler(kit: Kit) -> dict[str, Any]:
    """`rollout.engine_kwargs.vllm.scheduler_cls` and nothing else: verl forwards it, and greedy tokens are the same."""

    async def greedy(*overrides: str) -> tuple[list[Any], str]:
        async with server_of(kit, *overrides, integration=False) as server:
            outputs = await server.ask(server.client("LLMServerClient"), temperature=0, max_tokens=48)
            scheduler = await server.actor.__ray_call__.remote(
                lambda server: str(server.engine.vllm_config.scheduler_config.scheduler_cls)
            )
            return flat(outputs), scheduler

    stock, theirs = asyncio.run(greedy())
    ours, scheduler = asyncio.run(greedy(OURS))
    assert "vllm_rollout" not in theirs
    assert scheduler == "vllm_rollout.Scheduler"
    assert [output.token_ids for output in ours] == [output.token_ids for output in stock]
    assert all(output.stop_reason == "completed" for output in ours)
    pairs = [pair for a, b in zip(ours, stock, strict=True) for pair in zip(a.log_probs, b.log_probs, strict=True)]
    difference = max(abs(a - b) for a, b in pairs)
    assert difference < 1e-4
    return {"detail": f"{len(ours)} answers, the same tokens; log probabilities differ by {difference:.1e} at most"}


@check("on")
def every_agent_loop_gets_a_finished_candidate(kit: Kit) -> dict[str, Any]:
    """The integration, with as many spare candidates as samples, through both of verl's clients."""

    async def measure(*overrides: str) -> dict[str, Any]:
        found = {}
        async with server_of(kit, *overrides) as server:
            for name in ("LLMServerClient", "FullyAsyncLLMServerClient"):
                client = server.client(name)
                await server.ask(client, max_tokens=8)  # warm
                await server.seen()
                started = time.monotonic()
                answers = await server.ask(client)
                seconds = time.monotonic() - started
                outputs, seen = flat(answers), await server.seen()
                # verl calls what was cut completed, or by its asynchronous client length.
                assert all(output.stop_reason in ("completed", "length") for output in outputs)
                assert all(len(output.token_ids) == len(output.log_probs) for output in outputs)
                for prompt, group in zip(PROMPTS, answers, strict=True):
                    rows = [row for row in seen if row["prompt"] == prompt]
                    assert_best(rows, [len(output.token_ids) for output in group])
                found[name] = {
                    **summary(seen, lambda row: row["end"] in ("stop", "length")),
                    "cut": sum(len(output.token_ids) >= CAP for output in outputs),
                    "longest": max(len(output.token_ids) for output in outputs),
                    "seconds": round(seconds, 2),
                }
            validation = flat(await server.ask(server.client("LLMServerClient"), n=1))
            assert len(await server.seen()) == len(validation) == len(PROMPTS), "fewer samples get no spare ones"
        return found

    stock, on = asyncio.run(measure()), asyncio.run(measure(SPARES))
    for name in on:
        assert stock[name]["requests"] == N * len(PROMPTS)
        assert on[name]["requests"] == 2 * N * len(PROMPTS), "and nothing was sent again"
    one, other = on["LLMServerClient"], stock["LLMServerClient"]
    return {
        "detail": f"{N} of {2 * N} per prompt: the longest has {one['longest']} tokens (without spares "
        f"{other['longest']}), {one['seconds']} s (without {other['seconds']} s); of {2 * N * len(PROMPTS)} answers "
        f"{sum(each['cut'] for each in on.values())} are cut at {CAP} tokens (without "
        f"{sum(each['cut'] for each in stock.values())})",
        "without_spares": stock,
        "on": on,
    }


@check("on")
def engines_are_ours_by_the_environment(kit: Kit) -> dict[str, Any]:
    """With VLLM_ROLLOUT and verl's own server, greedy tokens are the same, and requests with fields race."""
    fields = {"rollout_group_size": N, "rollout_num_candidates": 2 * N}

    async def greedy(server: Server) -> list[list[int]]:
        answers = await server.ask(server.client("LLMServerClient"), temperature=0, max_tokens=48)
        return [output.token_ids for output in flat(answers)]

    async def stock() -> list[list[int]]:
        async with server_of(kit, integration=False) as server:
            return await greedy(server)

    async def ours() -> tuple[list[list[int]], list[str]]:
        async with server_of(kit, integration=False) as server:
            tokens = await greedy(server)
            await server.seen()
            await server.ask(server.client("LLMServerClient"), n=2 * N, prompts=PROMPTS[:1], extra_args=fields)
            return tokens, [row["end"] for row in await server.seen()]

    expected = asyncio.run(stock())
    with by_environment():
        tokens, ends = asyncio.run(ours())
    assert tokens == expected
    assert_raced(ends, N)
    return {
        "detail": f"{len(tokens)} greedy answers, the same tokens; {ends.count('abort')} of {len(ends)} were stopped"
    }


@check("on")
def gain_of_spare_candidates(kit: Kit) -> dict[str, Any]:
    """verl's own server and ours, alternating, on a real model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(kit.model_path(REAL_MODEL))
    sizes = {"model": REAL_MODEL, "n": gain.GROUP_SIZE}
    spares = f"+actor_rollout_ref.rollout.custom.rollout_redundancy={gain.REDUNDANCY}"
    seconds: dict[bool, list[float]] = {True: [], False: []}

    async def measure() -> None:
        async with (
            server_of(kit, integration=False, **sizes) as stock,
            server_of(kit, spares, **sizes) as on,
        ):
            for pair, is_on in gain.turns():
                server = on if is_on else stock
                prompt = tokenizer.encode(gain.chat(gain.QUESTIONS[pair]))
                client = server.client("LLMServerClient")
                started = time.monotonic()
                (outputs,) = await server.ask(client, gain.GROUP_SIZE, [prompt], max_tokens=gain.MAX_TOKENS)
                seconds[is_on].append(time.monotonic() - started)
                assert [output.stop_reason for output in outputs] == ["completed"] * gain.GROUP_SIZE

    asyncio.run(measure())
    numbers = gain.gain("generation", seconds[True], seconds[False])
    return {"detail": gain.words(numbers), **numbers}


@check("on")
def gain_of_many_prompts(kit: Kit) -> dict[str, Any]:
    """As many prompts at once as a step has, on an emulated device: `gain.AtOnce`."""
    lengths = {
        "max_num_seqs": gain.AT_ONCE_PLACES, "max_model_len": AT_ONCE_LENGTH, "response_length": AT_ONCE_TOKENS,
    }  # fmt: skip
    changed = [f"actor_rollout_ref.rollout.{name}={value}" for name, value in lengths.items()]
    extension = "conformance.verl.extension.EmulatedExtension"
    changed.append(f"+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls={extension}")
    spares = f"+actor_rollout_ref.rollout.custom.rollout_redundancy={gain.REDUNDANCY}"

    async def measure() -> gain.AtOnce:
        times = gain.AtOnce()
        async with (
            server_of(kit, *changed, integration=False, n=gain.GROUP_SIZE) as plain,
            server_of(kit, *changed, spares, n=gain.GROUP_SIZE) as on,
        ):
            servers = {"plain": plain, "spares": on}
            for arm in times.turns(tuple(servers)):
                server = servers[arm]
                client = server.client("LLMServerClient")
                with times.timed("generation", arm):
                    answers = await server.ask(client, gain.GROUP_SIZE, gain.AT_ONCE_PROMPTS, max_tokens=AT_ONCE_TOKENS)
                assert {output.stop_reason for output in flat(answers)} <= {"completed", "length"}
        return times

    with by_environment(device=gain.DEVICE):
        return asyncio.run(measure()).result()


@check("on")
def calls_for_a_prompt_meet_on_one_replica(kit: Kit) -> str:
    """The router of `rollout.router_config_path`, loaded by verl's own factory and asked as verl's client asks."""
    import ray
    from verl.workers.rollout.router import get_router_handle

    path = kit.folder / "router.yaml"
    path.write_text("router_class: vllm_rollout.integrations.verl_router.PromptBalancer\n")
    servers = {f"replica {number}": number for number in range(4)}
    places: dict[str, list[set[str]]] = {}
    with ray_cluster():
        for name, config in (("verl's", None), ("ours", str(path))):
            balancer = get_router_handle(servers, config)
            fields = ray.get(balancer.require_acquire_fields.remote())
            asked = [(uuid4().hex, [prompt, 1, 2]) for prompt in range(8) for _ in range(N)]
            got = ray.get(
                [
                    balancer.acquire_server.remote(id, **({"prompt_ids": prompt} if fields else {}))
                    for id, prompt in asked
                ]
            )
            places[name] = [{server for server, _ in got[start : start + N]} for start in range(0, len(got), N)]
            ray.get([balancer.release_server.remote(s, id) for (s, _), (id, _) in zip(got, asked, strict=True)])
    assert {len(replicas) for replicas in places["ours"]} == {1}
    assert len(set.union(*places["ours"])) == len(servers)
    apart = sum(len(replicas) > 1 for replicas in places["verl's"])
    return f"8 prompts, {N} calls each, 4 replicas: with verl's balancer {apart} prompts are apart, with ours none"


@check("on")
def without_the_integration_losers_come_back(kit: Kit) -> dict[str, Any]:
    """With fields alone, verl's clients get surplus candidates as aborted ones."""
    fields = {"rollout_group_size": N, "rollout_num_candidates": 2 * N}

    async def measure() -> dict[str, Any]:
        async with server_of(kit, OURS, integration=False) as server:
            plain = flat(await server.ask(server.client("LLMServerClient"), 2 * N, extra_args=fields))
            first = await server.seen()
            asynchronous = flat(await server.ask(server.client("FullyAsyncLLMServerClient"), 2 * N, extra_args=fields))
            return {"plain": plain, "first": first, "async": asynchronous, "second": await server.seen()}

    result = asyncio.run(measure())
    num_asked = 2 * N * len(PROMPTS)
    for prompt in PROMPTS:
        assert_raced([row["end"] for row in result["first"] if row["prompt"] == prompt], N)
    num = [output.stop_reason for output in result["plain"]].count("aborted")
    assert [row["reason"] for row in result["first"]].count("surplus") == num > 0
    assert all(output.stop_reason != "aborted" for output in result["async"])
    again = len(result["second"]) - num_asked
    losers = [row for row in result["second"][:num_asked] if row["reason"] == "surplus" and row["tokens"] < CAP]
    assert again >= len(losers) > 0
    longer = sum(row["tokens"] for row in result["second"][num_asked:])
    return {
        "detail": f"LLMServerClient: {num} of {num_asked} answers are losers, which the agent loop takes for answers; "
        f"FullyAsyncLLMServerClient sends each loser again after a second ({again} requests, {longer} tokens more), so "
        "that nothing is saved: use the integration"
    }


@check("unmodified")
def agents_with_a_tool_get_the_tokens_of_the_stock_scheduler(kit: Kit) -> str:
    """verl's ToolAgentLoop at temperature 0, as a validation runs it."""

    async def greedy(*extra: str) -> tuple[Any, int]:
        async with server_of(kit, *overrides(kit, 0), *extra, integration=False) as server:
            batch = await agents(server.config, server.client("LLMServerClient"), 2, validate=True)
            return batch.batch, len(await server.seen())

    (stock, num_turns), (ours, num_ours) = asyncio.run(greedy()), asyncio.run(greedy(OURS))
    assert num_turns == num_ours == 2 * TURNS
    assert ours["responses"].tolist() == stock["responses"].tolist()
    assert ours["response_mask"].tolist() == stock["response_mask"].tolist()
    num_sampled, num_all = (int(stock[name].sum()) for name in ("response_mask", "attention_mask"))
    return f"2 loops of {TURNS} turns: the same {num_all} tokens, of which {num_sampled} are the policy's"


@check("on")
def agents_with_a_tool_race(kit: Kit) -> dict[str, Any]:
    """Two of four loops finish. The turns of the others stop in the engine."""
    size, redundancy = 2, 2

    async def race() -> tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]:
        async with server_of(kit, *overrides(kit, redundancy), n=size) as server:
            batch = await agents(server.config, server.client("LLMServerClient"), size)
            await asyncio.sleep(2)  # a stopped turn's end is on its way
            return batch.batch, await server.seen(), await server.actor.__ray_call__.remote(groups_of)

    batch, seen, (group,) = asyncio.run(race())
    states = sorted(session["state"] for session in group["sessions"])
    assert group["status"] == "complete", group
    assert states.count("surplus") == redundancy, group
    assert len(group["selected"]) == len(batch["responses"]) == size
    # What verl trains on are the tokens of sessions that finished, and nothing was generated beside them.
    lengths = sorted(session["num_tokens"] for session in group["sessions"] if session["id"] in group["selected"])
    assert sorted(batch["response_mask"].sum(1).tolist()) == lengths, (batch["response_mask"].sum(1), group)
    stopped = [row["tokens"] for row in seen if row["reason"] == "surplus" and row["tokens"]]
    return {
        "detail": f"`rollout_sessions`, `rollout_redundancy` and RacingToolAgentLoop: {size} of {size + redundancy} "
        f"loops with a tool finish, of {lengths} tokens; the others are surplus, {len(stopped)} of them stopped by the "
        f"engine amid a turn, after {stopped} tokens of it",
        "generated_tokens": group["generated_tokens"],
        "returned_tokens": group["returned_tokens"],
    }


@check("on")
def asynchronous_answers_come_back_over_updates(kit: Kit) -> dict[str, Any]:
    """verl's asynchronous client with spare candidates. verl aborts all requests at each update."""
    num_versions, num_groups = 5, 2
    folders = make_versions(Path(kit.model_path()), kit.folder / "verl_versions", num_versions)
    ours = (
        "+actor_rollout_ref.rollout.custom.rollout_sessions=true",  # our client of the engine, which corrects spans
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_cls=vllm_rollout.Worker",
    )

    async def train() -> tuple[list[list[Any]], list[int], list[dict[str, Any]], bool]:
        async with server_of(kit, SPARES, *ours) as server:
            is_translated = await server.actor.__ray_call__.remote(let_pause)
            client = server.client("FullyAsyncLLMServerClient")
            answers, aborted = await asyncio.wait_for(over_updates(server, client, folders, num_groups), 600)
            return answers, aborted, await server.seen(), is_translated

    groups, aborted, seen, is_translated = asyncio.run(train())
    answers = flat(groups)
    assert len(answers) == num_versions * num_groups * N
    assert all(answer.stop_reason in ("completed", "length") for answer in answers)
    assert all(len(answer.token_ids) == len(answer.log_probs) > 0 for answer in answers)
    assert all(aborted[1:]), aborted
    from vllm_rollout.adapter.compat import WEIGHT_SPANS, has

    spans = "this vLLM has no weight_versions"
    if has(WEIGHT_SPANS):
        versions = assert_exact([spans_of(row) for row in seen if row["tokens"]], num_versions)
        assert len(versions) == num_versions, versions
        spans = (
            f"the engine's weight_versions, which verl drops, name exactly those of all tokens of {len(seen)} requests"
        )
    for number in range(num_groups):  # those that no update interrupts race as usual
        rows = [row for row in seen if row["prompt"] == prompt_of(num_versions - 1, number)]
        assert len(rows) == 2 * N, rows
        assert_best(rows, [len(answer.token_ids) for answer in groups[number - num_groups]])
    straddling = num_straddling([answer.token_ids for answer in answers], num_versions)
    assert straddling > 0
    for answer in answers:
        assert names_its_versions(answer, num_versions), (
            answer.extra_fields,
            sampled_by(answer.token_ids, num_versions),
        )
    return {
        "detail": f"{len(answers)} answers came back over {num_versions - 1} updates, which aborted {aborted[1:]} "
        f"requests. {straddling} are of several versions. verl's min_global_steps and max_global_steps are those of "
        f"the first and the last token, and {spans}. verl empties the prefix cache at each update: no request has read "
        "KV of older weights. Groups that no update interrupts race as usual."
        f"{' An argument of the pause was translated (`let_pause`)' if is_translated else ''}",
        "aborted": aborted[1:],
        "num_straddling": straddling,
    }


def groups_of(server: Any) -> list[dict[str, Any]]:
    """Groups of sessions as the server reports them. Runs in verl's server."""
    service = server.engine._rollouts._app.state.session_service
    return [service.read_group(name).model_dump() for _, name in service._groups]


if __name__ == "__main__":
    main()

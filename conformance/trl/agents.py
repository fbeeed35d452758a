"""Agents of TRL: `environment_factory`, whose methods are tools, and its conversations as sessions of our server.

A tiny model writes no calls by itself, so TRL's own `vllm_structured_outputs_regex` ends every turn with a call.
"""

from __future__ import annotations

from typing import Any

from conformance import calculator
from conformance.agents import QUESTION, TURNS, Sessions
from conformance.checks import Kit, check, metric, refusal
from conformance.trl.training import FLAGS, Run, by_variety, train
from vllm_rollout.integrations.trl_agents import TRLAgents

CALL = r'<tool_call>\n\{"name": "calculate", "arguments": \{"terms": "[1-9]{1,2} \+ [1-9]{1,2}"\}\}\n</tool_call>'
SAME_TOKENS = (*FLAGS, "--dtype", "float32")
"""In float32 no two tokens are as likely, whatever the other requests of a batch are."""
SIZE = 2
PROMPTS = [[{"role": "user", "content": QUESTION}], [{"role": "user", "content": "What is 1 + 2?"}]]
SETTINGS: dict[str, Any] = {
    "num_generations": SIZE,
    "per_device_train_batch_size": SIZE * len(PROMPTS),
    "max_completion_length": 1000,
    "max_tool_calling_iterations": TURNS - 1,
    "vllm_structured_outputs_regex": f"[a-z ]{{1,250}}{CALL}",
    "learning_rate": 1e-3,
    "vllm_importance_sampling_correction": False,  # the regular expression has the say in what is sampled
}
REDUNDANCY = 2


class Calculator:
    """An environment as a user of TRL writes it. Its reward is the share of calls among a conversation's turns."""

    def reset(self, **columns: Any) -> str:
        self._num_calls = 0
        return " Use the calculator."

    def calculate(self, terms: str) -> str:
        """Adds numbers.

        Args:
            terms: Numbers with a plus between them.
        """
        self._num_calls += 1
        return calculator.calculate(terms)

    def get_reward(self) -> float:
        return self._num_calls / TURNS


class Seen:
    """Records each generation of TRL's trainer: prompts, completions, and the mask of tokens that it trains on."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.completions: list[list[int]] = []
        self.masks: list[list[int] | None] = []

    def before(self, trainer: Any) -> None:
        generate = trainer._generate

        def watched(prompts: list[Any]) -> Any:
            answer = generate(prompts)
            prompt_ids, completion_ids, masks = answer[:3]
            self.prompts += map(list, prompt_ids)
            self.completions += map(list, completion_ids)
            self.masks += masks or [None] * len(prompt_ids)
            return answer

        trainer._generate = watched


def steps(kit: Kit, url: str, name: str, *, num_steps: int = 2, **more: Any) -> tuple[Run, Seen]:
    from trl.chat_template_utils import qwen2_5_chat_template

    seen = Seen()
    run = train(
        url, kit.model_path(), kit.folder / name, num_steps=num_steps, prompts=PROMPTS * num_steps,
        before=seen.before, chat_template=qwen2_5_chat_template, **{"reward": by_variety, **SETTINGS, **more},
    )  # fmt: skip
    return run, seen


@check("unmodified")
def environments_get_the_turns_of_stock_vllm(kit: Kit) -> dict[str, Any]:
    """GRPOTrainer with `environment_factory` in server mode, at stock vLLM and at ours: tokens, masks and requests."""
    found, sent = [], []
    for kind in ("stock", "rollout"):
        with kit.recording(kit.server(kind, flags=SAME_TOKENS)) as recorder:
            run, seen = steps(
                kit, recorder.url, f"environment-{kind}", environment_factory=Calculator,
                generation_kwargs={"seed": 11},
            )  # fmt: skip
        found.append((seen.completions, seen.masks))
        sent = [request for request in recorder.requests if request["path"] == "/v1/completions"]
    assert found[0] == found[1]
    assert [len(request["body"]["prompt"]) for request in sent] == [2, 4, 4] * 2, sent
    assert not any("x-session-id" in request["headers"] for request in sent)
    frequencies = [logs["tools/call_frequency"] for logs in run.logs if "tools/call_frequency" in logs]
    assert frequencies == [TURNS - 1] * 2, run.logs
    num_policy = sum(sum(mask) for mask in seen.masks)
    return {
        "detail": f"2 steps, 8 conversations of {TURNS} turns, {sum(map(len, seen.completions))} tokens of which "
        f"{num_policy} are the policy's, all as with stock vLLM. A step is {TURNS} requests: all conversations' first "
        "turns, then all their next ones, each request when the longest turn of the one before is over, without a "
        "session id"
    }


@check("on")
def conversations_by_rollout_func_are_those_of_trl(kit: Kit) -> str:
    """If nothing is left to chance, TRLAgents without spare conversations gives the tokens of TRL's own loop."""
    server = kit.server(flags=SAME_TOKENS)
    totals = []
    for max_length in (1000, 200):  # the second one ends amid a turn
        found = []
        for name in ("environment_factory", "rollout_func"):
            ours = name == "rollout_func"
            agents = TRLAgents(server.url, environment_factory=Calculator)
            more = {"rollout_func": agents, "reward": agents.rewards} if ours else {"environment_factory": Calculator}
            settings = {"num_steps": 1, "top_k": 1, "max_completion_length": max_length, **more}
            _, seen = steps(kit, server.url, f"{name}-{max_length}", **settings)
            found.append((seen.prompts, seen.completions, seen.masks))
        assert found[0] == found[1], found
        totals.append(sum(map(len, found[0][1])))
    return (
        f"4 conversations: the same prompts, {totals[0]} tokens and masks; {totals[1]} where they are cut amid a turn"
    )


@check("on")
def environments_race_by_rollout_func(kit: Kit) -> dict[str, Any]:
    """TRLAgents with the same environment, given as rollout_func. TRL trains on the tokens that the server sampled."""
    server = kit.server(flags=FLAGS)
    agents = TRLAgents(server.url, environment_factory=Calculator, redundancy=REDUNDANCY)

    def called_and_various(environments: list[Any], **columns: Any) -> list[float]:
        assert [each.get_reward() for each in environments] == list(agents.rewards(**columns))
        return [a + b for a, b in zip(by_variety(**columns), agents.rewards(**columns), strict=True)]

    with kit.recording(server) as recorder:
        agents._url = recorder.url
        run, seen = steps(
            kit, recorder.url, "agents", rollout_func=agents, reward=called_and_various,
            generation_kwargs={"seed": 11},
        )  # fmt: skip
    assert run.num_syncs == 2
    assert run.generation_s == [], "TRL's own client has generated"
    at_server = Sessions(server.url, api_key=None)
    groups = list(at_server.declared_by(recorder.requests))
    assert [group["status"] for group in groups] == ["complete"] * 4, groups
    returned, stopped = [], []
    for group in groups:
        states = [session["state"] for session in group["sessions"]]
        assert sorted(states) == ["finished"] * SIZE + ["surplus"] * REDUNDANCY, group
        returned += [at_server.trajectory(id)["segments"] for id in group["selected"]]
        stopped += [session["num_tokens"] for session in group["sessions"] if session["state"] == "surplus"]
    expected = [(segment["token_ids"], segment["mask"]) for (segment,) in returned]
    got = [
        (prompt + completion, [0] * len(prompt) + mask)
        for prompt, completion, mask in zip(seen.prompts, seen.completions, seen.masks, strict=True)
    ]
    assert sorted(got) == sorted(expected)
    lengths = [sum(mask) for _, mask in got]
    return {
        "detail": f"`rollout_func=TRLAgents(url, environment_factory=Calculator, redundancy={REDUNDANCY})`: 2 steps, "
        f"{SIZE} of {SIZE + REDUNDANCY} conversations per prompt finish, of {lengths} tokens; TRL trains on their "
        f"tokens and masks as GET /v1/sessions has them. The others were stopped after {stopped}",
        "policy_tokens": lengths,
        "stopped_after_tokens": stopped,
    }


@check("on")
def spare_candidates_race_turn_by_turn(kit: Kit) -> dict[str, Any]:
    """Conversations with tools under `generation_kwargs={"vllm_xargs": {"rollout_redundancy": 2}}`."""
    server = kit.server(flags=FLAGS)
    found, name = {}, "vllm:generation_tokens_total"
    for spare in (0, REDUNDANCY):
        before = metric(server.url, name)
        run, seen = steps(
            kit, server.url, f"spare-{spare}", num_steps=4, environment_factory=Calculator,
            generation_kwargs={"vllm_xargs": {"rollout_redundancy": spare}} if spare else {},
        )  # fmt: skip
        assert [len(completions) for completions in run.completions] == [SIZE * len(PROMPTS)] * 4
        found[spare] = (sum(map(sum, seen.masks)), metric(server.url, name) - before)
    (trained, generated), (trained_spare, generated_spare) = found[0], found[REDUNDANCY]
    assert generated == trained, "without spare candidates TRL trains on all that was generated"
    assert generated_spare > 2 * trained_spare
    num_turns = 4 * SIZE * len(PROMPTS) * TURNS
    return {
        "detail": f"it races single turns: of first ones {SIZE} of {SIZE + REDUNDANCY}, of each later one 1 of "
        f"{1 + REDUNDANCY}, so that {generated_spare:.0f} tokens are generated for {trained_spare}, and a conversation "
        f"is made of the shortest turns ({trained_spare / num_turns:.0f} tokens, without {trained / num_turns:.0f})",
        "trained_tokens": [trained, trained_spare],
        "generated_tokens": [generated, generated_spare],
    }


@check("unmodified")
def a_rollout_func_beside_environment_factory_loses_its_mask(kit: Kit) -> str:
    """The rollout_func must own the environment, because TRL reads `env_mask` only if the trainer has no tools."""
    server = kit.server(flags=FLAGS)
    mask = [1, 0, 0, 1]

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        fields = {"prompt_ids": [5, 6], "completion_ids": [7, 8, 9, 10], "logprobs": [-1.0] * 4, "env_mask": mask}
        return {name: [list(value) for _ in prompts] for name, value in fields.items()}

    found = [
        steps(kit, server.url, f"mask-{name}", num_steps=1, rollout_func=rollout_func, **more)[1].masks
        for name, more in (("alone", {}), ("beside", {"environment_factory": Calculator}))
    ]
    assert found == [[mask] * 4, [[1] * 4] * 4], found
    agents = TRLAgents(server.url, environment_factory=Calculator)
    both = {"rollout_func": agents, "environment_factory": Calculator}
    said = refusal(lambda: steps(kit, server.url, "refused", num_steps=1, **both))
    assert "the tools' words" in said, said
    return (
        f"env_mask {mask} of a rollout_func is the mask that TRL trains with, but beside environment_factory "
        f"{found[1][0]}: it would train on the tools' words. TRLAgents refuses that"
    )

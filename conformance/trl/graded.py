"""Checks of TRL's rewards graded by the server. Runs in TRL's environment."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import sysconfig
from typing import Any

from conformance.checks import Kit, check
from conformance.grading import Case, assert_same
from conformance.session import ROOT
from conformance.trl.training import FLAGS, train
from vllm_rollout.integrations.trl import TRLRollouts
from vllm_rollout.rewards import Grader, Trajectory

CHAT = [{"role": "user", "content": "How many?"}]
TEXT = "How many?"
ENDLESS = "\\boxed{9^{9^{9^{9}}}}"
"""Math-Verify needs longer than any time-out to compare this with a number."""
IN_A_THREAD = f"""
import threading
from trl.rewards import accuracy_reward
answer = {{"completions": [[{{"role": "assistant", "content": {ENDLESS!r}}}]], "solution": ["42"]}}
thread = threading.Thread(target=accuracy_reward, kwargs=answer, daemon=True)
thread.start()
thread.join()
"""
IN_A_THREAD_S = 30.0
"""Seconds: three times TRL's limit for reading an answer, six times its limit for comparing one."""


def case(place: str, text: str, prompt: Any = CHAT, **columns: Any) -> Case:
    completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    batch = {"prompts": [prompt], "completions": [completion], **{name: [value] for name, value in columns.items()}}
    return Case(place, Trajectory(prompt, text, columns), batch)


@check("unmodified")
def reward_functions_grade_as_they_are(kit: Kit) -> dict[str, Any]:
    """All functions of `trl.rewards`, by our grader in its processes and called directly."""
    thirds = {"solution": "\\frac{1}{3}"}
    answers = ["\\boxed{\\frac{1}{3}}", "\\boxed{0.5}", "<think>\\boxed{2}</think>\\boxed{\\frac13}", "what?", ""]
    ids = [[5] * 3, list(range(90)), list(range(101)), [7, 7, 7, 8]]
    cases = [
        *[
            case(f"trl.rewards:{name}", text, **columns)
            for name in ("accuracy_reward", "reasoning_accuracy_reward")
            for text in answers
            for columns in (thirds, {"solution": "there is none"}, {**thirds, "level": 3}, {})
        ],
        case("trl.rewards:accuracy_reward", "\\boxed{3}", TEXT, solution="3"),
        *[
            case("trl.rewards:think_format_reward", text, prompt)
            for text in ("<think>\na\n</think>\nb", "<think>a", "<think><think>a</think>", "a")
            for prompt in (CHAT, TEXT)
        ],
        *[
            case(f"conformance.trl.user_rewards:{name}", "\\boxed{3}", prompt, completion_ids=each, solution="3")
            for name in ("overlong", "repetition", "cosine")
            for each in ids
            for prompt in (CHAT, TEXT)
        ],
    ]
    return {
        "detail": f"{assert_same(cases)}. The errors are TRL's: no `solution` came with the prompt, or the prompt is "
        "text, of which its functions know nothing. Void is a solution that Math-Verify cannot read. Token ids "
        "(overlong, repetition, cosine) must come as a column"
    }


@check("unmodified")
def an_endless_comparison_costs_one_reward(kit: Kit) -> dict[str, Any]:
    """Math-Verify's time limits need a main thread. TRL turns them off in other threads, where comparisons may hang."""
    has_ended = True
    try:
        subprocess.run([sys.executable, "-c", IN_A_THREAD], check=True, timeout=IN_A_THREAD_S)
    except subprocess.TimeoutExpired:
        has_ended = False
    assert not has_ended, "in a thread, too"

    async def grade() -> list[Any]:
        async with Grader({"accuracy": "trl.rewards:accuracy_reward"}, num_processes=2) as grader:
            texts = [ENDLESS, *["\\boxed{42}", "\\boxed{41}"] * 20]
            return await asyncio.gather(
                *[grader.grade("accuracy", Trajectory(CHAT, text, {"solution": "42"})) for text in texts]
            )

    endless, *others = asyncio.run(grade())
    assert endless.reward == 0.0, endless
    assert [(grade.status, grade.reward) for grade in others] == [("ok", 1.0), ("ok", 0.0)] * 20
    return {
        "detail": f"in a thread `accuracy_reward` still compares after {IN_A_THREAD_S:.0f} s. Here it runs in a main "
        f"thread, its own limit holds ({endless.status}, reward 0), and 40 answers beside it get their rewards"
    }


@check("on")
def rewards_by_the_server_are_those_of_the_trainer(kit: Kit) -> dict[str, Any]:
    """Seeded steps twice: graded by the trainer, and graded by the server, whose rewards the trainer reads."""
    from conformance.trl.user_rewards import letters

    path = f"{ROOT}:{sysconfig.get_paths()['purelib']}"
    server = kit.server(
        flags=[*FLAGS, "--rollout-reward", "letters=conformance.trl.user_rewards:letters"],
        environment={"PYTHONPATH": path},
    )
    rows = [
        {"prompt": [{"role": "user", "content": f"Say {wanted}."}], "wanted": wanted}
        for wanted in ("aeiou", "etaoin", "srdl", "xyz", "mnpw", "bcdf", "ghjk", "quvt")
    ]

    def steps(name: str, function: Any, rollout_func: Any) -> tuple[Any, list[Any]]:
        rewards = []

        def kept(**columns: Any) -> Any:
            rewards.append(function(**columns))
            return rewards[-1]

        run = train(
            server.url, kit.model_path(), kit.folder / name, num_steps=4, prompts=rows, reward=kept,
            rollout_func=rollout_func, generation_kwargs={"seed": 11}, num_generations=4,
            per_device_train_batch_size=8, max_completion_length=48, learning_rate=1e-3,
        )  # fmt: skip
        return run, rewards

    theirs, in_the_trainer = steps("trainer", letters, TRLRollouts(server.url))
    reload_first_weights(server.url, kit.model_path())
    rollouts = TRLRollouts(server.url, reward="letters")
    ours, of_the_server = steps("server", rollouts.graded, rollouts)
    assert ours.completions == theirs.completions
    assert of_the_server == in_the_trainer
    assert len({reward for step in in_the_trainer for reward in step}) > 4, in_the_trainer
    losses = [[logs["loss"] for logs in run.logs if "loss" in logs] for run in (theirs, ours)]
    assert losses[0] == losses[1], losses
    num = sum(map(len, of_the_server))
    return {"detail": f"4 steps: the same completions, {num} rewards and losses, whoever grades"}


def reload_first_weights(url: str, model_path: str) -> None:
    import httpx

    body = {"method": "reload_weights", "kwargs": {"weights_path": model_path}}
    httpx.post(f"{url}/collective_rpc", json=body, timeout=120).raise_for_status()

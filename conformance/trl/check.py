"""TRL 1.16 at our server: its client, GRPOTrainer, AsyncGRPO's worker, our rollout_func, and failures."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx

from conformance import gain
from conformance.checks import REAL_MODEL, Kit, Server, Stopped, check, main, metric, refusal
from conformance.recording import recording
from conformance.trl.agents import (  # noqa: F401 (checks, by their names here)
    a_rollout_func_beside_environment_factory_loses_its_mask,
    conversations_by_rollout_func_are_those_of_trl,
    environments_get_the_turns_of_stock_vllm,
    environments_race_by_rollout_func,
    spare_candidates_race_turn_by_turn,
)
from conformance.trl.async_agents import (  # noqa: F401
    async_environments_converse_one_by_one,
    async_environments_race_by_their_worker,
)
from conformance.trl.at_once import colocated_gain_of_many_prompts, gain_of_many_prompts  # noqa: F401
from conformance.trl.colocated import (  # noqa: F401
    colocated_as_trl_tests_its_own,
    colocated_rewards_are_graded_while_others_run,
    colocated_steps_are_those_of_stock,
    colocated_what_cannot_race_is_refused,
    colocated_with_spare_candidates,
)
from conformance.trl.graded import (  # noqa: F401 (checks, by their names here)
    an_endless_comparison_costs_one_reward,
    reward_functions_grade_as_they_are,
    rewards_by_the_server_are_those_of_the_trainer,
)
from conformance.trl.training import FLAGS, by_variety, next_sample, train

ALL_FLAGS = (*FLAGS, "--weight-transfer-config", '{"backend": "nccl"}', "--enable-scale-out")
"""Flags that TRL's documentation asks for to send weights, and for prompts with images."""
PROMPTS = ["The quick brown fox", "Once upon a time", "1 2 3 4", "To be or not to be"]
CHATS = [[{"role": "user", "content": f"What is {a} + {a + 3}?"}] for a in range(4, 12)]
LOG_DIFFERENCE = "sampling/sampling_logp_difference/mean"
SMALL = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 32, "learning_rate": 1e-3}
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"<\|im_start\|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*|$", "content": "text"}},
}
"""AsyncGRPO's template of an answer. TRL has templates for released models only."""
TRL_WAITS_S = 55.0
"""TRL's five retries begin 0, 4, 12, 28 and 60 s after a connection broke."""
PAIRS_S = 260.0
"""Seconds after which no further pair of steps begins."""


def ours(kit: Kit) -> Server:
    return kit.server(flags=ALL_FLAGS)


def stock(kit: Kit) -> Server:
    return kit.server("stock", flags=ALL_FLAGS)


def rounded(answer: Any) -> Any:
    """The answer with log probabilities rounded to five digits."""
    if isinstance(answer, float):
        return round(answer, 5)
    if isinstance(answer, dict):
        return {key: rounded(value) for key, value in answer.items()}
    return [rounded(one) for one in answer] if isinstance(answer, list) else answer


@check("unmodified")
def client_gets_what_stock_gives(kit: Kit) -> dict[str, Any]:
    """Every call of TRL's VLLMClient at both servers gives the same counts, tokens and log probabilities."""
    from trl.generation.vllm_client import VLLMClient

    def calls(client: VLLMClient) -> dict[str, Any]:
        ids = [[5, 6, 7, 8], [9, 10]]
        greedy, seeded = (
            {"temperature": 0.0, "max_tokens": 8},
            {"n": 4, "max_tokens": 8, "generation_kwargs": {"seed": 7}},
        )
        return {
            "text": client.generate(PROMPTS, **greedy),
            "ids": client.generate(ids, **seeded),
            "top": client.generate(ids, logprobs=3, n=2, max_tokens=4, generation_kwargs={"seed": 1}),
            "regex": client.generate(PROMPTS[:1], max_tokens=4, structured_outputs_regex="[0-9]{4}", logprobs=None),
            "chat": client.chat(CHATS[:2], **seeded),
            "teacher": client.get_sequence_logprobs([[5, 6, 7, 8, 9]], [2], top_logprobs=4),
            "world_size": client.get_world_size(),
            "max_model_len": client.get_server_info()["model_config"]["max_model_len"],
            "reset": client.reset_prefix_cache(),
        }

    theirs = rounded(calls(VLLMClient(base_url=stock(kit).url)))
    with kit.recording(ours(kit)) as recorder:
        mine = rounded(calls(VLLMClient(base_url=recorder.url)))
    different = [name for name in theirs if theirs[name] != mine[name]]
    assert different == [], f"{different}: {[(theirs[name], mine[name]) for name in different]}"
    assert len(mine["ids"]["completion_ids"]) == 8
    return {"detail": f"{len(theirs)} calls answered as by stock vLLM, tokens and log probabilities alike"}


@check("on")
def images_with_compat_trl(kit: Kit) -> dict[str, Any]:
    """Images go by /inference/v1/generate, where vLLM 0.32 names log probabilities otherwise than TRL 1.16 reads them.

    The model takes no images, so the call has none. With `--rollout-compat trl` tokens have both names.
    """
    from trl.generation.vllm_client import VLLMClient

    ids, call = [[5, 6, 7, 8], [9, 10]], {"n": 4, "max_tokens": 8, "logprobs": 2, "generation_kwargs": {"seed": 7}}
    with kit.recording(kit.server(flags=[*ALL_FLAGS, "--rollout-compat", "trl"])) as recorder:
        client = VLLMClient(base_url=recorder.url)
        by_features = client.generate(ids, features=[None, None], **call)
        by_completions = client.generate(ids, **call)
    assert by_features["completion_ids"] == by_completions["completion_ids"]
    assert len(by_features["completion_ids"]) == 8
    differences = [
        abs(dict(zip(tokens, values, strict=True))[token] - dict(zip(others, other_values, strict=True))[token])
        for generated, *rows in zip(
            by_features["completion_ids"],
            by_features["logprob_token_ids"],
            by_features["logprobs"],
            by_completions["logprob_token_ids"],
            by_completions["logprobs"],
            strict=True,
        )
        for token, tokens, values, others, other_values in zip(generated, *rows, strict=True)
    ]
    assert max(differences) < 0.01, max(differences)
    return {
        "detail": "8 completions with the tokens that /v1/completions gives, and log probabilities that TRL reads",
        "max_logprob_difference": max(differences),
    }


@check("stopped")
def weights_by_nccl(kit: Kit) -> None:
    """TRL's own transfer of weights, as far as it goes on this machine."""
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient(base_url=ours(kit).url)
    try:
        client.init_communicator(device="cpu")
    except NotImplementedError as error:
        raise Stopped(f"TRL's client: {error}") from error


@check("unmodified")
def grpo_steps_are_those_of_stock(kit: Kit) -> dict[str, Any]:
    """Seeded GRPOTrainer in server mode at both servers: the same completions in every step, with new weights each."""
    from trl.generation.vllm_client import VLLMClient

    def steps(server: Server, url: str) -> Any:
        prompts, kwargs = PROMPTS * 3, {"seed": 11}
        return train(
            url, kit.model_path(), kit.folder / server.name, prompts=prompts, generation_kwargs=kwargs, num_steps=3,
            reward=by_variety, **SMALL,
        )  # fmt: skip

    def score(url: str) -> list[list[list[float]]]:
        return VLLMClient(base_url=url).get_sequence_logprobs([list(range(3, 20))], [4], 2)["actual_logprobs"]

    theirs = steps(stock(kit), stock(kit).url)
    server = ours(kit)
    before = score(server.url)
    with recording(server.url) as recorder:
        mine = steps(server, recorder.url)
    kit.record([request for request in recorder.samples() if request["path"] != "/collective_rpc"])  # that is ours
    assert mine.completions == theirs.completions
    assert [len(completions) for completions in mine.completions] == [8, 8, 8]
    assert mine.num_syncs == 3
    assert score(server.url) != before, "the server's weights are what they were before the training"
    difference = mine.logs[2][LOG_DIFFERENCE]
    assert difference < 0.05, difference
    sent = [request["body"]["prompt"] for request in recorder.requests if request["path"] == "/v1/completions"]
    assert [len(prompts) for prompts in sent] == [2, 2, 2]
    return {
        "detail": "3 steps, 24 completions with the tokens of stock vLLM; weights go by disk (/collective_rpc "
        "reload_weights), and the server's log probabilities follow the trainer's",
        "sampling_logp_difference": difference,
    }


@check("on")
def grpo_with_pruning_by_rollout_func(kit: Kit) -> dict[str, Any]:
    """vllm_rollout.integrations.trl: groups by our client, and rewards posted to the server."""
    from vllm_rollout import RolloutClient
    from vllm_rollout.integrations.trl import TRLRollouts

    server = ours(kit)
    rollouts = TRLRollouts(
        server.url, redundancy=4, pruning={"detection_length": 8, "keep_ratio": 0.7, "min_labels": 4}
    )

    def ends_with_an_even_token(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        assert len(columns["rollout_id"]) == len(completion_ids)
        return [float(ids[-1] % 2 == 0) for ids in completion_ids]

    run = train(
        server.url,
        kit.model_path(),
        kit.folder / "rollout_func",
        num_steps=4,
        prompts=CHATS[:8],
        reward=rollouts.teaching(ends_with_an_even_token),
        rollout_func=rollouts,
        **SMALL,
    )
    assert [len(completions) for completions in run.completions] == [8] * 4
    assert run.generation_s == [], "TRL's own client has generated"
    accepted = [logs["rollout/rewards_accepted"] for logs in run.logs if "rollout/rewards_accepted" in logs]
    assert accepted == [8.0] * 4, run.logs
    with RolloutClient(server.url) as client:
        signals = client.report().signals
    assert sum(signal.num_positive + signal.num_negative for signal in signals.values()) > 0
    difference = run.logs[3][LOG_DIFFERENCE]
    assert difference < 0.05, difference
    return {"detail": f"4 steps, 32 completions, {sum(accepted):.0f} rewards posted and accepted"}


@check("unmodified")
def async_grpo_worker_and_client(kit: Kit) -> dict[str, Any]:
    """AsyncGRPO's rollout process, and the calls of its client that need no NCCL."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    server = ours(kit)
    tokenizer = AutoTokenizer.from_pretrained(kit.model_path())
    tokenizer.response_template = RESPONSE_TEMPLATE
    with kit.recording(server) as recorder:
        client = VLLMClient(recorder.url, server_timeout=60)
        client.wait_for_server_ready()
        assert client.get_max_model_len() == 2048
        assert client.get_dtype() == "torch.bfloat16"
        assert client.get_world_size() == 1
        worker = AsyncRolloutWorker(
            model_name=httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"],
            dataset=Dataset.from_list([{"prompt": chat} for chat in CHATS]),
            reward_funcs=[by_variety],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            num_generations=4,
            max_inflight_tasks=8,
            queue_maxsize=16,
            vllm_server_url=recorder.url,
            max_tokens=32,
        )
        worker.start()
        try:
            samples = [next_sample(worker) for _ in range(8)]
            client.pause()
            paused = httpx.get(f"{server.url}/is_paused").json()
            client.resume()
            worker.update_model_version(1)
            while samples[-1].model_version == 0:
                samples.append(next_sample(worker))
            worker.check_health(60)
        finally:
            worker.stop()
    assert paused == {"is_paused": True}, paused
    assert set(recorder.statuses) == {200}, recorder.statuses
    groups: dict[int, int] = {}
    for sample in samples[:8]:
        groups[sample.group_id] = groups.get(sample.group_id, 0) + 1
        assert 1 <= sample.completion_mask.sum() <= 32
    assert sorted(groups.values()) == [4, 4]
    return {
        "detail": f"{len(samples)} samples in groups of 4 out of its own process, paused and resumed between; it sends "
        "one request per sample and has no field for ours, so there is nothing to turn on"
    }


@check("stopped")
def async_grpo_weights_by_nccl(kit: Kit) -> None:
    """AsyncGRPO's weight transfer, as far as it goes on this machine."""
    from trl.experimental.async_grpo.vllm_client import VLLMClient
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

    info = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[1]]}
    try:
        WeightTransferClient(VLLMClient(ours(kit).url), info, weight_sync_timeout=20).init_weight_transfer()
    except RuntimeError as error:
        raise Stopped(f"TRL's client: {error} ({error.__cause__})"[:600]) from error


@check("unmodified")
def refusals_are_those_of_stock(kit: Kit) -> dict[str, Any]:
    """Too long a prompt is refused as by stock vLLM. TRL refuses a number of generations that does not divide."""
    from trl import GRPOConfig
    from trl.generation.vllm_client import VLLMClient

    said = []
    for server in (stock(kit), ours(kit)):
        client = VLLMClient(base_url=server.url)
        said.append(refusal(lambda client=client: client.generate([[5] * 3000, [5]], n=2, max_tokens=8)))
        assert len(client.generate([[5]], n=2, max_tokens=2)["completion_ids"]) == 2
    assert said[0] == said[1]
    assert "400" in said[1]
    batch = {"per_device_train_batch_size": 4, "num_generations": 3, "use_cpu": True, "bf16": False}
    odd = refusal(lambda: GRPOConfig(output_dir=str(kit.folder / "odd"), **batch))
    assert "divisible" in odd, odd
    return {"detail": f"prompt: {said[1][:200]}; generations, before anything is sent: {odd[:200]}"}


@check("on")
def too_many_candidates_are_refused(kit: Kit) -> dict[str, Any]:
    """num_generations + rollout_redundancy above --max-num-seqs is a 400 that names the field, not a hang."""
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient(base_url=ours(kit).url)
    xargs = {"vllm_xargs": {"rollout_redundancy": 60}}
    said = refusal(lambda: client.generate([[5]], n=8, generation_kwargs=xargs))
    assert "400" in said, said
    assert "rollout_redundancy" in said, said
    return {"detail": said[:300]}


@check("unmodified")
def server_restarts_amid_a_step(kit: Kit) -> dict[str, Any]:
    """SIGKILL while TRL waits for completions, then the same server anew: TRL's retries find it within a minute."""
    server = ours(kit)
    down_s: list[float] = []
    settings: dict[str, Any] = {"prompts": PROMPTS * 3, "reward": by_variety, **SMALL}

    def restart() -> None:
        deadline = time.monotonic() + 60
        while metric(server.url, "vllm:num_requests_running") == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        killed = time.monotonic()
        kit.kill(server)
        kit.restart(server)
        down_s.append(time.monotonic() - killed)

    thread = threading.Thread(target=restart)

    def before(trainer: Any) -> None:
        generate = trainer.vllm_generation.vllm_client.generate

        def disturbed(*args: Any, **kwargs: Any) -> Any:
            if trainer.state.global_step == 1 and not thread.ident:
                thread.start()
            return generate(*args, **kwargs)

        trainer.vllm_generation.vllm_client.generate = disturbed

    long = {**settings, "max_completion_length": 1000, "generation_kwargs": {"min_tokens": 900}}
    place, path = kit.folder / "restart", kit.model_path()
    gave_up = ""
    try:
        run = train(server.url, path, place / "first", num_steps=3, before=before, **long)
    except OSError as error:  # what `requests` raises
        gave_up = str(error)
    thread.join()
    if gave_up:
        assert down_s[0] > TRL_WAITS_S, gave_up
        run = train(server.url, path, place / "again", num_steps=1, **settings)
        after = "TRL gives up after a minute, and training ends; the new server serves the next run"
    else:
        after = (
            "TRL retries for a minute, and all completions are there. Until the next synchronization the new server "
            "has the weights that it was started with"
        )
    assert [len(completions) for completions in run.completions] == [8] * len(run.step_s)
    return {"detail": f"killed in step 2 of 3, back after {down_s[0]:.0f} s: {after}", "down_s": down_s[0]}


@check("on")
def grpo_with_spare_candidates(kit: Kit) -> dict[str, Any]:
    """generation_kwargs={"vllm_xargs": {"rollout_redundancy": 8}}: seconds of generation and step, with and without.

    Steps come in pairs with the same prompt, one with spare candidates and one without. The order alternates, and the
    first pair warms up.
    """
    from transformers import TrainerCallback

    spare = {"vllm_xargs": {"rollout_redundancy": gain.REDUNDANCY}}
    turns = list(gain.turns())
    server = kit.server(model=REAL_MODEL, flags=FLAGS)
    deadline = time.monotonic() + PAIRS_S
    of: list[Any] = []

    class Switch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            of[0].vllm_generation.generation_kwargs = spare if turns[state.global_step][1] else {}

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step % 2 == 0 and time.monotonic() > deadline

    run = train(
        server.url,
        kit.model_path(REAL_MODEL),
        kit.folder / "spare",
        num_steps=len(turns),
        prompts=[[{"role": "user", "content": gain.QUESTIONS[pair]}] for pair, _ in turns],
        reward=by_variety,
        callbacks=[Switch()],
        before=of.append,
        num_generations=gain.GROUP_SIZE,
        per_device_train_batch_size=gain.GROUP_SIZE,
        max_completion_length=gain.MAX_TOKENS,
        learning_rate=1e-6,
    )
    assert [len(completions) for completions in run.completions] == [gain.GROUP_SIZE] * len(run.step_s)
    wasted = metric(server.url, 'vllm_rollout:tokens_total{kind="wasted"')
    assert wasted > 0
    numbers: dict[str, Any] = {"wasted_tokens": wasted}
    for what, seconds in (("generation", run.generation_s), ("step", run.step_s)):
        on, off = ([s for s, (_, is_on) in zip(seconds, turns, strict=False) if is_on == state] for state in (1, 0))
        numbers |= gain.gain(what, on, off)
    return {"detail": gain.words(numbers), **numbers}


if __name__ == "__main__":
    main()

"""OpenRLHF 0.11 in its own Ray actors, with `create_vllm_engines` and `SamplesGenerator.generate_samples` as they are.

It runs on a CPU whose GPU is a number in Ray. OpenRLHF's trainer (DeepSpeed, FlashAttention) needs a real GPU.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from conformance import gain
from conformance.checks import CAP, REAL_MODEL, Kit, Stopped, assert_raced, check, main
from conformance.in_process import assert_best, by_environment, ray_cluster, replaced, summary, watch

PROMPTS = ["The quick brown fox", "Once upon a time"]
NUM_SAMPLES = 4
LONG = {"temperature": 1.0, "max_new_tokens": CAP, "max_len": 2000}


class Rollouts:
    """OpenRLHF's engines and its generator of samples."""

    def __init__(self, kit: Kit, model: str | None, num_samples: int, max_model_len: int) -> None:
        from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
        from openrlhf.trainer.ray.vllm_engine import create_vllm_engines
        from transformers import AutoTokenizer

        path = kit.model_path(model)
        self.engines = create_vllm_engines(
            num_engines=1, tensor_parallel_size=1, pretrain=path, seed=1, full_determinism=False,
            enable_prefix_caching=True, enforce_eager=True, max_model_len=max_model_len, gpu_memory_utilization=0.5,
            logprobs_mode="processed_logprobs",
        )  # fmt: skip
        self._args = SimpleNamespace(
            vllm=SimpleNamespace(enable_sleep=False),
            rollout=SimpleNamespace(batch_size=len(PROMPTS), n_samples_per_prompt=num_samples),
            algo=SimpleNamespace(
                dynamic_filtering_enable=False, advantage=SimpleNamespace(is_correction_level="token")
            ),
        )
        self._generator = SamplesGenerator
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    def samples(self, prompts: Sequence[str] = PROMPTS, **kwargs: Any) -> list[Any]:
        """One batch of the trainer, sorted by prompt. OpenRLHF returns prompts in the order in which they end."""
        self._args.rollout.batch_size = len(prompts)
        batch = [("", prompts, [""] * len(prompts), [None] * len(prompts))]
        generator = self._generator(SimpleNamespace(args=self._args), batch, None, self.tokenizer, self.engines)
        experiences, _, _, _ = generator.generate_samples(**kwargs)
        return sorted(experiences, key=lambda experience: (experience.prompts[0], experience.sequences[0].tolist()))

    def joined_responses(self) -> list[Any]:
        """Responses of requests that join a group by their fields, as a custom agent executor may set them."""
        import ray
        from vllm import SamplingParams

        fields = {"rollout_group_size": NUM_SAMPLES, "rollout_num_candidates": 2 * NUM_SAMPLES}
        params = SamplingParams(temperature=1.0, max_tokens=CAP, extra_args=fields)
        return ray.get(
            self.engines[0].generate_responses.remote(
                prompt=PROMPTS[0], label="", sampling_params=params, max_length=2000,
                hf_tokenizer=self.tokenizer, num_samples=2 * NUM_SAMPLES,
            )
        )  # fmt: skip

    def call(self, function: Any) -> Any:
        import ray

        return ray.get(self.engines[0].__ray_call__.remote(function))


@contextmanager
def rollouts(
    kit: Kit,
    redundancy: int | None,
    model: str | None = None,
    num_samples: int = NUM_SAMPLES,
    max_model_len: int = 2048,
) -> Iterator[Rollouts]:
    """OpenRLHF's own actor class if `redundancy` is None, otherwise ours with that many spare candidates."""
    from openrlhf.trainer.ray import vllm_engine

    from vllm_rollout.integrations.openrlhf import use_in_actors

    with replaced(vllm_engine, "RolloutRayActor"), ray_cluster(num_gpus=2):
        if redundancy is not None:
            use_in_actors(num_samples, redundancy)
        trainer = Rollouts(kit, model, num_samples, max_model_len)
        trainer.call(lambda actor: watch(actor.llm))
        yield trainer


def sequences(experiences: list[Any]) -> list[list[int]]:
    return [experience.sequences[0].tolist() for experience in experiences]


def scheduler_of(trainer: Rollouts) -> str:
    return str(trainer.call(lambda actor: actor.llm.vllm_config.scheduler_config.scheduler_cls))


@check("unmodified")
def samples_are_those_of_the_stock_scheduler(kit: Kit) -> dict[str, Any]:
    """With our scheduler and no spare candidates, greedy samples have the same tokens and log probabilities."""
    import torch

    greedy = {"temperature": 0.0, "max_new_tokens": 48, "max_len": 512}
    with rollouts(kit, None) as trainer:
        stock, theirs = trainer.samples(**greedy), scheduler_of(trainer)
    with rollouts(kit, 0) as trainer:
        ours, scheduler = trainer.samples(**greedy), scheduler_of(trainer)
    assert "vllm_rollout" in scheduler
    assert "vllm_rollout" not in theirs
    assert len(ours) == len(PROMPTS) * NUM_SAMPLES
    assert sequences(ours) == sequences(stock)
    pairs = zip(ours, stock, strict=True)
    difference = max((a.rollout_log_probs - b.rollout_log_probs).abs().max().item() for a, b in pairs)
    assert torch.isfinite(torch.tensor(difference))
    assert difference < 1e-3
    return {"detail": f"{len(ours)} samples, the same tokens; log probabilities differ by {difference:.1e} at most"}


@check("on")
def as_many_finished_responses_as_asked_for(kit: Kit) -> dict[str, Any]:
    """With four spare candidates per prompt, the trainer gets four finished responses, and no loser runs on."""
    measured = {}
    for name, redundancy in (("stock", None), ("on", NUM_SAMPLES)):
        with rollouts(kit, redundancy) as trainer:
            trainer.samples(**{**LONG, "max_new_tokens": 8})  # warm
            trainer.call(lambda actor: actor.llm.seen.clear())
            started = time.monotonic()
            experiences = trainer.samples(**LONG)
            seconds = time.monotonic() - started
            seen = trainer.call(lambda actor: actor.llm.seen)
        assert len(experiences) == len(PROMPTS) * NUM_SAMPLES
        prompts = [experience.prompts[0] for experience in experiences]
        assert [prompts.count(prompt) for prompt in PROMPTS] == [NUM_SAMPLES] * len(PROMPTS)
        lengths = [int(experience.response_length.item()) for experience in experiences]
        for prompt in PROMPTS:
            ids = trainer.tokenizer.encode(prompt, add_special_tokens=False)
            of_prompt = [length for length, of in zip(lengths, prompts, strict=True) if of == prompt]
            assert_best([row for row in seen if row["prompt"] == ids], of_prompt)
        measured[name] = {
            **summary(seen, lambda row: row["end"] in ("stop", "length")),
            "longest": max(lengths),
            "truncated": sum(bool(experience.truncated.item()) for experience in experiences),
            "seconds": round(seconds, 2),
        }
    stock, on = measured["stock"], measured["on"]
    assert stock["requests"] == stock["ended"] == len(PROMPTS) * NUM_SAMPLES
    assert on["requests"] == 2 * len(PROMPTS) * NUM_SAMPLES
    assert on["ended"] >= len(PROMPTS) * NUM_SAMPLES
    return {
        "detail": f"{NUM_SAMPLES} of {2 * NUM_SAMPLES} per prompt: the longest response has {on['longest']} tokens "
        f"(stock {stock['longest']}), {on['seconds']} s (stock {stock['seconds']} s); {on['truncated']} are cut at "
        f"{CAP} tokens (stock {stock['truncated']})",
        **measured,
    }


@check("on")
def gain_of_spare_candidates(kit: Kit) -> dict[str, Any]:
    """OpenRLHF's own actor and ours, alternating, on a real model."""
    sampling = {"temperature": 1.0, "max_new_tokens": gain.MAX_TOKENS, "max_len": 512}
    sizes = {"model": REAL_MODEL, "num_samples": gain.GROUP_SIZE}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with rollouts(kit, None, **sizes) as stock, rollouts(kit, gain.REDUNDANCY, **sizes) as on:
        for pair, is_on in gain.turns():
            started = time.monotonic()
            experiences = (on if is_on else stock).samples([gain.chat(gain.QUESTIONS[pair])], **sampling)
            seconds[is_on].append(time.monotonic() - started)
            assert len(experiences) == gain.GROUP_SIZE
    numbers = gain.gain("generation", seconds[True], seconds[False])
    return {"detail": gain.words(numbers), **numbers}


@check("on")
def gain_of_many_prompts(kit: Kit) -> dict[str, Any]:
    """As many prompts at once as a step has, on an emulated device: `gain.AtOnce`."""
    sampling = {"temperature": 1.0, "max_new_tokens": gain.AT_ONCE_TOKENS, "max_len": gain.AT_ONCE_LENGTH}
    sizes = {"num_samples": gain.GROUP_SIZE, "max_model_len": gain.AT_ONCE_LENGTH}
    prompts = [f"What is {number} + 7?" for number in range(len(gain.AT_ONCE_PROMPTS))]
    times = gain.AtOnce()
    with (
        by_environment(device=gain.DEVICE),
        rollouts(kit, None, **sizes) as plain,
        rollouts(kit, gain.REDUNDANCY, **sizes) as on,
    ):
        trainers = {"plain": plain, "spares": on}
        for arm in times.turns(tuple(trainers)):
            with times.timed("generation", arm):
                experiences = trainers[arm].samples(prompts, **sampling)
            assert len(experiences) == gain.GROUP_SIZE * len(prompts)
    return times.result()


@check("on")
def without_spares_losers_look_finished(kit: Kit) -> dict[str, Any]:
    """With fields alone, as a custom agent executor may set them, requests race, and losers are returned too."""
    with rollouts(kit, 0) as trainer:
        responses = trainer.joined_responses()
        seen = trainer.call(lambda actor: actor.llm.seen)
    ends = [row["end"] for row in seen]
    assert_raced(ends, NUM_SAMPLES)
    num_surplus = [row["reason"] for row in seen].count("surplus")
    assert num_surplus == ends.count("abort") > 0
    assert len(responses) == 2 * NUM_SAMPLES
    assert "finish_reason" not in responses[0]
    assert sum(bool(response["truncated"]) for response in responses) == ends.count("length")
    return (
        f"{num_surplus} of {2 * NUM_SAMPLES} ended as surplus, joined by their prompt; "
        "`SingleTurnAgentExecutor.execute` drops why a response ended, so that the trainer would train on them: use "
        "the integration"
    )


@check("on")
def engines_are_ours_by_the_environment(kit: Kit) -> dict[str, Any]:
    """With VLLM_ROLLOUT and OpenRLHF's own actor, greedy samples are the same, and requests with fields race."""
    greedy = {"temperature": 0.0, "max_new_tokens": 48, "max_len": 512}
    with rollouts(kit, None) as trainer:
        stock = trainer.samples(**greedy)
    with by_environment(), rollouts(kit, None) as trainer:
        ours, scheduler = trainer.samples(**greedy), scheduler_of(trainer)
        trainer.call(lambda actor: actor.llm.seen.clear())
        trainer.joined_responses()
        ends = [row["end"] for row in trainer.call(lambda actor: actor.llm.seen)]
    assert "vllm_rollout" in scheduler
    assert sequences(ours) == sequences(stock)
    assert_raced(ends, NUM_SAMPLES)
    return {"detail": f"{len(ours)} greedy samples, the same tokens; {ends.count('abort')} of {len(ends)} were stopped"}


@check("stopped")
def trainer_itself(kit: Kit) -> None:
    try:
        importlib.import_module("openrlhf.cli.train_ppo_ray")
    except ImportError as error:
        raise Stopped(
            f"openrlhf.cli.train_ppo_ray: {error}; FlashAttention is built for CUDA, and DeepSpeed trains on it"
        ) from error


if __name__ == "__main__":
    main()

"""Groups in one in-process engine that vLLM builds itself, as JSON: `one_engine.py {all,race} MODEL`.

As in a trainer's own process: `vllm.LLM` with our scheduler and worker as arguments, no plugin, no client of ours.
In-process scheduling (no arrival times) makes batches the same each time, and all that is sent at once begins in one
step. The runner is V1, or V2 when VLLM_USE_V2_MODEL_RUNNER=1 (see v2_on_cpu). V2 only races."""

import json
import os
import sys
from statistics import fmean, pstdev

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1", TORCH_COMPILE_DISABLE="1", VLLM_PLUGINS="",
)  # fmt: skip

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from tests.parts.pruning.steps import group_terms, judge_of, said
from tests.parts.rounds.steps import races_of
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import CandidateTag, EndingNote
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, HeadKey, PruningPlan
from vllm_rollout.parts.pruning.worker.feature_ring import StateKey
from vllm_rollout.parts.pruning.worker.quality_head import HeadWeights
from vllm_rollout.parts.pruning.worker.scorer import PublishedHead
from vllm_rollout.parts.rounds.rules.race import RacePlace
from vllm_rollout.parts.rounds.rules.step import LOST, PLACE

SETTINGS = {"max_model_len": 512, "enforce_eager": True, "dtype": "float32", "block_size": 32, "max_logprobs": -1}
OURS = {
    "scheduler_cls": "vllm_rollout.Scheduler", "worker_cls": "vllm_rollout.Worker",
    "worker_extension_cls": "trainer_extension.TrainerExtension",
}  # fmt: skip
WIDE = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
NUM_PROMPTS = 26
NUM_GROUPS, NUM_CANDIDATES, GROUP_SIZE = 2, 4, 2
LENGTHS = (5, 9, 14, 20)
"""Output lengths, forced by max_tokens; a candidate that is cut counts when nothing better is left."""
DETECTION_LENGTH = 7
TRIAL_LENGTH = 11
HEAD_VERSION = 3
LAST_TOKEN = 6
ROUNDS = {
    "clear": [[5, 9, 60], [12, 7, 60], [20, 25, 60], [14, 60, 60]],
    "tie": [[5, 9, 60], [60, 12, 12], [12, 11, 60], [60, 60, 60]],
}
"""Lengths of the candidates of each group of a round that wants two. In the tie the second and the third complete with
step 12: the longest trajectory has 12 tokens in both, and the second has the lower position."""


def main(which: str, model: str) -> None:
    result = {}
    if which == "all":
        stock = LLM(model, **SETTINGS, **WIDE)
        result["stock"] = mixed_batch(stock)
        del stock
        cleanup_dist_env_and_memory()
    llm = LLM(model, **SETTINGS, **OURS, **(WIDE if which == "all" else {"max_num_seqs": 8}))
    if which == "all":
        result["untagged"] = mixed_batch(llm)
        llm.reset_prefix_cache()  # the comparison is with a cold engine: cached prefixes round differently
        result |= {"tagged": mixed_batch(llm, in_groups=True), "rounds": rounds(llm)}
    result |= races(llm, model)
    if which == "all":
        result["plain"] = plain_requests(llm)
    print("RESULT " + json.dumps(result))


def generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def ends_after(num_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(
        temperature=1, seed=num_tokens, min_tokens=num_tokens - 1, max_tokens=100, stop_token_ids=[LAST_TOKEN],
        logit_bias={LAST_TOKEN: 100}, extra_args=fields or None,
    )  # fmt: skip


def mixed_batch(llm: LLM, in_groups: bool = False) -> list[list]:
    """208 requests: greedy and seeded, with logprobs, penalties, top-k, top-p, stop strings, short and long prompts.
    `in_groups` of eight their race never fires: redundancy 0."""
    prompts, params = [], []
    for i in range(NUM_PROMPTS):
        common = {"max_tokens": 16 + i % 24}
        if in_groups:
            terms = GroupTerms(8, 8)
        for index, sampling in enumerate((
            {"temperature": 0}, {"temperature": 0, "logprobs": 2}, {"temperature": 0, "repetition_penalty": 1.2},
            {"temperature": 1, "seed": i}, {"temperature": 1, "seed": i, "logprobs": 0},
            {"temperature": 0.7, "top_k": 20, "seed": 1000 + i}, {"temperature": 0.7, "top_p": 0.9, "seed": 2000 + i},
            {"temperature": 1, "seed": 3000 + i, "stop": ["e"]},
        )):  # fmt: skip
            tag = {"extra_args": CandidateTag(f"group-{i}", index, terms, 16).to_extra_args()} if in_groups else {}
            prompts.append([3 + (i * 7 + j * j) % 500 for j in range(5 + (i % 5) * 60)])
            params.append(SamplingParams(**common, **sampling, **tag))
    choices = [output.outputs[0] for output in generate(llm, prompts, params)]
    return [[list(c.token_ids), c.text, c.finish_reason, _logprobs(c)] for c in choices]


def _logprobs(choice) -> list | None:
    if choice.logprobs is None:
        return None
    return [{token: round(entry.logprob, 4) for token, entry in position.items()} for position in choice.logprobs]


def rounds(llm: LLM) -> dict:
    """Groups that race against each other: state, length and whether its group lost, of every candidate."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    result = {"scheduler": type(scheduler).__name__}
    for name, groups in ROUNDS.items():
        prompts, params = [], []
        for position, lengths in enumerate(groups):
            place = RacePlace(name, 2, position)
            for index, length in enumerate(lengths):
                tag = CandidateTag(
                    f"{name}-{position}", index, GroupTerms(GROUP_SIZE, len(lengths)), 8, PLACE.value(place)
                )
                prompts.append([3 + position, 4, 5, 6, 7])
                params.append(ends_after(length, **tag.to_extra_args()))
        rows = []
        for output in generate(llm, prompts, params):
            note, _ = EndingNote.take(output.kv_transfer_params)
            rows.append([note.state, len(output.outputs[0].token_ids), bool(LOST.of(note.parts))])
        races_of(scheduler.group_steps).forget(name)
        result[name] = [rows[start : start + 3] for start in range(0, len(rows), 3)]
        held = scheduler.group_steps.group_counts
        result[f"{name}_left"] = [held.num_running, held.num_idle, len(races_of(scheduler))]
    return result


def races(llm: LLM, model: str) -> dict:
    """Every group is raced twice: once whole (no early stop) and once to its second finisher, with the same seeds. A
    third time its candidates are scored by a given quality head, and what the runner showed is set beside what the
    model computes in transformers."""
    runner = llm.llm_engine.collective_rpc(_runner_of)[0]
    result = {"runner": runner, "group_size": GROUP_SIZE, "lengths": LENGTHS}
    result["extension"] = llm.collective_rpc("trainer_rank")
    result |= {"whole": race(llm, "whole", False)[0], "raced": race(llm, "raced", True)[0]}
    llm.llm_engine.collective_rpc(_publish_head)
    plan = PruningPlan(DETECTION_LENGTH, mode="shadow", trial_lengths=(TRIAL_LENGTH,), final_score=True)
    result["scored"], confidences = race(llm, "scored", False, plan)
    result["detection_lengths"] = plan.scored_lengths
    return {**result, "shown": shown(llm, model, result["scored"], confidences)}


def race(
    llm: LLM, name: str, early_stop: bool, plan: PruningPlan | None = None, *, temperature: float = 1
) -> tuple[list[list], list[list[float]]]:
    """Candidates as [state, tokens, finish reason, confidence, expected confidence], and the confidence of each token,
    from what vLLM itself returns: minus the mean log probability over the whole vocabulary."""
    prompts, params = [], []
    for group in range(NUM_GROUPS):
        for index in range(NUM_CANDIDATES):
            terms = group_terms(GROUP_SIZE, NUM_CANDIDATES, early_stop, pruning=plan)
            scoring = plan and Scoring("rollout", f"prompt-{group}", 0)
            tag = CandidateTag(f"{name}-{group}", index, terms, 8, said(scoring))
            prompts.append([3 + group, 4, 5, 6, 7])
            params.append(
                SamplingParams(
                    temperature=temperature, seed=10 * group + index, ignore_eos=True, logprobs=-1,
                    max_tokens=LENGTHS[(index + group) % NUM_CANDIDATES], extra_args=tag.to_extra_args(),
                )
            )  # fmt: skip
    rows, confidences = [], []
    for output in generate(llm, prompts, params):
        note, _ = EndingNote.take(output.kv_transfer_params)
        choice = output.outputs[0]
        values = [-fmean(entry.logprob for entry in position.values()) for position in choice.logprobs]
        expected = [fmean(values), pstdev(values)]
        rows.append([note.state, list(choice.token_ids), choice.finish_reason, note.confidence, expected])
        confidences.append(values)
    return rows, confidences


def plain_requests(llm: LLM) -> dict:
    """Requests with our fields, as a trainer sends them: [tokens, finish reason, stop reason] of every choice."""
    lengths = (6, 9, 40, 50)
    join = {"rollout_group_id": "q", "rollout_group_size": 2, "rollout_num_candidates": 4}
    prune = {"rollout_detection_length": 4, "rollout_pruning_mode": "shadow"}
    by_prompt = {"rollout_group_size": 2, "rollout_num_candidates": 4}

    def ends(prompt: list[int], params: list[SamplingParams]) -> list[list[list]]:
        outputs = generate(llm, [prompt] * len(params), params)
        return [[[len(c.token_ids), c.finish_reason, c.stop_reason] for c in output.outputs] for output in outputs]

    # n children of one request join as well: vLLM gives each of them the request's extra_args.
    several = ends_after(30, **join)
    several.n = 4
    return {
        "plain": ends([9, 10], [ends_after(12)]),
        "joined": ends([3, 4, 5], [ends_after(length, **join) for length in lengths]),
        "by_prompt": ends([6, 7, 8], [ends_after(length, **by_prompt) for length in lengths]),
        "scored": ends([30, 31], [ends_after(length, **join, **prune) for length in lengths]),
        "refused": ends([40, 41], [ends_after(8, rollout_redundancy=4)]),
        "n": ends([50, 51], [several]),
    }


def shown(llm: LLM, model: str, rows: list[list], confidences: list[list[float]]) -> list:
    """Per candidate, by detection length: what the runner showed beside what it should have; "0" is the end."""
    entries = judge_of(llm.llm_engine.engine_core.engine_core.scheduler).ledger._rollouts["rollout"]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    compared = []
    for number, (_, tokens, *_) in enumerate(rows):
        group, index = divmod(number, NUM_CANDIDATES)
        entry = entries[f"prompt-{group}", index]
        seen = {length: trial.observation for length, trial in entry.trials.items()}
        if entry.observation is not None:
            seen[DETECTION_LENGTH] = entry.observation
        compared.append({})
        for length, observation in seen.items():
            num_tokens = length or len(tokens)
            key = StateKey(entry.request_id, num_tokens, at_end=length == WHOLE)
            (answer,) = llm.collective_rpc("rollout_take_features", args=([key],))
            features = torch.frombuffer(bytearray(answer[0].data), dtype=torch.float32)
            prompt = [3 + group, 4, 5, 6, 7]
            with torch.no_grad():
                hidden = reference.model(torch.tensor([prompt + tokens[: num_tokens - 1]])).last_hidden_state[0, -1]
            w1, b1, w2, b2 = _head(len(features))
            compared[-1][length] = {
                "hidden_error": ((features - hidden).norm() / hidden.norm()).item(),
                "logit": [observation.logit, (torch.relu(hidden @ w1.T + b1) @ w2 + b2).item()],
                "mean": [observation.confidence.mean, fmean(confidences[number][:num_tokens])],
                "head_version": observation.head_version,
            }
    return compared


def _head(hidden_size: int) -> HeadWeights:
    generator = torch.Generator().manual_seed(5)
    shapes = (128, hidden_size), (128,), (128,), (1,)
    return HeadWeights(*(torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes))


def _publish_head(worker) -> None:
    hidden_size = worker.model_config.get_hidden_size()
    heads = worker.quality_heads.scorer.heads
    for length in (DETECTION_LENGTH, TRIAL_LENGTH, WHOLE):
        heads[HeadKey(length)] = PublishedHead(HEAD_VERSION, _head(hidden_size))


def _runner_of(worker) -> list[str]:
    return [cls.__name__ + "@" + cls.__module__ for cls in type(worker.model_runner).__mro__]


if __name__ == "__main__":
    main(*sys.argv[1:])

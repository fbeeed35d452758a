"""Effects of drafts in one in-process engine that verifies all drafts, as JSON: `drafting_engine.py MODEL`.

Only the number of steps should change. Beside each answer is the same engine's answer without drafts, or the answer of
the model in transformers."""

import json
import sys
from collections import Counter
from itertools import product
from typing import Any

import torch
from one_engine import (  # first, since it sets what vLLM reads when it is imported
    DETECTION_LENGTH,
    OURS,
    SETTINGS,
    WIDE,
    _logprobs,
    _publish_head,
    generate,
    race,
    shown,
)
from transformers import AutoModelForCausalLM
from transformers.generation import logits_process
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.drafts.options import SPECULATIVE_CONFIG
from vllm_rollout.parts.drafts.rules import MAX_DRAFT_TOKENS, Choice, DraftingRule
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan

ALLOWED = (10, 11, 12)
NUM_DRAWN = 4
NUM_DRAWS = 1024
PROMPT = [3, 4, 10, 6, 7]
KINDS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 1.7": {"temperature": 1.7},
    "top_k": {"top_k": 2},
    "top_p": {"temperature": 1.7, "top_p": 0.8},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 1.5},
}
"""Kinds of sampling. Each batch has requests of all kinds, which are drafts for each other."""


class Every(DraftingRule):
    """Verifies every draft."""

    def __init__(self) -> None:
        super().__init__()
        self.num_drafted = self.num_accepted = 0

    def longest(self, num_rows: int) -> int:
        return MAX_DRAFT_TOKENS

    def choose(self, num_rows: int, num_drafts: list[int]) -> Choice:
        return Choice(0, sum(num_drafts))

    def verified(self, num_drafts: list[int], num_accepted: list[int]) -> None:
        self.num_drafted += sum(num_drafts)
        self.num_accepted += sum(num_accepted)


def verify_all(worker: Any) -> None:
    worker.model_runner.drafter.rule = Every()


def verified(worker: Any) -> list[int]:
    rule = worker.model_runner.drafter.rule
    worker.model_runner.drafter.rule = Every()
    return [rule.num_drafted, rule.num_accepted]


def main(model: str) -> None:
    result: dict[str, Any] = {}
    llm = LLM(model, **SETTINGS, **OURS, **WIDE)
    result["without"] = greedy(llm)
    del llm
    cleanup_dist_env_and_memory()
    llm = LLM(model, **SETTINGS, **OURS, **WIDE, speculative_config=SPECULATIVE_CONFIG)
    llm.llm_engine.collective_rpc(verify_all)
    alone = generate(llm, [PROMPT], [SamplingParams(top_k=2, max_tokens=4, ignore_eos=True)])
    result["alone"] = len(alone[0].outputs[0].token_ids)
    result["first"] = greedy(llm)
    result["with"] = greedy(llm)  # now there are earlier answers
    result["of_greedy"] = llm.llm_engine.collective_rpc(verified)[0]
    result["whole"] = race(llm, "whole", False, temperature=0)[0]
    llm.llm_engine.collective_rpc(_publish_head)
    plan = PruningPlan(DETECTION_LENGTH, mode="shadow", final_score=True)
    result["scored"], confidences = race(llm, "scored", False, plan, temperature=0)
    result["shown"] = shown(llm, model, result["scored"], confidences)
    result["of_scored"] = llm.llm_engine.collective_rpc(verified)[0]
    result["drawn"], result["expected"] = draws(llm), {kind: probabilities(model, **KINDS[kind]) for kind in KINDS}
    result["of_draws"] = llm.llm_engine.collective_rpc(verified)[0]
    print("RESULT " + json.dumps(result))


def greedy(llm: LLM) -> list[list]:
    """Groups of three: the same greedy answer with another length each, and one that a string stops."""
    prompts, params = [], []
    for group in range(12):
        for index in range(4):
            tag = CandidateTag(f"greedy-{group}", index, GroupTerms(4, 4), 16)
            prompts.append([3 + (group * 7 + j * j) % 500 for j in range(5 + group % 5 * 30)])
            params.append(
                SamplingParams(
                    temperature=0, max_tokens=20 + 7 * index, logprobs=1, stop=["e", "s"] if index == 3 else None,
                    repetition_penalty=1.2 if group % 3 == 2 else 1.0, extra_args=tag.to_extra_args(),
                )
            )  # fmt: skip
    choices = [output.outputs[0] for output in generate(llm, prompts, params)]
    return [[list(c.token_ids), c.text, c.finish_reason, _logprobs(c)] for c in choices]


def draws(llm: LLM) -> dict[str, list[int]]:
    """Counts of each sequence of allowed tokens, in the order of `product`, for each kind of sampling."""
    wanted = [(number, kind) for number in range(NUM_DRAWS) for kind in KINDS]
    params = []
    for seed, (number, kind) in enumerate(wanted):
        tag = CandidateTag(f"draws-{kind}-{number // 64}", number % 64, GroupTerms(64, 64), 16)
        params.append(
            SamplingParams(
                seed=seed, max_tokens=NUM_DRAWN, allowed_token_ids=list(ALLOWED), ignore_eos=True,
                extra_args=tag.to_extra_args(), **KINDS[kind],
            )
        )  # fmt: skip
    outputs = generate(llm, [PROMPT] * len(params), params)
    counts = Counter((kind, *its.outputs[0].token_ids) for (_, kind), its in zip(wanted, outputs, strict=True))
    return {kind: [counts[kind, *drawn] for drawn in product(ALLOWED, repeat=NUM_DRAWN)] for kind in KINDS}


def probabilities(
    model: str,
    temperature: float = 1.0,
    top_k: int = len(ALLOWED),
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
) -> list[float]:
    """Probability of each sequence, by transformers."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    processors = [
        logits_process.RepetitionPenaltyLogitsProcessor(repetition_penalty),
        lambda known, scores: scores.scatter_add(
            1, known[:, len(PROMPT) :], torch.full((len(known), known.shape[1] - len(PROMPT)), -frequency_penalty)
        ),
        logits_process.TemperatureLogitsWarper(temperature),
        logits_process.TopKLogitsWarper(top_k),
        logits_process.TopPLogitsWarper(top_p),
    ]
    tokens = torch.tensor([[*PROMPT, *sequence] for sequence in product(ALLOWED, repeat=NUM_DRAWN)])
    with torch.no_grad():
        logits = reference(tokens).logits
    of_sequence = torch.ones(len(tokens))
    for end in range(len(PROMPT), tokens.shape[1]):
        scores = torch.full_like(logits[:, end - 1], -torch.inf)
        scores[:, ALLOWED] = logits[:, end - 1, ALLOWED]
        for processor in processors:
            scores = processor(tokens[:, :end], scores)
        of_sequence *= scores.softmax(dim=-1).gather(1, tokens[:, end, None])[:, 0]
    return of_sequence.tolist()


if __name__ == "__main__":
    main(*sys.argv[1:])

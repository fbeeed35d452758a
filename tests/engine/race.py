"""Race groups on one in-process engine and print how each candidate ended, as JSON: `race.py MODEL`.

The runner is V1, or V2 when VLLM_USE_V2_MODEL_RUNNER=1 (see v2_on_cpu). Every group is raced twice: once whole (no
early stop) and once to its second finisher, with the same seeds. A third time its candidates are scored by a given
quality head, and what the runner showed is set beside what the model computes in transformers.
"""

import json
import os
import sys
from statistics import fmean, pstdev

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    TORCH_COMPILE_DISABLE="1",
)  # fmt: skip

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from vllm_rollout.adapter.names import SCHEDULER_CLS, WORKER_CLS
from vllm_rollout.adapter.wire import CandidateTag, EndingNote
from vllm_rollout.group.judging.ledger import Scoring
from vllm_rollout.group.plans.plan import PruningPlan
from vllm_rollout.group.plans.terms import GroupTerms
from vllm_rollout.group.types import WHOLE, HeadKey
from vllm_rollout.tracker.feature_ring import StateKey
from vllm_rollout.tracker.quality_head import HeadWeights
from vllm_rollout.tracker.tracker import PublishedHead

NUM_GROUPS = 2
NUM_CANDIDATES = 4
GROUP_SIZE = 2
LENGTHS = (5, 9, 14, 20)
"""Output lengths, forced by max_tokens; a candidate that is cut counts when nothing better is left."""
DETECTION_LENGTH = 7
TRIAL_LENGTH = 11
HEAD_VERSION = 3


def main(model: str) -> None:
    llm = LLM(
        model, max_model_len=128, enforce_eager=True, dtype="float32", block_size=32, max_num_seqs=8, max_logprobs=-1,
        scheduler_cls=SCHEDULER_CLS, worker_cls=WORKER_CLS, worker_extension_cls="trainer_extension.TrainerExtension",
    )  # fmt: skip

    def race(name: str, early_stop: bool, plan: PruningPlan | None = None) -> list[list]:
        prompts, params = [], []
        for group in range(NUM_GROUPS):
            for index in range(NUM_CANDIDATES):
                terms = GroupTerms(GROUP_SIZE, NUM_CANDIDATES, early_stop, pruning=plan)
                scoring = plan and Scoring("rollout", f"prompt-{group}", 0)
                tag = CandidateTag(f"{name}-{group}", index, terms, 8, scoring)
                stop_at = LENGTHS[(index + group) % NUM_CANDIDATES]
                prompts.append({"prompt_token_ids": [3 + group, 4, 5, 6, 7]})
                params.append(
                    SamplingParams(
                        temperature=1,
                        seed=10 * group + index,
                        max_tokens=stop_at,
                        ignore_eos=True,
                        logprobs=-1,
                        extra_args=tag.to_extra_args(),
                    )
                )
        rows = []
        for output in llm.generate(prompts, params, use_tqdm=False):
            note, _ = EndingNote.take(output.kv_transfer_params)
            completion = output.outputs[0]
            # Self-certainty from what vLLM itself returns: minus the mean log probability over the whole vocabulary.
            values = [-fmean(entry.logprob for entry in position.values()) for position in completion.logprobs]
            expected = [fmean(values), pstdev(values)]
            tokens = list(completion.token_ids)
            rows.append([note.state, tokens, completion.finish_reason, note.confidence, expected])
            confidences.append(values)
        return rows

    confidences: list[list[float]] = []

    runner = llm.llm_engine.collective_rpc(_runner_of)[0]
    result = {"runner": runner, "group_size": GROUP_SIZE, "lengths": LENGTHS}
    result["extension"] = llm.collective_rpc("trainer_rank")
    result |= {"whole": race("whole", early_stop=False), "raced": race("raced", early_stop=True)}
    confidences.clear()
    llm.llm_engine.collective_rpc(_publish_head)
    plan = PruningPlan(DETECTION_LENGTH, mode="shadow", trial_lengths=(TRIAL_LENGTH,), final_score=True)
    result["scored"] = race("scored", early_stop=False, plan=plan)
    result["detection_lengths"] = plan.scored_lengths
    result["shown"] = shown(llm, model, result["scored"], confidences)
    print("RESULT " + json.dumps(result))


def shown(llm: LLM, model: str, rows: list[list], confidences: list[list[float]]) -> list:
    """Per candidate, by detection length: what the runner showed beside what it should have; "0" is the end."""
    entries = llm.llm_engine.engine_core.engine_core.scheduler.judge.ledger._rollouts["rollout"]
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
    heads = worker.model_runner.candidate_tracker.heads
    for length in (DETECTION_LENGTH, TRIAL_LENGTH, WHOLE):
        heads[HeadKey(length)] = PublishedHead(HEAD_VERSION, _head(hidden_size))


def _runner_of(worker) -> list[str]:
    return [cls.__name__ + "@" + cls.__module__ for cls in type(worker.model_runner).__mro__[:3]]


if __name__ == "__main__":
    main(*sys.argv[1:])

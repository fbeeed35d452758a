"""Race groups on one in-process engine and print how each candidate ended, as JSON: `race.py MODEL`.

The runner is V1, or V2 when VLLM_USE_V2_MODEL_RUNNER=1 (see v2_on_cpu). Every group is raced twice: once whole (no
early stop) and once to its second finisher, with the same seeds.
"""

import json
import os
import sys
from statistics import fmean

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    TORCH_COMPILE_DISABLE="1",
)  # fmt: skip

from vllm import LLM, SamplingParams

from vllm_rollout.adapter.serve import SCHEDULER_CLS, WORKER_CLS
from vllm_rollout.adapter.wire import CandidateTag, EndingNote

NUM_GROUPS = 2
NUM_CANDIDATES = 4
GROUP_SIZE = 2
LENGTHS = (5, 9, 14, 20)
"""Output lengths, forced by max_tokens; a candidate that is cut counts when nothing better is left."""


def main(model: str) -> None:
    llm = LLM(
        model, max_model_len=128, enforce_eager=True, dtype="float32", block_size=32, max_num_seqs=8, max_logprobs=-1,
        scheduler_cls=SCHEDULER_CLS, worker_cls=WORKER_CLS, worker_extension_cls="trainer_extension.TrainerExtension",
    )  # fmt: skip

    def race(name: str, early_stop: bool) -> list[list]:
        prompts, params = [], []
        for group in range(NUM_GROUPS):
            for index in range(NUM_CANDIDATES):
                tag = CandidateTag(f"{name}-{group}", index, GROUP_SIZE, NUM_CANDIDATES, early_stop, 8)
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
            expected = fmean(-fmean(entry.logprob for entry in position.values()) for position in completion.logprobs)
            tokens = list(completion.token_ids)
            rows.append([note.state, tokens, completion.finish_reason, note.mean_confidence, expected])
        return rows

    runner = llm.llm_engine.collective_rpc(_runner_of)[0]
    result = {"runner": runner, "group_size": GROUP_SIZE, "lengths": LENGTHS}
    result["extension"] = llm.collective_rpc("trainer_rank")
    result |= {"whole": race("whole", early_stop=False), "raced": race("raced", early_stop=True)}
    print("RESULT " + json.dumps(result))


def _runner_of(worker) -> list[str]:
    return [cls.__name__ + "@" + cls.__module__ for cls in type(worker.model_runner).__mro__[:3]]


if __name__ == "__main__":
    main(*sys.argv[1:])

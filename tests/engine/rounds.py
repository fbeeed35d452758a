"""Race groups against each other on one in-process engine and print how each candidate ended, as JSON:
`rounds.py MODEL`.

Every candidate's length is given, and all begin in the same step: what has so many tokens at its end was stopped in the
step in which others had as many.
"""

import json
import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    TORCH_COMPILE_DISABLE="1",
)  # fmt: skip

from vllm import LLM, SamplingParams

from vllm_rollout.adapter.names import SCHEDULER_CLS, WORKER_CLS
from vllm_rollout.adapter.wire import CandidateTag, EndingNote
from vllm_rollout.group.plans.terms import GroupTerms
from vllm_rollout.group.racing.race import RacePlace

GROUP_SIZE = 2
NUM_WANTED = 2
STOP_TOKEN = 6
RACES = {
    "clear": [[5, 9, 60], [12, 7, 60], [20, 25, 60], [14, 60, 60]],
    "tie": [[5, 9, 60], [60, 12, 12], [12, 11, 60], [60, 60, 60]],
}
"""Lengths of the candidates of each group of a race. In the tie the second and the third complete with step 12: the
longest trajectory has 12 tokens in both, and the second has the lower position."""


def main(model: str) -> None:
    llm = LLM(
        model, max_model_len=128, enforce_eager=True, dtype="float32", block_size=32, max_num_seqs=16,
        scheduler_cls=SCHEDULER_CLS, worker_cls=WORKER_CLS,
    )  # fmt: skip
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    result = {"scheduler": type(scheduler).__name__, "group_size": GROUP_SIZE}
    for name, groups in RACES.items():
        prompts, params = [], []
        for position, lengths in enumerate(groups):
            for index, length in enumerate(lengths):
                place = RacePlace(name, NUM_WANTED, position)
                tag = CandidateTag(f"{name}-{position}", index, GroupTerms(GROUP_SIZE, len(lengths)), 8, place=place)
                prompts.append({"prompt_token_ids": [3 + position, 4, 5, 6, 7]})
                params.append(
                    SamplingParams(
                        temperature=1,
                        seed=10 * position + index,
                        min_tokens=length - 1,
                        max_tokens=100,
                        stop_token_ids=[STOP_TOKEN],
                        logit_bias={STOP_TOKEN: 100},
                        extra_args=tag.to_extra_args(),
                    )
                )
        rows = []
        for output in llm.generate(prompts, params, use_tqdm=False):
            note, _ = EndingNote.take(output.kv_transfer_params)
            rows.append([note.state, len(output.outputs[0].token_ids), note.group_lost])
        result[name] = [rows[start : start + 3] for start in range(0, len(rows), 3)]
        scheduler.group_steps.races.forget(name)
        result[f"{name}_left"] = [*scheduler.group_steps.held]
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Run a batch on one in-process engine and print what came out as JSON: `generate.py {stock,ours} MODEL`.

A script rather than a fixture: two engines do not share a process, and in-process scheduling (no arrival times) makes
the batches of both runs the same, so that equal tokens can be demanded.
"""

import json
import os
import sys

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    TORCH_COMPILE_DISABLE="1",
)

from vllm import LLM, SamplingParams

from vllm_rollout.adapter.names import SCHEDULER_CLS, WORKER_CLS
from vllm_rollout.adapter.wire import CandidateTag
from vllm_rollout.group.plans.terms import GroupTerms

NUM_PROMPTS = 26


def requests() -> list[tuple[list[int], SamplingParams]]:
    """208 requests: greedy and seeded, with logprobs, penalties, top-k, top-p, stop strings, short and long prompts."""
    made = []
    for i in range(NUM_PROMPTS):
        prompt = [3 + (i * 7 + j * j) % 500 for j in range(5 + (i % 5) * 60)]
        length = 16 + i % 24
        made += [
            (prompt, SamplingParams(temperature=0, max_tokens=length)),
            (prompt, SamplingParams(temperature=0, max_tokens=length, logprobs=2)),
            (prompt, SamplingParams(temperature=0, max_tokens=length, repetition_penalty=1.2)),
            (prompt, SamplingParams(temperature=1, seed=i, max_tokens=length)),
            (prompt, SamplingParams(temperature=1, seed=i, max_tokens=length, logprobs=0)),
            (prompt, SamplingParams(temperature=0.7, top_k=20, seed=1000 + i, max_tokens=length)),
            (prompt, SamplingParams(temperature=0.7, top_p=0.9, seed=2000 + i, max_tokens=length)),
            (prompt, SamplingParams(temperature=1, seed=3000 + i, max_tokens=length, stop=["e"])),
        ]
    return made


def main(which: str, model: str) -> None:
    ours = {} if which == "stock" else {"scheduler_cls": SCHEDULER_CLS, "worker_cls": WORKER_CLS}
    llm = LLM(
        model, max_model_len=512, enforce_eager=True, dtype="float32", block_size=32, max_num_seqs=64,
        max_num_batched_tokens=2048, **ours,
    )  # fmt: skip
    batch = requests()

    def run(params: list[SamplingParams]) -> list[list]:
        outputs = llm.generate([{"prompt_token_ids": p} for p, _ in batch], params, use_tqdm=False)
        return [
            [list(o.outputs[0].token_ids), o.outputs[0].text, o.outputs[0].finish_reason, _logprobs(o.outputs[0])]
            for o in outputs
        ]

    result = {"untagged": run([params for _, params in batch])}
    if which == "ours":
        # The same requests in groups of eight whose race never fires: redundancy 0.
        tagged = []
        for i, (_, params) in enumerate(batch):
            params = params.clone()
            params.extra_args = CandidateTag(f"group-{i // 8}", i % 8, GroupTerms(8, 8), 16).to_extra_args()
            tagged.append(params)
        llm.reset_prefix_cache()  # the comparison is with a cold engine: cached prefixes round differently
        result["tagged"] = run(tagged)
    print("RESULT " + json.dumps(result))


def _logprobs(completion) -> list | None:
    if completion.logprobs is None:
        return None
    return [{token: round(entry.logprob, 4) for token, entry in position.items()} for position in completion.logprobs]


if __name__ == "__main__":
    main(*sys.argv[1:])

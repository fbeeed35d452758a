"""Races in an engine that vLLM builds itself, and print how they ended as JSON: `plain_llm.py MODEL`.

As in a trainer's own process: `vllm.LLM` with our scheduler and worker as arguments, no plugin, no client of ours.
"""

import json
import os
import sys

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    TORCH_COMPILE_DISABLE="1", VLLM_PLUGINS="",
)  # fmt: skip

from vllm import LLM, SamplingParams

LENGTHS = (6, 9, 40, 50)
"""Output tokens after which candidates of a group stop by themselves."""


def main(model: str) -> None:
    llm = LLM(
        model, max_model_len=256, enforce_eager=True, dtype="float32", block_size=32, max_num_seqs=16,
        scheduler_cls="vllm_rollout.Scheduler", worker_cls="vllm_rollout.Worker",
    )  # fmt: skip

    def ends(prompts: list[list[int]], params: list[SamplingParams]) -> list[list]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [
            [[len(choice.token_ids), choice.finish_reason, choice.stop_reason] for choice in output.outputs]
            for output in outputs
        ]

    ending = [token for token in range(llm.llm_engine.model_config.get_vocab_size()) if token != 7]

    def sampling(length: int, **fields: object) -> SamplingParams:
        return SamplingParams(
            temperature=1,
            seed=length,
            max_tokens=64,
            min_tokens=length - 1,
            stop_token_ids=ending,
            extra_args=fields,
        )

    join = {"rollout_group_id": "q", "rollout_group_size": 2, "rollout_num_candidates": 4}
    prune = {"rollout_detection_length": 4, "rollout_pruning_mode": "shadow"}
    prompts = [[3, 4, 5], [6, 7, 8]]
    result = {
        "plain": ends([[9, 10]], [sampling(12)]),
        "joined": ends(
            [p for p in prompts for _ in LENGTHS], [sampling(length, **join) for _ in prompts for length in LENGTHS]
        ),
        "by_prompt": ends(
            [p for p in prompts for _ in LENGTHS],
            [sampling(length, rollout_group_size=2, rollout_num_candidates=4) for _ in prompts for length in LENGTHS],
        ),
        "scored": ends([[30, 31]] * 4, [sampling(length, **join, **prune) for length in LENGTHS]),
        "refused": ends([[40, 41]], [sampling(8, rollout_redundancy=4)]),
    }
    # n children of one request join as well: vLLM gives each of them the request's extra_args.
    params = sampling(30, **join)
    params.n = 4
    result["n"] = ends([[50, 51]], [params])
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Rollouts in your own process: no server, no second copy of the weights.

    python examples/in_process.py [MODEL]

`vllm_rollout.LLM` is a `vllm.LLM` that also runs groups. If another library builds the engine (verl, SkyRL, OpenRLHF),
one engine argument is enough, scheduler_cls="vllm_rollout.Scheduler": see docs/recipes/index.md.
"""

import sys

from vllm import SamplingParams

import vllm_rollout


def main(model: str) -> None:
    llm = vllm_rollout.LLM(model, max_model_len=512, enforce_eager=True, max_num_seqs=32)

    # What POST /v1/rollouts answers: four trajectories of each group, of the six candidates that raced for it.
    answer = llm.rollout(
        ["2 + 2 =", "3 * 7 ="], group_size=4, redundancy=2,
        pruning={"detection_length": 8, "mode": "shadow"},
        sampling_params={"max_tokens": 48}, include=["text"],
    )  # fmt: skip
    print(f"{answer.usage.returned_tokens} of {answer.usage.generated_tokens} tokens came back")

    # Rewards train the calibration and the quality head.
    rewards = [(g.prompt_id, t.index, float("4" in t.text)) for g in answer.groups for t in g.trajectories]
    print(llm.post_rewards(answer.id, rewards).counts)

    # The same as it happens.
    for event in llm.stream(["5 + 5 ="], group_size=2, redundancy=2, sampling_params={"max_tokens": 32}):
        print(event.type)

    # vLLM's own generate: exactly n outputs, of n + rollout_redundancy that were started.
    params = SamplingParams(n=2, max_tokens=32, extra_args={"rollout_redundancy": 2})
    print([len(output.outputs) for output in llm.generate(["6 - 1 ="], params, use_tqdm=False)])


if __name__ == "__main__":
    main(*sys.argv[1:] or ["smollm2-135m-instruct"])

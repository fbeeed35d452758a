"""Groups for two prompts, with spare candidates. Needs `vllm-rollout serve` at http://127.0.0.1:8000."""

import sys

from vllm_rollout import RolloutClient

PROMPTS = [
    [{"role": "user", "content": "What is 17 + 25? Answer with the number."}],
    {"id": "poem", "messages": [{"role": "user", "content": "Write a poem of two lines about the sea."}]},
]


def main(url: str) -> None:
    with RolloutClient(url) as client:
        client.wait_until_ready(timeout_s=600)
        answer = client.rollout(
            PROMPTS,
            group_size=4,
            redundancy=4,
            sampling_params={"temperature": 1.0, "max_tokens": 128, "seed": 7},
            include=["text", "logprobs"],
        )
    for group in answer.groups:
        print(f"{group.prompt_id}: {group.status}, mean length {group.lengths.mean:.0f} tokens")
        for trajectory in group.trajectories:
            print(f"  {trajectory.index}: {trajectory.num_tokens} tokens, {trajectory.text!r:.60}")
    usage = answer.usage
    print(f"{usage.generated_tokens} tokens = {usage.returned_tokens} returned + {usage.wasted_tokens} wasted")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["http://127.0.0.1:8000"]))

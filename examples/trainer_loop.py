"""A trainer's loop that prunes: roll out, check answers, post rewards. The server learns which candidates to stop.

Needs `vllm-rollout serve MODEL` at http://127.0.0.1:8000 with a model that is right now and then, such as
`qwen2.5-coder-0.5b-instruct`. The embedded default is hardly ever right, and pruning needs right and wrong answers.

In place of `print`, a trainer would make its update with the advantages: plain GRPO over the returned answers. The
advantages are not weighted by 1 / survival_probability. Such weights would belong into mean and standard deviation too,
and even there they gain nothing (docs/guides/pruning.md, "Weights"). The success rate of returned answers is not that
of all answers, which the report at the end estimates.
"""

import random
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev

from vllm_rollout import RolloutClient
from vllm_rollout.answers import RolloutAnswer

PRUNING = {"detection_length": 16, "keep_ratio": 0.5, "min_labels": 16}
NUM_STEPS = 8
PROMPTS_PER_STEP = 8


def problems(step: int) -> dict[str, tuple[str, str]]:
    """Prompt id -> question and right answer."""
    chance = random.Random(step)
    pairs = [(chance.randrange(10, 100), chance.randrange(10, 100)) for _ in range(PROMPTS_PER_STEP)]
    return {f"{step}-{i}": (f"What is {a} + {b}? Think step by step.", str(a + b)) for i, (a, b) in enumerate(pairs)}


def rewards(answer: RolloutAnswer, right: dict[str, str]) -> list[tuple[str, int, float]]:
    """Prompt id, index and reward of each trajectory. The reward is 1 if its last number is right, else 0."""
    return [
        (group.prompt_id, t.index, float(re.findall(r"\d+", t.text or "")[-1:] == [right[group.prompt_id]]))
        for group in answer.groups
        for t in group.trajectories
    ]


def advantages(rewards: Sequence[float]) -> list[float]:
    """GRPO's advantages of one group: standardized rewards, or zeros if the rewards are all the same."""
    spread = pstdev(rewards) if rewards else 0.0
    return [(reward - fmean(rewards)) / spread if spread else 0.0 for reward in rewards]


def main(url: str, num_steps: int = NUM_STEPS) -> None:
    with RolloutClient(url) as client:
        client.wait_until_ready(timeout_s=600)
        for step in range(num_steps):
            asked = problems(step)
            answer = client.rollout(
                [{"id": id, "messages": [{"role": "user", "content": text}]} for id, (text, _) in asked.items()],
                group_size=4,
                redundancy=4,
                pruning=PRUNING,
                sampling_params={"temperature": 1.0, "max_tokens": 128, "seed": step},
                include=["text", "logprobs"],
            )
            earned = rewards(answer, {id: right for id, (_, right) in asked.items()})
            receipt = client.post_rewards(answer.id, earned)
            by_group: defaultdict[str, list[float]] = defaultdict(list)
            for prompt_id, _, reward in earned:
                by_group[prompt_id].append(reward)
            num_teaching = sum(any(advantages(of_group)) for of_group in by_group.values())
            print(
                f"step {step}: {num_teaching} of {len(by_group)} groups teach, {answer.usage.num_pruned} of "
                f"{answer.usage.num_scored} scored candidates pruned, {receipt.counts.accepted} rewards taken, head "
                f"version {receipt.head_version}"
            )
            for warning in answer.warnings:
                print(f"  {warning}")
        report = client.report()
        print(f"success rate of all answers, those that were stopped too: {report.active.positive_ratio}")
        for name, signal in report.signals.items():
            print(f"{name}: {signal.num_positive} positive, {signal.num_negative} negative labels, AUC {signal.auc}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")

"""Rollouts with scores and rewards on an engine of `vllm_rollout.LLM`, as JSON: `other_models.py MODEL`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    TORCH_COMPILE_DISABLE="1", VLLM_PLUGINS="", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1",
)  # fmt: skip

import vllm_rollout

SETTINGS: dict[str, Any] = {"max_model_len": 256, "enforce_eager": True, "dtype": "float32", "max_num_seqs": 16}
PROMPTS = [[5 + number] * 40 for number in range(2)]
SAMPLING = {"max_tokens": 40, "seed": 3}
SHADOW = {"detection_length": 4, "mode": "shadow"}
REGEX = {"regex": "[ab]{3,8}"}


def length(text: str, data: dict[str, Any]) -> float:
    return float(len(text))


def main(model: str) -> dict[str, Any]:
    llm = vllm_rollout.LLM(model, rewards={"length": length}, **SETTINGS)

    def roll_out(**sampling: Any) -> Any:
        return llm.rollout(
            PROMPTS, group_size=2, redundancy=2, pruning=SHADOW, audit_ratio=0.0, reward="length",
            sampling_params={**SAMPLING, **sampling},
        )  # fmt: skip

    answers = {"free": roll_out(min_tokens=6), "grammar": roll_out(structured_outputs=REGEX)}
    return {
        name: [
            {
                "states": [each.state for each in group.candidates],
                "rewards": [each.reward for each in group.trajectories],
                "confidences": [each.mean_confidence for each in group.trajectories],
            }
            for group in answer.groups
        ]
        for name, answer in answers.items()
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1])))

"""GRPO with TRL, vLLM in the trainer's process: `python train.py MODEL`."""

import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

QUESTIONS = [f"What is {a} + {b}? Say the number only." for a in range(2, 6) for b in range(3, 7)]


def is_short(completions, **_):
    return [1.0 / (1 + len(completion[0]["content"])) for completion in completions]


config = GRPOConfig(
    output_dir="out",
    use_vllm=True,
    vllm_mode="colocate",
    num_generations=8,
    per_device_train_batch_size=16,
    max_completion_length=64,
    max_steps=2,
    logging_steps=1,
    report_to="none",
)
prompts = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
trainer = GRPOTrainer(sys.argv[1], reward_funcs=[is_short], args=config, train_dataset=Dataset.from_list(prompts))
trainer.train()

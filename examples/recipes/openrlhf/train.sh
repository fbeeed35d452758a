#!/usr/bin/env bash
# GRPO with OpenRLHF: ./train.sh MODEL PROMPTS
set -euo pipefail

python -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path "$1" \
    --data.prompt_dataset "$2" \
    --algo.advantage.estimator group_norm \
    --rollout.n_samples_per_prompt 8

#!/usr/bin/env bash
# GRPO with verl: ./train.sh MODEL TRAIN.parquet VALIDATION.parquet
set -euo pipefail

python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$2" \
    data.val_files="$3" \
    actor_rollout_ref.model.path="$1" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.max_num_seqs=256

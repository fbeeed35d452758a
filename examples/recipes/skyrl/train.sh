#!/usr/bin/env bash
# GRPO with SkyRL at a server of yours, one turn per trajectory: ./train.sh MODEL TRAIN.parquet URL
set -euo pipefail

python -m skyrl.train.entrypoints.main_base \
    trainer.algorithm.advantage_estimator=grpo \
    trainer.policy.model.path="$1" \
    data.train_data="['$2']" \
    generator.inference_engine.external_proxy_url="$3" \
    generator.inference_engine.external_server_urls="['$3']" \
    generator.n_samples_per_prompt=8

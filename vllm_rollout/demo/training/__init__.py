"""`vllm-rollout demo --train`: a small policy learns by waiting for all answers and by racing.

It runs the reference trainer of a checkout, `examples/grpo`, in processes of its own, and draws their records.
"""

"""`vllm-rollout demo --train`: a small policy learns twice, waiting for all answers and racing.

Runs the reference trainer of a checkout, `examples/grpo`, in processes of its own, and draws what it leaves.
"""

"""What several processes know of vLLM: its versions, our names and options there, weights, texts.

What one process knows of vLLM stands in `kernel/api/`, `kernel/core/` and `kernel/worker/`, and in such folders of
parts.
"""

PLUGIN = "vllm_rollout"
"""Our name in VLLM_PLUGINS, which every process of the server inherits: `vllm-rollout serve` puts it there."""

"""Facts about vLLM that several processes need: its versions, our names and options there, weights, texts.

Facts that one process needs stand in `kernel/api/`, `kernel/core/` and `kernel/worker/`, and in such folders of parts.
"""

PLUGIN = "vllm_rollout"
"""Our name in VLLM_PLUGINS, which every process of the server inherits: `vllm-rollout serve` puts it there."""

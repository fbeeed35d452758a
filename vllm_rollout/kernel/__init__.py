"""The only folder that imports vllm. Each override translates and obeys: the rules are in
`vllm_rollout.kernel.rules`."""

PLUGIN = "vllm_rollout"
"""Our name in VLLM_PLUGINS, which every process of the server inherits: `vllm-rollout serve` puts it there."""

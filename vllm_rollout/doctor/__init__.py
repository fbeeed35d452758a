"""`vllm-rollout doctor`: what stands in the way of a server here, and the command that mends it.

Invariant: neither torch nor vLLM is imported, so that an installation that is broken can be looked at.
"""

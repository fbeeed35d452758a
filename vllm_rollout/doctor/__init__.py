"""`vllm-rollout doctor`: what stands in the way of a server here, and the command that mends it.

Invariant: this process imports neither torch nor vLLM, so that an installation that is broken can be looked at.
"""

"""`vllm-rollout simulate`: what a setting of groups would have saved on recorded lengths, without an engine.

A trace holds the length of every candidate, a replay (replay.py) lets them race through the code of `group/` on a clock
that a cost model drives, and does so for many settings. Imports neither vllm nor torch.
"""

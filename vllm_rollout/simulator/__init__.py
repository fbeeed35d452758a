"""`vllm-rollout simulate`: what a setting of groups would have saved on recorded lengths, without an engine.

A trace (trace.py) holds the length of every candidate, a replay (replay.py) lets them race through the code of `group/`
on a clock that a cost model drives, and a sweep (sweep.py) does so for many settings. Imports neither vllm nor torch.
"""

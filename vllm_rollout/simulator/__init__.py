"""`vllm-rollout simulate`: savings of a setting of groups, computed from recorded lengths without an engine.

A trace holds the length of every candidate. A replay (replay.py) races the candidates through the rules of a server, on
a clock that a cost model drives. A sweep does so for many settings. The package imports neither vllm nor torch.
"""

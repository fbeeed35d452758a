"""`vllm-rollout simulate --rounds`: runs of short and long rounds over a data set, without an engine.

A trainer (data.py) hands in prompts epoch after epoch. `parts/rounds/rules/rounds.py` chooses the prompts of a round.
The groups of a round race over the ranks (race.py), on a clock that a cost model drives.
"""

"""`vllm-rollout simulate --rounds`: whole runs of short and long rounds over a data set, without an engine.

A trainer (data.py) hands in prompts epoch after epoch, `group/rounds/rounds.py` says which of them a round runs, and
each round (race.py) is raced by groups over the ranks, on a clock that a cost model drives.
"""

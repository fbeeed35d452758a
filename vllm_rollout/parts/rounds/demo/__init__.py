"""`vllm-rollout demo --rounds`: a full period of tail batching against rounds that wait for all, on one server.

Plain rounds: stock chat requests with as many candidates as a trainer keeps. A round is over with its slowest answer.

Tail batching: a run. Its short rounds leave their slowest prompts to one long round.
"""

"""`vllm-rollout profile`: the time of a decode step by batch size, context and tensor parallelism, measured and fitted.

Source: DARTS 4.2.1 and Appendix A (PTL curves).
"""

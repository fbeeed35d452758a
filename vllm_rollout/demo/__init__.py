"""`vllm-rollout demo`: the same prompts on one server, first as stock vLLM answers them, then as a race.

Stock vLLM: one untagged OpenAI request per prompt with n candidates; the answer comes when the slowest has ended, and
the trainer keeps the first `group_size`. Race: one `POST /v1/rollouts`; a group's other candidates stop inside the
engine when `group_size` have finished.
"""

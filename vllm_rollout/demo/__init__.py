"""`vllm-rollout demo`: equal prompts on one server, first as stock vLLM answers them, then as a race.

Stock vLLM: one untagged OpenAI request per prompt with n candidates. The answer comes when the slowest candidate has
ended, and the trainer keeps the first `group_size`.

Race: one `POST /v1/rollouts`. When `group_size` candidates of a group have finished, the others stop inside the engine.
"""

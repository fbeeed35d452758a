"""Methods of `vllm_rollout.AsyncLLM` and `vllm_rollout.LLM` about what is learned. Invariant: as in `methods.py`."""

from vllm_rollout.parts.in_process.api.methods import awaited, done
from vllm_rollout.parts.pruning import client as calls


class AsyncLearning:
    """Methods of the async LLM."""

    quality_head = awaited(calls.quality_head)
    set_quality_head = awaited(calls.set_quality_head)
    report = awaited(calls.report)
    detection_lengths = awaited(calls.detection_lengths)
    prompts = awaited(calls.prompts)
    state = awaited(calls.state)
    set_state = awaited(calls.set_state)
    vote = awaited(calls.vote)


class Learning:
    """Methods of the LLM."""

    quality_head = done(AsyncLearning.quality_head)
    set_quality_head = done(AsyncLearning.set_quality_head)
    report = done(AsyncLearning.report)
    detection_lengths = done(AsyncLearning.detection_lengths)
    prompts = done(AsyncLearning.prompts)
    state = done(AsyncLearning.state)
    set_state = done(AsyncLearning.set_state)
    vote = done(AsyncLearning.vote)

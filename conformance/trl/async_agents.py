"""Agents of TRL's AsyncGRPO: its worker with `environment_factory`, and our worker, whose conversations race."""

from __future__ import annotations

from collections import Counter
from typing import Any

from datasets import Dataset
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from conformance.agents import TURNS, Sessions
from conformance.checks import Kit, check
from conformance.trl.agents import PROMPTS, REDUNDANCY, SIZE, Calculator
from conformance.trl.training import FLAGS, by_variety, next_sample
from vllm_rollout.integrations.trl_async import RacingRolloutWorker

CALL = {"type": "function", "function": {"name": "calculate", "arguments": {"terms": "17 + 25"}}}
ALWAYS_CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": "[a-z]",
            "close_pattern": r"<\|im_end\|>|$",
            "content": "text",
            "repeats": True,
            "transform": CALL,
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""The worker's template of an answer. Any text with a letter is a call, because a tiny model writes none."""
NUM_GROUPS = 4


def samples_of(kit: Kit, url: str, kind: type, **more: Any) -> list[Any]:
    """Samples of TRL's rollout worker, run in its own process."""
    from accelerate import PartialState
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen2_5_chat_template

    PartialState(cpu=True)  # its logger asks for it, which a trainer has
    tokenizer = AutoTokenizer.from_pretrained(kit.model_path())
    tokenizer.chat_template, tokenizer.response_template = qwen2_5_chat_template, ALWAYS_CALLS
    worker = kind(
        model_name=kit.model_path(),
        dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        reward_funcs=[by_variety],
        environment_factory=Calculator,
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        max_inflight_tasks=16,
        queue_maxsize=64,
        vllm_server_url=url,
        max_tokens=200,
        max_tool_calling_iterations=TURNS - 1,
        **more,
    )
    worker.start()
    try:
        return [next_sample(worker) for _ in range(NUM_GROUPS * SIZE)]
    finally:
        worker.stop()


@check("unmodified")
def async_environments_converse_one_by_one(kit: Kit) -> str:
    """Requests that the conversations of AsyncGRPO's worker send."""
    with kit.recording(kit.server(flags=FLAGS)) as recorder:
        samples = samples_of(kit, recorder.url, AsyncRolloutWorker, num_generations=SIZE)
    sent = [request for request in recorder.requests if request["path"] == "/v1/completions"]
    assert not any("x-session-id" in request["headers"] for request in sent)
    assert not {"vllm_xargs", "user"} & {name for request in sent for name in request["body"]}
    assert all(isinstance(request["body"]["prompt"][0], int) for request in sent), "one conversation each"
    assert max(sample.metrics["tools/call_frequency"] for sample in samples) == TURNS - 1
    return (
        f"{len(samples)} samples; each conversation sends its {TURNS} turns by itself, each when its tool has "
        "answered, without a header or a field that names it"
    )


@check("on")
def async_environments_race_by_their_worker(kit: Kit) -> dict[str, Any]:
    """With RacingRolloutWorker, TRL's queue gets winners only, with the tokens that the server sampled."""
    server = kit.server(flags=FLAGS)
    with kit.recording(server) as recorder:
        sizes = {"num_generations": SIZE + REDUNDANCY, "group_size": SIZE}
        samples = samples_of(kit, recorder.url, RacingRolloutWorker, **sizes)
    at_server, groups = Sessions(server.url, api_key=None), {}
    sent = [request["body"] for request in recorder.requests if request["path"] == "/v1/completions"]
    for at_server.id in {body["vllm_xargs"]["rollout_group_id"] for body in sent}:
        groups[int(at_server.id.rpartition("-")[2])] = at_server.read()
    lengths, stopped = [], []
    for number, num_samples in Counter(sample.group_id for sample in samples).items():
        group, its_samples = groups[number], [sample for sample in samples if sample.group_id == number]
        states = Counter(session["state"] for session in group["sessions"])
        assert (group["status"], num_samples) == ("complete", SIZE), group
        assert states == {"finished": SIZE, "surplus": REDUNDANCY}, group
        assert abs(sum(sample.advantage for sample in its_samples)) < 1e-5, "losers are not in the baseline"
        winners = [at_server.trajectory(id) for id in group["selected"]]
        assert sorted(map(last_said, its_samples)) == sorted(map(last_turn, winners))
        lengths += [winner["num_tokens"] for winner in winners]
        stopped += [session["num_tokens"] for session in group["sessions"] if session["state"] == "surplus"]
    return {
        "detail": f"`rollout_worker=RacingRolloutWorker(group_size={SIZE}, num_generations={SIZE + REDUNDANCY}, …)`: "
        f"of {len(lengths) // SIZE} prompts {SIZE} conversations each are scored, of {lengths} tokens, and end in "
        f"TRL's queue as in GET /v1/sessions. The others were stopped after {stopped}",
        "policy_tokens": lengths,
        "stopped_after_tokens": stopped,
    }


def last_turn(trajectory: dict[str, Any]) -> list[int]:
    """Tokens of the last turn. TRL renders a conversation anew for each turn, so each turn may be a segment."""
    segment, turn = trajectory["segments"][-1], trajectory["turns"][-1]
    return segment["token_ids"][-turn["num_tokens"] :]


def last_said(sample: Any) -> list[int]:
    """The policy's tokens at the end of a sample."""
    mask = sample.completion_mask.tolist()
    return sample.input_ids[len(mask) - mask[::-1].index(0) :].tolist()

"""Token-level streaming on a real engine (tiny random model): complete after preemption and past stalled readers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest

from tests.engine.conftest import TIMEOUT_S, Server, ends_after, serve_command
from vllm_rollout import RolloutClient
from vllm_rollout.server.answers import (
    CandidateEvent,
    DoneEvent,
    EndedCandidate,
    Event,
    GroupEvent,
    TokensEvent,
    TrajectoryEvent,
)

PROMPT = [9, 10, 11, 12]
NUM_TOKENS = 300
NUM_CANDIDATES = 8
NUM_BLOCKS = 40
"""Of 32 tokens: room for half of what NUM_CANDIDATES have at their ends."""
LONG_ID = "p" * 256
"""Every event says it: the connection's buffers take megabytes."""


@pytest.fixture(scope="module")
def cramped(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose KV cache is too small for its candidates."""
    flags = ("--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--dtype", "float32")
    flags += ("--num-gpu-blocks-override", str(NUM_BLOCKS))
    server = Server(serve_command(tiny_model, *flags), tmp_path_factory.mktemp("cramped") / "server.log")
    yield server
    server.stop()


def stream(server: Server, **arguments: Any) -> list[Event]:
    with RolloutClient(server.url, read_timeout_s=TIMEOUT_S) as client:
        return list(client.stream(**arguments))


Chunks = dict[tuple[str, int], list[TokensEvent]]


def chunks_of(events: list[Event], stream_tokens: int) -> Chunks:
    """What was streamed, checked: no gaps, no chunk too short, and nothing after a candidate's end."""
    chunks: Chunks = {}
    ended: dict[tuple[str, int], EndedCandidate] = {}
    for event in events:
        if isinstance(event, TokensEvent):
            assert (event.prompt_id, event.index) not in ended
            chunks.setdefault((event.prompt_id, event.index), []).append(event)
        elif isinstance(event, TrajectoryEvent):
            ended[event.prompt_id, event.trajectory.index] = event.trajectory
        elif isinstance(event, CandidateEvent):
            ended[event.prompt_id, event.candidate.index] = event.candidate
    assert isinstance(events[-1], DoneEvent)
    assert len(ended) == events[-1].usage.num_candidates
    for key, end in ended.items():
        parts = chunks.get(key, [])
        assert [part.offset for part in parts[:1]] in ([], [0])
        assert all(b.offset == a.offset + len(a.token_ids) for a, b in pairwise(parts))
        assert all(len(part.token_ids) >= stream_tokens for part in parts[:-1])
        assert [token for part in parts for token in part.token_ids] == end.token_ids
        assert [logprob for part in parts for logprob in part.logprobs] == end.logprobs
        assert len(end.token_ids) == end.num_tokens
    return chunks


@pytest.mark.parametrize("stream_tokens", [1, 7, 64])
def test_streamed_tokens_are_complete_after_preemption(cramped: Server, stream_tokens: int) -> None:
    cramped.wait_until_idle()
    num_preempted = cramped.counter("vllm:num_preemptions_total")
    num_generated = cramped.counter("vllm:generation_tokens_total")
    events = stream(
        cramped, prompts=[PROMPT], group_size=6, redundancy=NUM_CANDIDATES - 6, sampling=ends_after(NUM_TOKENS),
        stream_tokens=stream_tokens, return_unselected=True,
    )  # fmt: skip
    cramped.wait_until_idle()
    assert cramped.counter("vllm:num_preemptions_total") > num_preempted
    chunks = chunks_of(events, stream_tokens)
    (group,) = [event for event in events if isinstance(event, GroupEvent)]
    assert (group.status, len(group.selected)) == ("complete", 6)
    num_streamed = sum(len(part.token_ids) for parts in chunks.values() for part in parts)
    assert cramped.counter("vllm:generation_tokens_total") - num_generated == num_streamed
    for index in group.selected:
        parts = chunks["0", index]
        token_ids = [token for part in parts for token in part.token_ids]
        logprobs = [logprob for part in parts for logprob in part.logprobs]
        assert len(token_ids) == NUM_TOKENS
        assert logprobs == pytest.approx(prompt_logprobs(cramped, PROMPT + token_ids)[len(PROMPT) :], abs=1e-3)


def prompt_logprobs(server: Server, token_ids: list[int]) -> list[float | None]:
    """What the model says of these tokens in one pass: a token that was lost or told twice would not fit."""
    body = {"prompt": token_ids, "max_tokens": 1, "prompt_logprobs": 0}
    (choice,) = server.http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    rows = zip(token_ids, choice["prompt_logprobs"], strict=True)
    return [None if row is None else row[str(token)]["logprob"] for token, row in rows]


def test_a_reader_that_does_not_read_stalls_nobody_and_misses_nothing(server: Server) -> None:
    server.wait_until_idle()
    num_generated = server.counter("vllm:generation_tokens_total")
    num_candidates, sampling = 24, {"max_tokens": 1000, "ignore_eos": True}
    with (
        RolloutClient(server.url) as client,
        closing(
            client.stream(
                [{"id": LONG_ID, "prompt": "hello world"}], num_candidates, early_stop=False, sampling=sampling,
                stream_tokens=1,
            )
        ) as stalled,
    ):  # fmt: skip
        events = [next(stalled)]
        others = stream(
            server, prompts=["hello"], group_size=4, redundancy=4, sampling=ends_after(50), stream_tokens=5,
            return_unselected=True,
        )  # fmt: skip
        chunks_of(others, 5)
        server.wait_until_idle()  # the stalled group, too, has been generated to its end
        generated = server.counter("vllm:generation_tokens_total") - num_generated
        assert generated == num_candidates * sampling["max_tokens"] + others[-1].usage.generated_tokens
        events += stalled
    chunks = chunks_of(events, 1)
    lengths = [len(part.token_ids) for parts in chunks.values() for part in parts]
    assert sum(lengths) == num_candidates * sampling["max_tokens"]
    # It had stalled: what was generated meanwhile came merged.
    assert max(lengths) > 100

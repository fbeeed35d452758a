"""A reader that stalls, on a real engine (tiny random model)."""

from __future__ import annotations

from contextlib import closing

from tests.engine.conftest import Server, ends_after, said_in
from vllm_rollout import RolloutClient

LONG_ID = "p" * 256
"""Every event says it: the connection's buffers take megabytes."""
NUM_CANDIDATES, NUM_TOKENS = 24, 1000


def test_a_reader_that_does_not_read_stalls_nobody_and_misses_nothing(server: Server) -> None:
    server.wait_until_idle()
    num_generated = server.counter("vllm:generation_tokens_total")
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    prompts = [{"id": LONG_ID, "prompt": "hello world"}]
    with (
        RolloutClient(server.url) as client,
        closing(
            client.stream(prompts, NUM_CANDIDATES, early_stop=False, sampling_params=sampling, stream_tokens=1)
        ) as stalled,
    ):
        events = [next(stalled)]
        others = list(client.stream(["hello"], 4, 4, sampling_params=ends_after(50), stream_tokens=5))
        server.wait_until_idle()  # the stalled group, too, has been generated to its end
        generated = server.counter("vllm:generation_tokens_total") - num_generated
        assert generated == NUM_CANDIDATES * NUM_TOKENS + others[-1].usage.generated_tokens
        events += stalled
    said = said_in(event.model_dump() for event in events)
    assert [len(tokens) for tokens in said.values()] == [NUM_TOKENS] * NUM_CANDIDATES
    longest = max(len(event.token_ids) for event in events if event.type == "tokens")
    assert longest > 100, "it had stalled: what was generated meanwhile came merged"

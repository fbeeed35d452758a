"""TRL 1.10, the last version that talks to `trl vllm-serve`, at a server with `--rollout-compat trl-legacy`."""

from __future__ import annotations

from typing import Any

import httpx

from conformance.checks import Kit, Stopped, check, main, metric, refusal
from conformance.recording import recording

PROMPTS = ["The quick brown fox", "Once upon a time", "1 2 3 4"]
CHATS = [[{"role": "user", "content": f"What is {a} + {a}?"}] for a in (4, 5)]


def url_of(kit: Kit) -> str:
    flags = ["--rollout-compat", "trl-legacy", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    return kit.server(flags=flags).url


@check("unmodified")
def client_gets_what_the_endpoints_give(kit: Kit) -> str:
    """generate and chat of TRL's client: counts, and the tokens of /v1/completions and /v1/chat/completions."""
    from trl.generation.vllm_client import VLLMClient

    with recording(url_of(kit)) as recorder:
        client = VLLMClient(base_url=recorder.url)
        text = client.generate(PROMPTS, n=4, max_tokens=8, generation_kwargs={"seed": 7})
        ids = client.generate([[5, 6, 7], [8, 9]], temperature=0.0, max_tokens=8, logprobs=3)
        chat = client.chat(CHATS, n=2, max_tokens=8, generation_kwargs={"seed": 7})
        client.reset_prefix_cache()
    kit.record([request for request in recorder.samples() if request["path"] in ("/generate/", "/chat/")])

    def asked(path: str, **body: Any) -> list[list[int]]:
        answer = httpx.post(
            f"{url_of(kit)}{path}", json={"max_tokens": 8, "return_token_ids": True, **body}, timeout=120
        )
        return [choice["token_ids"] for choice in answer.json()["choices"]]

    assert text["completion_ids"] == asked("/v1/completions", prompt=PROMPTS, n=4, seed=7)
    assert ids["completion_ids"] == asked("/v1/completions", prompt=[[5, 6, 7], [8, 9]], temperature=0)
    assert chat["completion_ids"] == [
        token_ids for c in CHATS for token_ids in asked("/v1/chat/completions", messages=c, n=2, seed=7)
    ]
    assert ids["prompt_ids"] == [[5, 6, 7], [8, 9]]
    assert len(text["prompt_ids"]) == 3
    assert len(chat["prompt_ids"]) == 2
    for answer, width in ((text, {1}), (ids, {3, 4}), (chat, {1})):
        for tokens, logprobs, ranked in zip(
            answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True
        ):
            assert len(tokens) == len(logprobs) == len(ranked)
            assert {len(one) for one in ranked} <= width
            assert all(token in one for token, one in zip(tokens, ranked, strict=True))
    return "12 completions of text, 2 of token ids, 4 of chats, with the tokens of vLLM's own endpoints"


@check("on")
def spare_candidates_by_generation_kwargs(kit: Kit) -> str:
    """With generation_kwargs={"extra_args": {"rollout_redundancy": 4}} there are exactly n completions."""
    from trl.generation.vllm_client import VLLMClient

    def wasted() -> float:
        return metric(url_of(kit), 'vllm_rollout:tokens_total{kind="wasted"')

    client = VLLMClient(base_url=url_of(kit))
    before = wasted()
    kwargs = {"extra_args": {"rollout_redundancy": 4}}
    answer = client.generate(PROMPTS, n=4, max_tokens=64, generation_kwargs=kwargs)
    assert len(answer["completion_ids"]) == 12
    assert wasted() > before
    return "12 completions of 3 prompts out of 24 candidates"


@check("unmodified")
def a_prompt_that_is_too_long_is_refused(kit: Kit) -> str:
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient(base_url=url_of(kit))
    said = refusal(lambda: client.generate([[5] * 3000], max_tokens=8))
    assert "400" in said, said
    return said[:300]


@check("stopped")
def weights_by_nccl(kit: Kit) -> None:
    """The weight transfer of TRL's own server, which our server does not have."""
    answer = httpx.post(f"{url_of(kit)}/init_communicator/", json={"host": "127.0.0.1", "port": 1, "world_size": 2})
    assert answer.status_code == 404, answer.text
    raise Stopped("weights need a worker of its own server: use TRL 1.11 or later, or load them from disk")


if __name__ == "__main__":
    main()

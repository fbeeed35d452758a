"""The routes of `trl vllm-serve`: what becomes of a trainer's request, and of the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from tests.support.waiting import eventually
from vllm_rollout.server.compat import trl_legacy


class OpenAI:
    """The two endpoints of an app that answers: a choice's tokens are its prompt's number, its own, and 7."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_cancelled = 0
        self.hangs = False
        self.app = FastAPI()
        trl_legacy.attach(self.app)
        self.app.post("/v1/completions")(self.completions)
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.get("/health")(self.health)

    async def health(self) -> JSONResponse:
        return JSONResponse({})

    async def _note(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.num_cancelled += 1
        return body

    async def completions(self, request: Request) -> JSONResponse:
        body = await self._note(request)
        if body["max_tokens"] > 100:
            return JSONResponse({"error": {"message": "too long", "code": 400}}, status_code=400)
        top = {"token_id:7": -0.25, "token_id:8": -0.5}
        one = {
            "tokens": ["token_id:9"],
            "token_logprobs": [-0.375],
            "top_logprobs": [top if body["logprobs"] else None],
        }
        choices = [
            {
                "index": place * body["n"] + i,
                "prompt_token_ids": [place],
                "token_ids": [place, i, 7],
                "logprobs": None if body["logprobs"] is None else one,
            }
            for place, _ in enumerate(body["prompt"])
            for i in range(body["n"])
        ]
        return JSONResponse({"choices": choices})

    async def chat(self, request: Request) -> JSONResponse:
        body = await self._note(request)
        number = len(body["messages"])
        entry = {"token": "token_id:3", "logprob": -1.0, "top_logprobs": [{"token": "token_id:4", "logprob": -0.5}]}
        choices = [{"token_ids": [number, i], "logprobs": {"content": [entry]}} for i in range(body["n"])]
        return JSONResponse({"prompt_token_ids": [number], "choices": choices})


@pytest.fixture
def openai() -> OpenAI:
    return OpenAI()


async def post(openai: OpenAI, path: str, body: Any, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=openai.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, json=body, headers=headers)


async def test_completions_come_prompt_by_prompt_with_ranked_log_probabilities(openai: OpenAI):
    answer = await post(openai, "/generate/", {"prompts": ["a", "b"], "n": 2, "logprobs": 2})
    assert answer.json() == {
        "prompt_ids": [[0], [1]],
        "completion_ids": [[0, 0, 7], [0, 1, 7], [1, 0, 7], [1, 1, 7]],
        "logprobs": [[[-0.25, -0.375, -0.5]]] * 4,
        "logprob_token_ids": [[[7, 9, 8]]] * 4,
    }
    (sent,) = openai.bodies
    assert sent == {
        "prompt": ["a", "b"],
        "n": 2,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 16,
        "logprobs": 2,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


async def test_only_the_sampled_token_has_a_log_probability_unless_more_are_asked_for(openai: OpenAI):
    answer = (await post(openai, "/generate/", {"prompts": [[1, 2]]})).json()
    assert (answer["logprobs"], answer["logprob_token_ids"]) == ([[[-0.375]]], [[[9]]])
    answer = (await post(openai, "/generate/", {"prompts": [[1, 2]], "logprobs": None})).json()
    assert (answer["logprobs"], answer["logprob_token_ids"]) == (None, None)


async def test_sampling_parameters_of_generation_kwargs_go_before_and_turn_us_on(openai: OpenAI):
    kwargs = {"seed": 3, "n": 3, "extra_args": {"rollout_redundancy": 2}, "structured_outputs": {"json": {}}}
    body = {"prompts": ["a"], "generation_kwargs": kwargs, "structured_outputs_regex": "[0-9]"}
    answer = await post(openai, "/generate/", body)
    assert len(answer.json()["completion_ids"]) == 3
    assert len(answer.json()["prompt_ids"]) == 1
    (sent,) = openai.bodies
    assert (sent["seed"], sent["n"], sent["vllm_xargs"]) == (3, 3, {"rollout_redundancy": 2})
    assert sent["structured_outputs"] == {"regex": "[0-9]"}
    assert "extra_args" not in sent


async def test_each_conversation_is_a_request_and_images_become_urls(openai: OpenAI):
    image = {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image_pil", "image_pil": "QUJD"}]}
    text = {"role": "user", "content": "hi"}
    body = {
        "messages": [[image], [text, text]],
        "n": 2,
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"a": 1},
    }
    answer = await post(openai, "/chat/", body)
    assert answer.json() == {
        "prompt_ids": [[1], [2]],
        "completion_ids": [[1, 0], [1, 1], [2, 0], [2, 1]],
        "logprobs": [[[-0.5, -1.0]]] * 4,
        "logprob_token_ids": [[[4, 3]]] * 4,
    }
    sent = sorted(openai.bodies, key=lambda body: len(body["messages"]))
    assert [body["n"] for body in sent] == [2, 2]
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    assert sent[0]["messages"] == [{"role": "user", "content": [{"type": "text", "text": "?"}, url]}]
    assert (sent[1]["messages"], sent[1]["logprobs"], sent[1]["top_logprobs"]) == ([text, text], True, 0)
    assert (sent[0]["tool_choice"], sent[0]["chat_template_kwargs"]) == ("none", {"a": 1})


async def test_what_the_endpoint_refuses_is_refused_in_its_words_and_the_key_goes_along(openai: OpenAI):
    answer = await post(openai, "/generate/", {"prompts": ["a"], "max_tokens": 101}, authorization="Bearer k")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "too long")
    assert openai.headers[0]["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/generate/", {"prompts": []}, 400, "prompts"),
        ("/generate/", {"prompts": ["a"], "n": 0}, 400, "n"),
        ("/generate/", {"prompts": ["a"], "guided_decoding_regex": "a"}, 400, "guided_decoding_regex"),
        ("/generate/", {"prompts": ["a"], "images": [["QUJD"]]}, 501, "Send them as messages"),
    ],
)
async def test_what_cannot_be_done_says_why_and_what_to_do(openai: OpenAI, path, body, status, words):
    answer = await post(openai, path, body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert openai.bodies == []


async def test_routes_that_differ_by_a_slash_are_redirected(openai: OpenAI):
    transport = httpx.ASGITransport(app=openai.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", follow_redirects=True) as client:
        assert (await client.get("/health/")).status_code == 200


@pytest.mark.parametrize("path", ["/generate/", "/chat/"])
async def test_generation_ends_when_the_trainer_goes_away(openai: OpenAI, path):
    openai.hangs = True
    body = {"prompts": ["a"]} if path == "/generate/" else {"messages": [[{"role": "user", "content": "a"}]] * 3}
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not sent:
            sent.append(1)
            return {"type": "http.request", "body": httpx.Request("POST", "/", json=body).content, "more_body": False}
        await eventually(lambda: len(openai.bodies) >= (1 if path == "/generate/" else 3))
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    await asyncio.wait_for(openai.app({**scope, "http_version": "1.1", "scheme": "http"}, receive, send), 10)
    assert openai.num_cancelled == (1 if path == "/generate/" else 3)

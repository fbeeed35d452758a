"""A judge: a model behind an OpenAI-compatible server that grades trajectories.

Invariant: equal questions are sent once, also at the same time. A caller that leaves does not end a question for which
another caller waits. A judge that fails, is late or gives no verdict gives `error`, never a reward.
"""

from __future__ import annotations

import asyncio
import os
import time
import tomllib
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, Self

import httpx
import msgspec

from vllm_rollout.background import begin
from vllm_rollout.checks import shown
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.grading.http import NoAnswer, Question, host_of
from vllm_rollout.parts.rewards.grading.templates import Template
from vllm_rollout.parts.rewards.grading.values import Trajectory, failed
from vllm_rollout.parts.rewards.grading.verdicts import ChoiceVerdict, PatternVerdict, Said
from vllm_rollout.whole_file import write_whole

ENGINE_VARIABLE = "VLLM_ROLLOUT_JUDGE"
"""Environment variable with the path of the file that describes the judge beside this server."""
ENGINE_MODEL = "judge"
"""Model name of the judge beside this server."""
FIXED = ("model", "messages", "prompt", "n", "stream", "logprobs", "top_logprobs")
"""Fields of a request that `sampling_params` may not set."""


class JudgeTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Request to the judge, its server, and the way to read its answer: either `pattern` or `choices`."""

    template: str | list[dict[str, str]]
    """Text with fields. A text is the user's message in a chat, or with `completions` the prompt. A list is a chat."""
    pattern: str | None = None
    """A regular expression with one group, around a number or a word of `values`. The last match counts."""
    values: dict[str, float] | None = None
    choices: dict[str, float] | None = None
    """Rewards of next tokens. The reward is their mean, weighted by each token's probability."""
    url: str | None = None
    """URL without its `/v1`. None: the engine of `--rollout-judge`."""
    model: str = ENGINE_MODEL
    api: Literal["chat", "completions"] = "chat"
    api_key_env: str | None = None
    """Environment variable that has the API key."""
    sampling_params: dict[str, Any] = {}
    """Further fields of the request."""
    top_logprobs: int = 20
    """Number of likeliest tokens that are read for `choices`. A server has a maximum."""
    cache: int = 65_536
    """Number of verdicts that are kept. Set 0 for a judge that learns."""


class JudgeEngine(msgspec.Struct, frozen=True):
    """The judge beside this server."""

    url: str
    api_key: str
    failure: str | None = None
    """Reason why it does not run now."""

    @classmethod
    def of_this_server(cls) -> JudgeEngine:
        """Read the judge of this server. Raises: ValueError if there is none."""
        path = os.environ.get(ENGINE_VARIABLE)
        if path is None:
            raise ValueError(
                "the judge names no url, and no judge runs beside this server: say url and model, or start the server "
                "with --rollout-judge MODEL"
            )
        return msgspec.json.decode(Path(path).read_bytes(), type=cls)

    def write(self, path: Path) -> None:
        """Write the file, readable by its owner only: it has the key."""
        write_whole(path, msgspec.json.encode(self), mode=0o600)


@dataclass(slots=True)
class _Asking:
    """A question without an answer yet."""

    question: Question
    verdict: asyncio.Future[Grade]
    num_waiting: int = 0


class Judge:
    """A judge with these terms: fields of `JudgeTerms`.

    Raises: ValueError for invalid terms, and on entry if there is no server to ask.
    """

    def __init__(self, *, transport: httpx.AsyncBaseTransport | None = None, **terms: Any) -> None:
        self._terms = _checked(terms)
        template = self._terms.template
        messages = [("user", template)] if isinstance(template, str) else [_message(each) for each in template]
        self._templates = [(role, Template(content)) for role, content in messages]
        choices, pattern = self._terms.choices, self._terms.pattern
        self._choices = None if choices is None else ChoiceVerdict(choices)
        self._pattern = None if pattern is None else PatternVerdict(pattern, self._terms.values)
        variable = self._terms.api_key_env
        if variable is not None and not os.environ.get(variable):
            raise ValueError(f"api_key_env: the environment variable {variable} is not set")
        self._api_key = None if variable is None else os.environ[variable]
        self._transport = transport
        self._asking: dict[bytes, _Asking] = {}
        self._verdicts: OrderedDict[bytes, Grade] = OrderedDict()

    @classmethod
    def read(cls, path: Path) -> Judge:
        """Read a TOML file with the fields of `JudgeTerms`. Raises: ValueError that names the file."""
        try:
            return cls(**tomllib.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            said = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"the judge file {path}: {said}") from error

    async def __aenter__(self) -> Self:
        if self._terms.url is None:
            JudgeEngine.of_this_server()
        # A proxy is for servers on other machines.
        self._client = httpx.AsyncClient(transport=self._transport, trust_env=self._terms.url is not None)
        return self

    async def __aexit__(self, *_: object) -> None:
        verdicts = [asking.verdict for asking in self._asking.values()]
        for verdict in verdicts:
            verdict.cancel()
        await asyncio.gather(*verdicts, return_exceptions=True)
        await self._client.aclose()

    async def grade(self, trajectory: Trajectory, limit_s: float) -> Grade:
        """`limit_s`: seconds for all attempts together."""
        began = time.monotonic()
        try:
            question = self._question(trajectory)
        except (ValueError, TypeError, OSError, RecursionError) as error:
            return failed(str(error))
        key = blake2b(question.content, digest_size=16).digest()
        grade = self._verdicts.get(key)
        if grade is None:
            grade = await self._answered(key, question, limit_s)
        else:
            self._verdicts.move_to_end(key)
        return replace(grade, seconds=time.monotonic() - began)

    def _question(self, trajectory: Trajectory) -> Question:
        """The question about a trajectory. Raises: ValueError if the template cannot be filled or the judge does not
        run."""
        terms = self._terms
        filled = [{"role": role, "content": template.filled(trajectory)} for role, template in self._templates]
        body: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": 512 if self._choices is None else 1,
            **terms.sampling_params,
        }
        body["model"] = terms.model
        if terms.api == "chat":
            body |= {"messages": filled}
            body |= {} if self._choices is None else {"logprobs": True, "top_logprobs": terms.top_logprobs}
        else:
            body |= {"prompt": filled[0]["content"]}
            body |= {} if self._choices is None else {"logprobs": terms.top_logprobs}
        url, api_key = terms.url, self._api_key
        if url is None:
            engine = JudgeEngine.of_this_server()
            if engine.failure is not None:
                raise ValueError(f"the judge beside this server does not run: {engine.failure}")
            url, api_key = engine.url, engine.api_key
        route = f"{_base(url)}/v1/{'chat/completions' if terms.api == 'chat' else 'completions'}"
        return Question(self._client, route, body, None if api_key is None else {"Authorization": f"Bearer {api_key}"})

    async def _answered(self, key: bytes, question: Question, limit_s: float) -> Grade:
        asking = self._asking.get(key)
        if asking is None:
            asking = _Asking(question, begin(self._verdict(key, question)))
            self._asking[key] = asking
        asking.num_waiting += 1
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(asking.verdict)
        except TimeoutError:
            return failed(f"the judge {self._terms.model} {asking.question.unanswered(limit_s)}{self._why()}")
        finally:
            asking.num_waiting -= 1
            if not asking.num_waiting:
                asking.verdict.cancel()
                del self._asking[key]

    async def _verdict(self, key: bytes, question: Question) -> Grade:
        try:
            answer = await question.answer()
            said = Said.by_chat(answer) if self._terms.api == "chat" else Said.by_completion(answer)
            if self._pattern is not None:
                grade = await self._pattern.of(said.text)
            else:
                assert self._choices is not None
                grade = self._choices.of(said.logprobs)
        except (NoAnswer, ValueError) as error:
            return failed(f"the judge {self._terms.model}: {error}")
        self._verdicts[key] = grade
        while len(self._verdicts) > self._terms.cache:
            self._verdicts.popitem(last=False)
        return grade

    def _why(self) -> str:
        """Reason for the end of the judge beside this server, if the server knows it."""
        if self._terms.url is None:
            with suppress(OSError, ValueError):
                if failure := JudgeEngine.of_this_server().failure:
                    return f"; {failure}"
        return ""


def _checked(terms: dict[str, Any]) -> JudgeTerms:
    """Check a judge's terms. Raises: ValueError."""
    known = JudgeTerms.__struct_fields__
    if "sampling" in terms:
        raise ValueError("sampling: renamed, write sampling_params")
    if unknown := [name for name in terms if name not in known]:
        raise ValueError(f"a judge has no field {', '.join(map(shown, unknown))}, it has {', '.join(known)}")
    try:
        checked = msgspec.convert(terms, JudgeTerms)
    except msgspec.ValidationError as error:
        raise ValueError(f"a judge's fields: {error}") from error
    if (checked.pattern is None) == (checked.choices is None):
        raise ValueError("a judge reads its verdict by `pattern` or by `choices`: say one of them")
    if not checked.template:
        raise ValueError("template: must say something")
    if checked.values is not None and checked.pattern is None:
        raise ValueError("values: are words of a `pattern`; rewards of tokens are `choices`")
    if checked.url is None and checked.model != ENGINE_MODEL:
        raise ValueError(f"model: {shown(checked.model)} is at some url; the engine beside us serves {ENGINE_MODEL!r}")
    if checked.url is not None and not (host_of(checked.url) and "model" in terms):
        raise ValueError(f"url: must be one such as http://127.0.0.1:8000, with a model, got {shown(checked.url)}")
    if checked.api == "completions" and not isinstance(checked.template, str):
        raise ValueError('template: a list is a chat; api = "completions" takes a text')
    if fixed := [name for name in FIXED if name in checked.sampling_params]:
        raise ValueError(f"sampling_params: {', '.join(fixed)} cannot be said here")
    if checked.cache < 0 or checked.top_logprobs < 1:
        raise ValueError(f"cache must be at least 0 and top_logprobs 1, got {checked.cache} and {checked.top_logprobs}")
    return checked


def _message(message: dict[str, str]) -> tuple[str, str]:
    if set(message) != {"role", "content"}:
        raise ValueError(f"template: a message has role and content, got {shown(message)}")
    return message["role"], message["content"]


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")

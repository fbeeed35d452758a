"""Errors as OpenAI error bodies. Invariant: each message has the problem, the value, allowed values and a remedy, in
few words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, get_args

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from vllm_rollout.kernel.http.answers import ErrorAnswer, ErrorBody
from vllm_rollout.kernel.http.body import UNION_TAGS
from vllm_rollout.kernel.http.engine import RequestError

MAX_REPORTED_ERRORS = 5
MAX_VALUE_CHARS = 80
MAX_PARAM_CHARS = 200
MAX_MESSAGE_CHARS = 2000
"""Most characters of a message. It quotes the request, and must not send megabytes back."""


MEANINGS = {
    400: "The body or a parameter has a value that is not allowed, or vLLM refuses the prompt or a sampling value. "
    "Nothing has run.",
    401: "The header x-rollout-admin-key is missing or wrong, and the server has --rollout-admin-key.",
    404: "There is no model, rollout, run, group or session of that name, or another client made it.",
    409: "The request conflicts with the server's state. The message says how to go on.",
    410: "The answer of this key is no longer kept, or its round was given up.",
    413: "The body is larger than the server reads: 64 MiB, or 1 GiB for a state.",
    429: "Too much waits already. Repeat the request after Retry-After seconds.",
    500: "Our code raised an exception, or a file is damaged. The server's log says more.",
    503: "The engine has stopped or is paused, or too much waits. Repeat the request after Retry-After seconds, if the "
    "answer has that header.",
    504: "No session of the round was run for idle_timeout_s seconds.",
    507: "The disk is full, or waiting prompts would take more than 512 MiB. Nothing has changed.",
}
"""Meaning of each status. Errors of one endpoint are in its own description."""


def errors_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Answers with these statuses, as OpenAPI describes them."""
    return {int(status): {"model": ErrorAnswer, "description": MEANINGS[int(status)]} for status in statuses}


ERRORS = errors_of(400, 404, 413, 500, 503) | {"default": {"model": ErrorAnswer, "description": "Any other error"}}
"""Errors of every endpoint. Without `default` FastAPI would describe an answer 422, which there is not."""
ROLLOUT_ERRORS = ERRORS | errors_of(409, 429)
"""Errors of endpoints that begin a rollout. 409: a rebuilt engine waits for weights. 429: a reward has too much to
grade."""
CHANGE_ERRORS = ERRORS | errors_of(401, 409)
"""Errors of endpoints that need --rollout-admin-key, if the server was given that key."""


def error_body(error: RequestError) -> ErrorBody:
    return ErrorBody(
        message=_quotable(str(error), MAX_MESSAGE_CHARS),
        type=HTTPStatus(error.status).phrase.replace(" ", ""),
        param=None if error.param is None else _quotable(error.param, MAX_PARAM_CHARS),
        code=error.status,
    )


def _quotable(text: str, max_chars: int) -> str:
    """`text` without its middle if it is too long, and without surrogates, which JSON allows and UTF-8 does not."""
    if len(text) > max_chars:
        text = f"{text[: max_chars // 2]}…{text[-max_chars // 2 :]}"
    return text.encode(errors="backslashreplace").decode()


def error_response(error: RequestError) -> JSONResponse:
    headers = None if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return JSONResponse(ErrorAnswer(error=error_body(error)).model_dump(), status_code=error.status, headers=headers)


def explain_internal(error: Exception) -> RequestError:
    message = f"{type(error).__name__}: {error}. The request is not complete; see the server's log."
    return RequestError(message, status=HTTPStatus.INTERNAL_SERVER_ERROR)


def explain_unreadable(error: HTTPException) -> RequestError:
    """The error for a body that could not be read. FastAPI's message does not say why, so the cause is read."""
    cause = error.__cause__
    if isinstance(cause, RequestError):
        return cause
    if isinstance(cause, RecursionError):
        return RequestError("the body is nested too deeply to be read. Flatten it.")
    if isinstance(cause, ValueError):
        return RequestError(f"the body is not JSON: {cause}. Send UTF-8 encoded JSON.")
    return RequestError(str(error.detail), status=error.status_code)


def explain_invalid(error: RequestValidationError, body: type[BaseModel] | None) -> RequestError:
    """FastAPI's validation errors, in one sentence each. `param` is the field of the first.

    `body`: the model of the body. Its descriptions say which values are allowed.
    """
    problems = []
    param = None
    for problem in error.errors()[:MAX_REPORTED_ERRORS]:
        field, message = _problem(problem, body)
        param = param or field or None
        problems.append(f"{field}: {message}" if field else message)
    left_out = len(error.errors()) - len(problems)
    if left_out > 0:
        problems.append(f"and {left_out} more")
    return RequestError("; ".join(problems), param=param)


def _problem(problem: dict[str, Any], body: type[BaseModel] | None) -> tuple[str, str]:
    """Field (may be empty) and message of one of pydantic's errors."""
    location = tuple(part for part in problem["loc"][1:] if part not in UNION_TAGS)
    field = ".".join(_short(str(part)) for part in location)
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "json_invalid":
        position = location[0] if location else 0
        return "", f"the body is not JSON: {problem['ctx']['error']} at character {position}"
    if problem["type"] == "unknown_field":
        return ".".join(filter(None, [field, _short(str(problem["ctx"]["field"]))])), message
    if problem["type"] == "no_prompt":
        written = json.dumps({"prompt": _short(problem["input"])}, ensure_ascii=False)
        return field, f"{message}, got {_shown(problem['input'])}. Write {written}"
    if problem["type"] == "value_error":
        if ": " not in message:
            return field, message
        inner, message = message.split(": ", 1)
        return ".".join(filter(None, [field, inner])), message
    if not location:
        return "", _not_an_object(problem)
    if problem["type"] != "missing":
        message = f"{message.replace('Input should', 'should', 1)}, got {_shown(problem.get('input'))}"
    description = None if body is None or problem["loc"][0] != "body" else _describe_field(body, location)
    return field, f"{message}. {description}" if description else message


def _not_an_object(problem: dict[str, Any]) -> str:
    if problem["type"] == "missing":
        return "the body is empty. Send a JSON object"
    if isinstance(problem["input"], bytes):
        return "the body was not read as JSON. Send it with the header content-type: application/json"
    return f"the body should be a JSON object, got {_shown(problem['input'])}"


def _shown(value: Any) -> str:
    """A value of the body. A text has quotes."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, str):
        return repr(_short(value))
    return _short(json.dumps(value, default=str))


def _short(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "…"


def _describe_field(body: type[BaseModel], location: tuple[int | str, ...]) -> str | None:
    """The description of the field at `location`, as far as the location names fields."""
    models: list[type[BaseModel]] = [body]
    description = None
    for part in location:
        if isinstance(part, int) or part in UNION_TAGS:
            continue
        fields = {name: field for model in models for name, field in model.model_fields.items()}
        if part not in fields:
            break
        description = fields[part].description
        models = list(_models_in(fields[part].annotation))
    return description


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)

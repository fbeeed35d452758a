"""The endpoints and their bodies, from the OpenAPI document of our routes, and the fields in `vllm_xargs`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from docs_tools.reference.markdown import prose, sections, table
from docs_tools.reference.schemas import REFERENCE, TABLES, Schema, Schemas, said_of
from vllm_rollout.kernel.http.routes import router
from vllm_rollout.kernel.rules.rows import Door, Row, rows
from vllm_rollout.kernel.xargs import GRADING, NAMES

METHODS = ("get", "post", "put", "delete")
JSON = "application/json"
EVENTS = "text/event-stream"
TITLES = {"rollouts": "Rollouts", "learning": "Rewards, quality heads, state", "watch": "Watching"}
"""Tag of a router -> title of its endpoints, if the tag is not the title."""
DOORS: Mapping[Door, tuple[str, str]] = {  # kind of request -> title and description
    "own": (
        "One request with `n` choices",
        (
            "`n` is the size of the group. The answer always has exactly `n` choices. A stream sends each choice in "
            "one piece when the group is complete. A request with `use_beam_search` and such a field is refused."
        ),
    ),
    "join": (
        "One request per candidate",
        (
            "Each request has `n=1` and belongs to the group that its fields name. The candidates that are stopped "
            'end with `finish_reason: "abort"` and `stop_reason: "surplus"` or `"pruned"`.'
        ),
    ),
    "claim": (
        "One request per turn of a session",
        "A request belongs to a session if it has `rollout_session` or the header `X-Session-ID`.",
    ),
}

JOINED = {
    "rollout_namespace": "run-7",
    "rollout_group_id": "step7-q1",
    "rollout_group_size": 8,
    "rollout_num_candidates": 16,
}
"""Fields of one of 16 requests, of which the first 8 to finish are kept."""


def openapi() -> dict[str, Any]:
    """The OpenAPI document of our routes, from an app without vLLM."""
    app = FastAPI()
    app.include_router(router)
    return app.openapi()


def part() -> str:
    document = openapi()
    schemas = Schemas(document)
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if method in METHODS
    ]
    everywhere = set.intersection(*({*operation["responses"]} for _, _, operation in operations))
    by_tag: dict[str, list[str]] = {}
    for path, method, operation in operations:
        text = sections(_endpoint(path, method, operation, schemas, everywhere))
        by_tag.setdefault(operation["tags"][-1], []).append(text)
    endpoints = [part for tag, texts in by_tag.items() for part in (f"## {TITLES.get(tag, tag.capitalize())}", *texts)]
    return sections(
        [
            _contents(operations),
            "## Error statuses",
            _errors(document, everywhere),
            *endpoints,
            *_xargs(),
            "## Objects",
            *_objects(schemas),
        ]
    )


def _contents(operations: list[tuple[str, str, Schema]]) -> str:
    rows = ((f"[`{m.upper()} {path}`](#{_anchor(path, m)})", prose(each["summary"])) for path, m, each in operations)
    return table(("endpoint", "what it does"), rows)


def _anchor(path: str, method: str) -> str:
    return re.sub(r"[^\w\- ]", "", f"{method} {path}".lower()).replace(" ", "-")


def _errors(document: Schema, everywhere: set[str]) -> str:
    """Table of error statuses with their meaning. A status means the same at every endpoint."""
    said: dict[str, str] = {}
    for methods in document["paths"].values():
        for operation in methods.values():
            said |= {s: answer["description"] for s, answer in operation["responses"].items() if "400" <= s <= "599"}
    rows = (
        (status, prose(said[status]), "all" if status in everywhere else "where the endpoint says so")
        for status in sorted(said)
    )
    return table(("status", "when", "endpoints"), rows)


def _endpoint(path: str, method: str, operation: Schema, schemas: Schemas, everywhere: set[str]) -> Iterator[str]:
    yield f"### {method.upper()} {path}"
    yield f"{prose(operation['summary'])}."
    yield "\n\n".join(prose(block) for block in operation.get("description", "").strip().split("\n\n"))
    yield from _parameters(operation, schemas)
    yield from _request(operation, schemas)
    yield from _answers(operation, schemas)
    others = [s for s in operation["responses"] if "400" <= s <= "599" and s not in everywhere]
    if others:
        yield "Other [error statuses](#error-statuses): " + ", ".join(f"{s} {_phrase(s)}" for s in others) + "."


def _phrase(status: str) -> str:
    return f"({HTTPStatus(int(status)).phrase})"


def _parameters(operation: Schema, schemas: Schemas) -> Iterator[str]:
    parameters = operation.get("parameters", ())
    if not parameters:
        return
    yield table(
        ("parameter", "in", "type", "default", "meaning"),
        (
            (
                f"`{each['name']}`",
                each["in"],
                schemas.type_of(said_of(each["schema"])),
                "required" if each.get("required") else _shown(each["schema"].get("default")),
                prose(each.get("description", "")),
            )
            for each in parameters
        ),
    )


def _shown(default: object) -> str:
    return "" if default is None else f"`{json.dumps(default)}`"


def _request(operation: Schema, schemas: Schemas) -> Iterator[str]:
    body = operation.get("requestBody")
    if body is None:
        return
    for kind, content in body["content"].items():
        if kind != JSON:
            yield f"Body: bytes, `{kind}`."
            continue
        name = next(_references(content["schema"])).removeprefix(REFERENCE)
        needed = "" if body.get("required") else " It may be left out."
        yield f"Body: JSON, `{name}`.{needed}"
        yield from schemas.body(name)


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield schema["$ref"]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _answers(operation: Schema, schemas: Schemas) -> Iterator[str]:
    for status, answer in operation["responses"].items():
        if status >= "400":
            continue
        content = answer.get("content", {})
        kinds = [
            schemas.type_of(each["schema"]) if kind == JSON else f"bytes, `{kind}`"
            for kind, each in content.items()
            if kind != EVENTS and (kind != JSON or each.get("schema"))
        ]
        says = "" if answer["description"] == "Successful Response" else f" {prose(answer['description'])}"
        yield (
            f"Answer {status}: {', '.join(kinds) or 'nothing'}.{says}"
            if kinds or EVENTS not in content
            else (f"Answer {status}: a stream.{says}")
        )
        if headers := answer.get("headers"):
            yield table(("header", "meaning"), ((f"`{name}`", prose(h["description"])) for name, h in headers.items()))
        if EVENTS in content:
            yield from _events(content[EVENTS]["itemSchema"]["properties"], schemas)


def _events(item: Schema, schemas: Schemas) -> Iterator[str]:
    """The events of a stream: a table if the schema of their `data` is known, else their names."""
    data = item["data"].get("contentSchema")
    if data is None:
        names = ", ".join(f"`{name}`" for name in item["event"]["enum"])
        yield f"Events of the stream: {names}."
        return
    seen: dict[str, Schema] = {}
    for event in data.get("anyOf") or data["oneOf"]:
        seen[schemas.inlined(event)] = event
    yield table(
        ("event", "data", "meaning"),
        (
            (f"`{event['properties']['type']['const']}`", schemas.link(name), prose(event.get("description", "")))
            for name, event in seen.items()
        ),
    )


def _xargs() -> Iterator[str]:
    yield "## Fields of the OpenAI endpoints"
    yield (
        "`/v1/completions` and `/v1/chat/completions` take these fields in `vllm_xargs`, `/inference/v1/generate` in "
        "`sampling_params.extra_args`. A field anywhere else is refused with the place where it is read."
    )
    for door, (title, says) in DOORS.items():
        yield f"### {title}"
        yield says
        yield table(("field", "takes", "default", "meaning"), _of_door(door))
        if door == "join":
            yield f"```json\n{json.dumps({'prompt': '17 + 25 =', 'vllm_xargs': JOINED}, indent=2)}\n```"
    yield "### Rewards of the choices"
    yield (
        "The grades are in the answer's `kv_transfer_params.rollout_rewards`, one object per choice, null for a choice "
        "that was stopped. A stream has no place for them, and is refused."
    )
    yield table(("field", "meaning"), ((f"`{name}`", prose(says)) for name, says in GRADING.items()))


def _of_door(door: Door) -> Iterator[tuple[str, str, str, str]]:
    seen: set[str] = set()
    for each in TABLES:
        for field in dataclasses.fields(each) if dataclasses.is_dataclass(each) else ():
            row: Row | None = rows(each).get(field.name)
            if row is None or door not in row.doors or field.name in seen or field.name not in NAMES:
                continue
            seen.add(field.name)
            default = field.default
            shown = "" if default in (None, dataclasses.MISSING) else _shown(default)
            yield f"`{NAMES[field.name]}`", row.flat.allowed, shown, prose(row.help)


def _objects(schemas: Schemas) -> Iterator[str]:
    """A section for each object. A section may link to further objects, which then get sections too."""
    texts: dict[str, str] = {}
    while missing := [name for name in schemas.shown if name not in texts]:
        for name in missing:
            texts[name] = sections(schemas.section(name))
    yield from (texts[name] for name in sorted(texts))

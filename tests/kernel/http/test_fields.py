"""Each field of a body, and each flat field of OpenAI requests, takes the values of its range and refuses all others.

The fields are those of `kernel/rules/fields.py`, those of the parts that are there, and those that only a body has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tests.kernel.http.conftest import make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.kernel.http.test_errors import JSON, check_error
from tests.support.values import edges, wrong
from vllm_rollout.config import MAX_GROUP_SIZE
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.fields import PLAN_FIELDS, ROWS
from vllm_rollout.kernel.rules.plan import make_plan
from vllm_rollout.kernel.rules.rows import (
    Door,
    Flag,
    Integer,
    Kind,
    Names,
    Number,
    PlanError,
    Row,
    Text,
    restored,
    rows,
)
from vllm_rollout.kernel.xargs import (
    ALL_ROWS,
    NAMES,
    PART_TABLES,
    audit_ratio_from_xargs,
    claimed_from_xargs,
    plan_from_xargs,
)

APP = make_app(FakeEngine())
MOST = 2 * MAX_GROUP_SIZE


class Place(NamedTuple):
    """A field somewhere in the body of an endpoint."""

    method: str
    path: str
    body: type[BaseModel]
    name: str
    kind: Kind
    allowed: str
    """Words about the range, in the message of every refusal."""
    around: Callable[[Any], dict[str, Any]]
    """The body with this value of the field."""


def places() -> Iterator[Place]:
    for route in APP.routes:
        body = get_type_hints(getattr(route, "endpoint", places)).get("body")
        if isinstance(body, type) and issubclass(body, BaseModel):
            (method,) = route.methods  # type: ignore[attr-defined]
            path = re.sub(r"{.*?}", "0", route.path)  # type: ignore[attr-defined]
            for name, kind, allowed, around in fields(body, "", lambda fields: fields):
                yield Place(method, path, body, name, kind, allowed, around)


def fields(model: type[BaseModel], prefix: str, whole: Callable[[Any], Any]) -> Iterator[tuple[Any, ...]]:
    """Name, kind, words and surrounding body of each field of a model, and of the objects in it."""
    schema = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        row = rows(model).get(name)
        kind = row.takes if row is not None else kind_of(schema[name])

        def around(value: Any, name: str = name) -> Any:
            return whole({**required(model), name: value})

        if kind is not None:
            yield prefix + name, kind, "" if row is None else row.takes.allowed, around
        for inner in models_in(field.annotation):
            yield from fields(inner, f"{prefix}{name}.", around)


def kind_of(schema: Mapping[str, Any]) -> Kind | None:
    """The kind of a field that is in no table. None if the schema bounds it in another way, or not at all."""
    match [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]:
        case [{"enum": names}]:
            return Names(tuple(names))
        case [{"const": name}]:
            return Names((name,))
        case [{"type": "boolean"}]:
            return Flag()
        case [{"type": "string", "minLength": 1, "maxLength": most}]:
            return Text(most)
        case [{"type": "integer", "minimum": least, "maximum": most}]:
            return Integer(least, most)
        case [{"type": "number", "minimum": least, "maximum": most}]:
            return Number(least, most)
        case [{"type": "number", "exclusiveMinimum": least, "maximum": most}]:
            return Number(least, most, above=True)
    return None


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Bodies that are values of a field, but not those in lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif getattr(annotation, "__origin__", None) is not list:
        for argument in get_args(annotation):
            yield from models_in(argument)


def required(model: type[BaseModel]) -> dict[str, Any]:
    """The fields that a body needs, as in its first example or at the start of their range."""
    (example,) = model.model_config.get("json_schema_extra", {}).get("examples", [{}])[:1]  # type: ignore[union-attr, call-overload]
    return {
        name: example.get(name) or value_of(field, rows(model).get(name))
        for name, field in model.model_fields.items()
        if field.is_required()
    }


def value_of(field: FieldInfo, row: Row | None) -> Any:
    inner = next(models_in(field.annotation), None)
    return edges(row.takes)[0] if row is not None else "name" if inner is None else required(inner)


PLACES = pytest.mark.parametrize("place", [*places()], ids=lambda place: f"{place.path}:{place.name}")


@pytest.fixture(scope="module")
def local() -> Iterator[TestClient]:
    with TestClient(APP) as client:
        yield client


@PLACES
def test_a_body_with_a_value_that_is_not_allowed_is_refused(local: TestClient, place: Place) -> None:
    for value in wrong(place.kind):
        response = local.request(place.method, place.path, content=json.dumps(place.around(value)), headers=JSON)
        message = check_error(response, 400, None, [place.allowed])
        assert f"{response.json()['error']['param']}.".startswith(f"{place.name}."), message
        if isinstance(value, int | float | str) and len(str(value)) < 80:
            assert f"got {repr(value) if isinstance(value, str) else json.dumps(value)}" in message


@PLACES
def test_a_body_takes_the_ends_of_each_range(place: Place) -> None:
    for value in edges(place.kind):
        with suppress(FieldsDoNotFit):
            validate(place.body, place.around(value))


class FieldsDoNotFit(Exception):
    """Each value of a body is allowed by itself."""


def validate(body: type[BaseModel], said: dict[str, Any]) -> None:
    try:
        body.model_validate(said)
    except ValidationError as error:
        if {fault["type"] for fault in error.errors()} == {"value_error"}:
            raise FieldsDoNotFit from error
        raise


def own(said: Mapping[str, Any]) -> None:
    audit_ratio_from_xargs(said, plan_from_xargs({"rollout_redundancy": 4, **said}, 4, max_candidates=MOST), 0.0)


def joining(said: Mapping[str, Any]) -> None:
    plan = plan_from_xargs({"rollout_group_size": 4, "rollout_num_candidates": 8, **said}, 1, max_candidates=MOST)
    audit_ratio_from_xargs(said, plan, 0.0)


DOORS: dict[Door, Callable[[Mapping[str, Any]], object]] = {"own": own, "join": joining, "claim": claimed_from_xargs}


OF_TERMS = {field for table in PART_TABLES for field in rows(table)}


def flat_fields() -> list[tuple[Door, str]]:
    """Fields of each door, without those that no part here reads."""
    read = [part.table for _, part in faces("terms")]
    unread = {field for table in PART_TABLES if table not in read for field in rows(table)}
    return [
        (door, field) for field, row in ALL_ROWS.items() if field not in unread for door in DOORS if door in row.doors
    ]


@pytest.mark.parametrize(("door", "field"), flat_fields())
def test_a_flat_field_with_a_value_that_is_not_allowed_is_refused(door: Door, field: str) -> None:
    name, kind = NAMES[field], ALL_ROWS[field].flat
    others = {NAMES["detection_length"]: 8} if field in OF_TERMS else {}
    for value in wrong_flat(kind):
        with pytest.raises(
            PlanError, match=f"^{re.escape(f'{name}: must be {kind.allowed}, got {value!r:.80}.')}"
        ) as error:
            DOORS[door]({**others, name: value})
        assert error.value.field == name


@pytest.mark.parametrize("field", PLAN_FIELDS)
def test_a_plan_checks_its_fields(field: str) -> None:
    for value in wrong_flat(ROWS[field].flat):
        with pytest.raises(PlanError, match=re.escape(ROWS[field].flat.allowed)) as error:
            make_plan(**{"group_size": 4, field: value}, max_candidates=MOST)  # type: ignore[arg-type]
        assert error.value.field == field


@pytest.mark.parametrize("field", ALL_ROWS)
def test_a_flat_field_takes_the_ends_of_its_range(field: str) -> None:
    for value in edges(ALL_ROWS[field].flat):
        assert ALL_ROWS[field].read(value, field) == value


def wrong_flat(kind: Kind) -> list[Any]:
    """Wrong values among xargs, in which 1 is true, and 2.0 an integer."""
    return [value for value in wrong(kind) if not kind.holds(restored(kind, value))]


def test_time_without_a_price_is_not_in_its_range() -> None:
    assert not ROWS["tradeoff"].takes.holds(0)


def test_a_group_of_single_requests_may_be_as_large_as_one_of_a_rollout() -> None:
    assert ROWS["num_candidates"].takes.most == ROWS["group_size"].takes.most + MAX_GROUP_SIZE  # type: ignore[union-attr]

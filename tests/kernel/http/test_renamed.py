"""Fields of earlier versions: an old name is refused with the new one, a removed field with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.kernel.http.conftest import make_app
from tests.kernel.http.fake_engine import FakeEngine
from vllm_rollout.kernel.client.body import rollout_body
from vllm_rollout.kernel.http.body import REMOVED, RENAMED
from vllm_rollout.kernel.http.protocol import RolloutRequest

APP = make_app(FakeEngine())
OLD_NAMES = pytest.mark.parametrize("old", RENAMED)
REMOVED_NAMES = pytest.mark.parametrize("removed", REMOVED)


def bodies() -> Iterator[tuple[str, str, str, frozenset[str]]]:
    """Method and path of each endpoint with a JSON body, its model's name and fields."""
    document = APP.openapi()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if (name := schema.get("$ref", "").rpartition("/")[2]) != "":
                yield method, path, name, frozenset(document["components"]["schemas"][name]["properties"])


@OLD_NAMES
async def test_every_body_refuses_an_old_name_with_the_new_one(http: httpx.AsyncClient, old: str) -> None:
    new = RENAMED[old]
    refusing = [(method, path) for method, path, _, fields in bodies() if new in fields]
    assert ("post", "/v1/rollouts") in refusing
    for method, path in refusing:
        response = await http.request(method, path.replace("{run_id}", "a"), json={old: {}})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["message"], error["param"]) == (f"{old}: renamed, write {new}", old)


@OLD_NAMES
def test_no_body_has_an_old_name(old: str) -> None:
    assert [name for _, _, name, fields in bodies() if old in fields] == []


@OLD_NAMES
def test_the_client_refuses_an_old_name_with_the_new_one(old: str) -> None:
    option: dict[str, Any] = {old: True}
    with pytest.raises(TypeError, match=f"^{old}: renamed, write {RENAMED[old]}$"):
        rollout_body(["p"], 2, **option)


def test_an_old_name_is_an_unknown_field_where_the_new_one_is_none() -> None:
    with pytest.raises(ValueError, match="is not a field of this version"):
        RolloutRequest.model_validate({"prompts": [{"prompt": "p", "sampling": {}}], "group_size": 1})


@REMOVED_NAMES
async def test_every_body_refuses_a_removed_field_with_what_to_do_instead(
    http: httpx.AsyncClient, removed: str
) -> None:
    assert [name for _, _, name, fields in bodies() if removed in fields] == []
    refusing = [(method, path) for method, path, _, fields in bodies() if fields & {"group_size", "max_candidates"}]
    assert ("post", "/v1/rollouts") in refusing
    for method, path in refusing:
        response = await http.request(method, path.replace("{run_id}", "a"), json={removed: "variance"})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, removed), path
        assert error["message"] == f"{removed}: {REMOVED[removed]}"


@REMOVED_NAMES
def test_the_client_refuses_a_removed_option_with_what_to_do_instead(removed: str) -> None:
    option: dict[str, Any] = {removed: "variance"}
    with pytest.raises(TypeError, match=f"^{removed}: removed, leave it out: let rounds filter"):
        rollout_body(["p"], 2, **option)

"""The reference of the site has all that the code has: endpoints, fields, events, metrics, flags, commands, classes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.main import get_command

import vllm_rollout
from docs_tools.pages import for_site
from docs_tools.reference import cli, http, metrics
from docs_tools.reference.schemas import class_of
from docs_tools.stub import ANSWERS, PLACE, answers, stub
from tests.test_docs import ROOT
from vllm_rollout.cli import app
from vllm_rollout.kernel.http.answers import RolloutEvent
from vllm_rollout.kernel.xargs import ALL_ROWS, GRADING, NAMES, plan_from_xargs
from vllm_rollout.parts.rounds.http.answers import RoundStreamEvent
from vllm_rollout.parts.rounds.with_sessions.http.answers import SessionRoundEvent

OPENAPI = http.openapi()
BODIES = {name: schema for name, schema in OPENAPI["components"]["schemas"].items() if schema.get("examples")}


@cache
def page() -> str:
    return http.part()


def section(title: str) -> str:
    """From its heading to the next one of its level."""
    _, found, rest = page().partition(f"\n### {title}\n")
    assert found, title
    return re.split(r"\n##", rest)[0]


def fields(text: str) -> set[str]:
    """Names in the first column of tables."""
    return set(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("method", "path"), [(method, path) for path, methods in OPENAPI["paths"].items() for method in methods]
)
def test_each_endpoint_has_a_section_with_its_body_and_what_it_answers(method: str, path: str) -> None:
    operation = OPENAPI["paths"][path][method]
    text = section(f"{method.upper()} {path}")
    assert operation["summary"].partition(":")[0] in text
    assert {each["name"] for each in operation.get("parameters", ())} <= fields(text)
    body = operation.get("requestBody", {"content": {}})["content"].get("application/json")
    for reference in http._references(body):
        schema = OPENAPI["components"]["schemas"][reference.rpartition("/")[2]]
        assert schema["properties"].keys() <= fields(text)
    for status in operation["responses"]:
        assert status in text or f"| {status} " in page() or status == "default"


def test_each_link_leads_to_a_section_of_its_own() -> None:
    headings = re.findall(r"^#+ (.+)$", page(), re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r"\]\(#([^)]+)\)", page())) <= set(anchors)


@pytest.mark.parametrize("events", [RolloutEvent, RoundStreamEvent, SessionRoundEvent])
def test_each_event_of_a_stream_is_named_with_its_fields_and_says_what_it_means(events: object) -> None:
    for event in events.__args__:  # type: ignore[attr-defined]
        (row,) = set(re.findall(rf"^\| `\w+` \| \[{event.__name__}\].*$", page(), re.MULTILINE))
        assert f"| `{event.model_fields['type'].default}` |" in row
        assert not row.endswith("|  |")
        assert event.model_fields.keys() <= fields(section(event.__name__))


def test_each_field_among_the_xargs_has_a_row() -> None:
    _, _, text = page().partition("\n## Fields of the OpenAI endpoints\n")
    named = fields(text.partition("\n## ")[0])
    flat = {NAMES[field] for field, row in ALL_ROWS.items() if set(row.doors) & http.DOORS.keys()}
    assert named == flat | GRADING.keys()


def test_descriptions_under_the_fields_of_answers_are_in_their_rows() -> None:
    assert "Probability that the candidate is among the trajectories" in section("Trajectory")
    assert "One per prompt, in the order of the prompts." in section("RolloutAnswer")


@pytest.mark.parametrize("name", BODIES)
def test_the_example_of_a_body_is_accepted_and_shown(name: str) -> None:
    body = class_of(name, tuple(BODIES[name]["properties"]))
    assert body is not None
    assert issubclass(body, BaseModel)
    for example in BODIES[name]["examples"]:
        body.model_validate(example)
    assert "```json" in page().partition(f"`{name}`.")[2].partition("\n### ")[0]


def test_the_example_of_the_xargs_is_accepted() -> None:
    assert '"rollout_num_candidates": 16' in section("One request per candidate")
    assert plan_from_xargs(http.JOINED, 1, max_candidates=16).num_candidates == 16


def test_each_metric_has_a_row_that_says_what_it_counts() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|.*\| (.*) \|$", metrics.part(), re.MULTILINE)
    wanted = {metrics.name_of(metric).removeprefix(metrics.PREFIX) for metric in metrics.all_metrics()}
    assert {name for name, _, _ in rows} == wanted
    assert {kind for _, kind, _ in rows} == {"counter", "gauge", "histogram"}
    assert all(says for _, _, says in rows)


@pytest.mark.slow
def test_each_flag_and_each_command_has_a_row_or_a_section() -> None:
    text = cli.part()
    flags = {flag for _, _, actions in cli.our_groups() for action in actions for flag in action.option_strings}
    assert len(flags) > 25
    assert {flag for flag in flags if f"`{flag}`" not in text} == set()
    assert "`--max-model-len`" not in fields(text)
    commands = get_command(app).commands.keys() - {"serve", "models"}
    assert {name for name in commands if f"\n## vllm-rollout {name}\n" not in text} == set()
    assert "%(" not in text


def test_each_public_name_is_on_the_page_of_python() -> None:
    text = (ROOT / "docs/reference/python.md").read_text()
    names = {name for name in vllm_rollout.__all__ if not name.startswith("__")}
    assert {name for name in names - {"Pruning"} if not re.search(rf"\b{name}\b", text)} == set()
    for path in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
        module, _, name = path.rpartition(".")
        file = ROOT / module.replace(".", "/")
        source = (file / "__init__.pyi" if file.is_dir() else file.with_suffix(".py")).read_text()
        assert re.search(rf"^(?:class|def|async def) {name}\b", source, re.MULTILINE), path


def test_the_types_of_the_package_are_those_of_the_parts_that_are_there() -> None:
    """Write them anew: python -m docs_tools.stub --write."""
    assert (PLACE.read_text(), ANSWERS.read_text()) == (stub(), answers())


def on(markdown: str, repository: str = "") -> str:
    return for_site(markdown, Path("guides/race.md"), repository)


def test_links_to_files_outside_the_pages_are_names_of_files_or_lead_to_the_repository() -> None:
    link = "[the reward](../../examples/trainer_loop.py)"
    assert on(link) == "the reward `examples/trainer_loop.py`"
    assert on("[`trainer_loop.py`](../../examples/trainer_loop.py)") == "`examples/trainer_loop.py`"
    assert on(link, "https://git.example/r") == "[the reward](https://git.example/r/blob/main/examples/trainer_loop.py)"
    assert on("[`examples/grpo`](../../examples/grpo/train.py)") == "`examples/grpo/train.py`"
    assert on("[all](../../examples)", "https://git.example/r/") == "[all](https://git.example/r/tree/main/examples)"
    for other in ("[a](../reference/http.md#x)", "[a](https://x.example/y)", "[a](../../nowhere.py)", "[a](#b)"):
        assert on(other) == other
    assert on(f"```md\n{link}\n```") == f"```md\n{link}\n```"


def test_lists_are_as_python_markdown_wants_them() -> None:
    assert on("Text:\n- one\n  more\n- two") == "Text:\n\n- one\n    more\n- two"
    assert on("- one\n  - inner\n- two") == "- one\n    - inner\n- two"
    assert on("1. one\n   ```sh\n   run\n   ```\n2. two") == "1. one\n    ```sh\n    run\n    ```\n2. two"
    assert on("Text\n\n    - code\n") == "Text\n\n    - code\n"
    assert on("| a |\n|---|\n| - b |") == "| a |\n|---|\n| - b |"

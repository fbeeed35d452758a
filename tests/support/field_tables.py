"""Tables of fields in docs/http.md, made of the table in `group/plans/fields.py` and of the bodies that follow from it.

`make docs-tables` writes them, tests/test_field_tables.py holds them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from vllm_rollout.group.plans.fields import ROWS, DualEndFields, JoinFields, PruningFields, SessionFields, TurnFields
from vllm_rollout.group.plans.rows import rows
from vllm_rollout.group.plans.xargs import NAMES
from vllm_rollout.server.protocol import Pruning, RolloutRequest

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
OWN_WORDS = (JoinFields, SessionFields, TurnFields)
"""Tables whose fields say what they mean; the others are those of a rollout."""
TABLE = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
FIRST = ("prompts", "group_size")
MORE = {
    "redundancy": "#redundancy-auto",
    "reward": "#reward-and-until",
    "until": "until.md",
    "selection": "#selection-dual-end",
    "pruning": "#pruning",
    "audit_ratio": "#audit-groups",
    "sampling_params": "#seeds",
    "migration": "engines.md#moves-that-pay",
    "on_engine_failure": "engines.md#when-a-rank-dies",
    "detection_length": "#which-detection-length",
    "final_score": "#whole-trajectories",
}
"""Field -> where more is said of it."""


def with_tables(page: str) -> str:
    """The page with its tables as they are now."""
    return TABLE.sub(lambda found: f"{found[1]}{found[2]}" + "".join(f"{line}\n" for line in _table(found[1])), page)


def _table(name: str) -> Iterator[str]:
    if name in ("rollout", "pruning"):
        yield from _table_of(RolloutRequest if name == "rollout" else Pruning)
        return
    yield "| field | takes | meaning |"
    yield "|---|---|---|"
    for field, row in ROWS.items():
        if name in row.doors and not (name == "join" and field in rows(PruningFields)):
            yield f"| `{NAMES[field]}` | {row.flat.allowed} | {_meaning(field, name)} |"
    if name == "join":
        yield "| those of pruning | as above | |"


def _meaning(field: str, door: str) -> str:
    if field in rows(PruningFields):
        return f"`{field}` of [`pruning`](#pruning)"
    if field in rows(DualEndFields):
        return f"`{field}` of [dual-end](#selection-dual-end)"
    if field == "group_size":
        return f"how many {'sessions' if door == 'session' else 'siblings'} have to finish"
    if door == "session" and field in ("group_id", "num_candidates"):
        return {"group_id": "The group's name.", "num_candidates": "How many sessions there are."}[field]
    own = next((rows(table)[field].help for table in OWN_WORDS if field in rows(table)), None)
    return f"`{field}` of a rollout" if own is None else own


def _table_of(body: type[BaseModel]) -> Iterator[str]:
    yield "| field | default | meaning |"
    yield "|---|---|---|"
    fields = {name: body.model_fields[name] for name in FIRST if name in body.model_fields} | body.model_fields
    for name, field in fields.items():
        more = f" [More]({MORE[name]})." if name in MORE else ""
        default = field.get_default(call_default_factory=True)
        shown = "" if field.is_required() or default is None else f"`{json.dumps(_plain(default))}`"
        yield f"| `{name}` | {shown} | {field.description}{more} |"


def _plain(value: object) -> object:
    return value.model_dump() if isinstance(value, BaseModel) else value


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))

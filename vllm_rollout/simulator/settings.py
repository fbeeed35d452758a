"""Settings: each is one way of running groups, written behind a flag ("redundancy=4,patience=1.5").

Invariant: a setting that has a plan can be replayed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

from vllm_rollout.config import DEFAULT_TRADEOFF
from vllm_rollout.kernel.parts import has
from vllm_rollout.kernel.rules.fields import (
    AUTO,
    MAX_NAME_CHARS,
    PLAN_FIELDS,
    ROWS,
    EarlyStop,
    LaunchRule,
    SelectionRule,
)
from vllm_rollout.kernel.rules.plan import GroupPlan, default_num_longest, make_plan, upper_bound
from vllm_rollout.kernel.rules.rows import Either, Flag, Names, PlanError, Row, Text
from vllm_rollout.simulator.parts import simulated


@dataclass(frozen=True, slots=True)
class Setting:
    group_size: int
    redundancy: int | Literal["auto"] = 0
    selection: SelectionRule = "first"
    num_longest: int | None = None
    patience: float | None = None
    early_stop: EarlyStop = None
    pruning: Any = None
    """Plan of the part of this name."""
    tradeoff: float = DEFAULT_TRADEOFF
    """Weight lambda of redundancy "auto"."""
    audit_ratio: float = 0.0
    """Share of groups in which no candidate is stopped (`parts/pruning/rules/audit.py`)."""
    audit_unit: Literal["rollout", "group"] = "rollout"
    order: LaunchRule = "auto"
    """Order in which groups start."""
    drafts: bool = False
    """True if answers to a prompt are drafts for each other."""
    label: str = ""

    def plan(self, max_candidates: int) -> GroupPlan:
        """The plan of every prompt. With redundancy "auto" it is the plan before candidates are allocated.

        Raises: PlanError.
        """
        group = {field: getattr(self, field) for field in PLAN_FIELDS}
        if self.redundancy == AUTO:
            group["redundancy"] = max(0, upper_bound(self.group_size, max_candidates) - self.group_size)
        parts = None if self.pruning is None else _pruning().terms(self.pruning)
        return make_plan(self.group_size, **group, parts=parts, max_candidates=max_candidates)

    @property
    def drafted(self) -> Setting:
        """This setting with drafts."""
        return replace(self, drafts=True, label=self.label and f"{self.label} drafts")

    @property
    def keeps_longest(self) -> bool:
        """True if the setting returns long answers on purpose."""
        return self.selection == "dual_end" and self._num_longest != 0 and self.redundancy != 0

    @property
    def _num_longest(self) -> int:
        return default_num_longest(self.group_size) if self.num_longest is None else self.num_longest

    @property
    def is_for_sessions(self) -> bool:
        """True if a server accepts the setting for groups of sessions."""
        said = Setting(self.group_size, self.redundancy, self.selection, early_stop=self.early_stop, label=self.label)
        return self == said and self.redundancy != AUTO and self.selection in ("first", "shortest")

    @property
    def name(self) -> str:
        return self.label or " ".join(self._words())

    def _words(self) -> list[str]:
        if not self.redundancy:
            words = [f"uniform n={self.group_size}"]
        elif self.redundancy == "auto":
            words = ["auto"]
        elif self.redundancy * 100 % self.group_size == 0:
            words = [f"{1 + self.redundancy / self.group_size:g}x"]
        else:
            words = [f"{self.group_size}+{self.redundancy}"]
        if self.selection == "dual_end":
            words.append(f"dual-end {self.group_size - self._num_longest}+{self._num_longest}")
        elif self.redundancy or self.selection != "first":
            words.append(self.selection)
            if self.early_stop is False:
                words.append("waits for all")
        if self.patience is not None:
            words.append(f"patience {self.patience:g}")
        if self.pruning is not None:
            words += _pruning().words(self.pruning)
        if self.tradeoff != DEFAULT_TRADEOFF:
            words.append(f"tradeoff {self.tradeoff:g}")
        if self.audit_ratio:
            words.append(f"{100 * self.audit_ratio:g} % audited by {self.audit_unit}")
        if self.order != "auto":
            words.append("in order of prompts")
        if self.drafts:
            words.append("drafts")
        return words

    def described(self) -> dict[str, Any]:
        """The setting as JSON-able values."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "label"}
        if self.pruning is not None:
            values["pruning"] = _pruning().described(self.pruning)
        return {"name": self.name, **values}


def default_sweep(group_size: int, max_candidates: int, pruning: Any = None) -> list[Setting]:
    """Settings to compare by default, the baseline first. A setting that does not fit the engine is left out."""
    baseline = Setting(group_size)
    spare = {share: max(1, round(share * group_size)) for share in (0.25, 0.5, 1)}
    settings = [baseline, *(Setting(group_size, redundancy) for redundancy in dict.fromkeys(spare.values()))]
    for redundancy in (spare[0.5], "auto"):
        dual_end = Setting(group_size, redundancy, "dual_end", default_num_longest(group_size))
        settings += [dual_end, replace(dual_end, patience=1.5)]
    if pruning is not None:
        settings.append(Setting(group_size, spare[0.5], pruning=pruning))
    return [s for s in settings if s.redundancy == "auto" or group_size + s.redundancy <= max_candidates]


def _pruning() -> Any:
    return simulated("pruning", "detection_length")


@cache
def setting_fields() -> Mapping[str, Row]:
    """Fields of a setting. Fields of pruning stand beside the others."""
    redundancy = replace(ROWS["redundancy"], flat=Either((ROWS["redundancy"].flat, Names((AUTO,)))))
    own: dict[str, Row] = {field.name: ROWS[field.name] for field in fields(Setting) if field.name in ROWS}
    drafts = Row(Flag(), "Siblings' tokens are verified several at a time.", (), Flag(), "")
    name = Row(Text(MAX_NAME_CHARS), "Labels it.", (), Text(MAX_NAME_CHARS), "")
    pruned = _pruning().FIELDS if has("pruning") else {}
    return own | {"redundancy": redundancy, "drafts": drafts, "name": name} | pruned


def parse_setting(text: str, group_size: int, pruning: Mapping[str, Any] | None = None) -> Setting:
    """Read a setting such as "redundancy=4,selection=dual_end,patience=1.5".

    `pruning` has defaults of pruning fields, used once the text names one of these fields.

    Raises: PlanError, or ValueError for an unknown field.
    """
    return setting_of(written_fields(text, setting_fields()), group_size, pruning)


def setting_of(given: Mapping[str, Any], group_size: int, pruning: Mapping[str, Any] | None = None) -> Setting:
    """Setting from values by field, as `parse_setting` reads them. Raises: PlanError."""
    names = {field.name for field in fields(Setting)} | {"name"}
    group = {field: value for field, value in given.items() if field in names}
    if pruned := {field: value for field, value in given.items() if field not in names}:
        pruned = {**(pruning or {}), **pruned}
        if "detection_length" not in pruned:
            raise PlanError("detection_length", "is needed to prune: output tokens after which candidates are scored.")
        group["pruning"] = _pruning().plan_of(pruned)
    label = group.pop("name", "")
    return Setting(**{"group_size": group_size, **group, "label": label})


def written_fields(text: str, rows: Mapping[str, Row]) -> dict[str, Any]:
    """Values by field. Raises: PlanError for a value, another ValueError for an unknown field."""
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise ValueError(f"expected field=value, got {part!r}")
        if key not in rows:
            raise ValueError(f"{key!r} is not a field; allowed: {', '.join(rows)}")
        if key in given:
            raise ValueError(f"{key} is given twice")
        given[key] = rows[key].read(value if isinstance(rows[key].flat, Text) else _literal(value), key)
    return given


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

"""Settings of runs: terms of their rounds, and how groups of short rounds run. Invariant: one that exists has terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_rollout.group.plans.fields import RunFields
from vllm_rollout.group.plans.plan import GroupPlan
from vllm_rollout.group.plans.rows import rows
from vllm_rollout.group.rounds.rounds import RunTerms
from vllm_rollout.simulator.settings import FIELDS as GROUP_FIELDS
from vllm_rollout.simulator.settings import Setting, setting_of, written_fields

TERMS = {field: row for field, row in rows(RunFields).items() if field != "group_size"}
NOT_OF_ROUNDS = ("group_size", "order", "audit_ratio", "audit_unit")
"""A round has its own size and order, and audits nobody."""
FIELDS = {**TERMS, **{field: row for field, row in GROUP_FIELDS.items() if field not in NOT_OF_ROUNDS}}


@dataclass(frozen=True, slots=True)
class RoundSetting:
    """One way of running a run."""

    terms: RunTerms
    group: Setting
    """The setting of a short round's groups; a long round's have `group_size` candidates, and all of them run to their
    ends."""
    label: str = ""

    @classmethod
    def of(cls, terms: RunTerms) -> RoundSetting:
        """With the terms' candidates, first come first kept."""
        return cls(terms, Setting(terms.group_size, terms.num_candidates - terms.group_size))

    @property
    def long_plan(self) -> GroupPlan:
        return GroupPlan(self.terms.group_size)

    @property
    def is_synchronous(self) -> bool:
        """A round waits for all prompts that it starts."""
        return self.terms.num_prompts == self.terms.prompts_per_round

    @property
    def asks_history(self) -> bool:
        """What it does depends on lengths of earlier rounds."""
        return self.group.redundancy == "auto" or self.terms.queue_order != "first_in"

    @property
    def name(self) -> str:
        return self.label or " ".join(self._words())

    def _words(self) -> list[str]:
        terms, group = self.terms, replace(self.group, drafts=False)
        words = []
        if self._is_plain and group.redundancy == terms.num_candidates - terms.group_size:
            prompts, responses = terms.prompt_speculation, terms.response_speculation
            if prompts == responses:
                words.append("synchronous" if prompts == 1 else f"both {prompts:g}x")
            else:
                words += [f"prompts {prompts:g}x"] * (prompts != 1) + [f"responses {responses:g}x"] * (responses != 1)
        else:
            words += [f"prompts {terms.prompt_speculation:g}x,"] * (terms.prompt_speculation != 1) + [group.name]
        if terms.queue_order != "first_in":
            words.append(f"{terms.queue_order} first")
        if self.group.drafts:
            words.append("drafts")
        return words

    @property
    def _is_plain(self) -> bool:
        """First come first kept."""
        return replace(self.group, drafts=False) == Setting(self.terms.group_size, self.group.redundancy)

    @property
    def drafted(self) -> RoundSetting:
        """The same with drafts, in short rounds and long ones."""
        return replace(self, group=self.group.drafted, label=self.label and f"{self.label} drafts")

    def described(self) -> dict[str, Any]:
        """JSON-able."""
        terms = {name: getattr(self.terms, name) for name in (*TERMS, "num_prompts", "num_candidates")}
        return {"name": self.name, **terms, "short_rounds": self.group.described()}


def synchronous(terms: RunTerms) -> RoundSetting:
    """P0 prompts of R0 candidates each, all of them waited for: what the others are compared with."""
    return RoundSetting.of(replace(terms, prompt_speculation=1.0, response_speculation=1.0, queue_order="first_in"))


def responses_only(setting: RoundSetting) -> RoundSetting:
    """The same groups without prompts to spare."""
    return replace(setting, terms=replace(setting.terms, prompt_speculation=1.0, queue_order="first_in"), label="")


def with_baselines(settings: Sequence[RoundSetting]) -> list[RoundSetting]:
    """Each of them once, behind what it is compared with.

    Raises: ValueError when they return different numbers of prompts.
    """
    sizes = sorted({setting.terms.prompts_per_round for setting in settings})
    if len(sizes) > 1:
        raise ValueError(
            f"prompts_per_round must be the same in all settings, got {', '.join(map(str, sizes))}: rounds that return "
            "different numbers of prompts cannot be compared"
        )
    baselines = [synchronous(settings[0].terms), *map(responses_only, settings)]
    return list(dict.fromkeys([*baselines, *settings]))


def default_rounds(prompts_per_round: int, group_size: int) -> list[RoundSetting]:
    """What to compare when only the round's size is said: prompts only, and both."""
    both = RunTerms(group_size, prompts_per_round)
    return [RoundSetting.of(replace(both, response_speculation=1.0)), RoundSetting.of(both)]


def parse_rounds(text: str, group_size: int, pruning: Mapping[str, Any] | None = None) -> RoundSetting:
    """A setting from "prompts_per_round=128,prompt_speculation=1.5"; fields of groups stand beside those of rounds.

    pruning: what a setting that prunes need not say.

    Raises: PlanError, or ValueError for what is no field or out of range.
    """
    given = written_fields(text, FIELDS)
    terms = {field: given.pop(field) for field in TERMS if field in given}
    if "prompts_per_round" not in terms:
        raise ValueError("prompts_per_round is missing: the prompts that a round returns")
    group = setting_of(given, group_size, pruning)
    if "redundancy" in given:
        if "response_speculation" in terms:
            raise ValueError(
                "redundancy says how many candidates a prompt has, as response_speculation does: leave one out"
            )
        factor = 1.0 if group.redundancy == "auto" else 1 + group.redundancy / group_size
        its = RunTerms(group_size, **terms, response_speculation=factor)
    else:
        its = RunTerms(group_size, **terms)
        group = replace(group, redundancy=its.num_candidates - group_size)
    return RoundSetting(its, replace(group, label=""), group.label)

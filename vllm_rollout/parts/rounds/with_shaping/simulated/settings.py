"""Settings of runs: the terms of their rounds, and the setting of the groups of short rounds.

Invariant: every setting has terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.rows import rows
from vllm_rollout.parts.rounds.rules.fields import RunFields
from vllm_rollout.parts.rounds.rules.rounds import RunTerms
from vllm_rollout.simulator.settings import Setting, setting_fields, setting_of, written_fields

TERMS = {field: row for field, row in rows(RunFields).items() if field != "group_size"}
NOT_OF_ROUNDS = ("group_size", "order", "audit_ratio", "audit_unit")
"""Fields of groups that rounds do not take. A round has its own size and order, and audits no group."""


@dataclass(frozen=True, slots=True)
class RoundSetting:
    """Terms of a run's rounds, and the setting of their groups."""

    terms: RunTerms
    group: Setting
    """Setting of a short round's groups. A long round's groups have `group_size` candidates, and all of them run to
    their ends."""
    label: str = ""

    @classmethod
    def of(cls, terms: RunTerms) -> RoundSetting:
        """Setting with the terms' number of candidates, of which the first to finish are kept."""
        return cls(terms, Setting(terms.group_size, terms.num_candidates - terms.group_size))

    @property
    def long_plan(self) -> GroupPlan:
        return GroupPlan(self.terms.group_size)

    @property
    def is_synchronous(self) -> bool:
        """True if a round waits for all prompts that it starts."""
        return self.terms.num_prompts == self.terms.prompts_per_round

    @property
    def asks_history(self) -> bool:
        """True if rounds depend on lengths of earlier rounds."""
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
        """True if all fields of the groups but redundancy and drafts have their defaults."""
        return replace(self.group, drafts=False) == Setting(self.terms.group_size, self.group.redundancy)

    @property
    def drafted(self) -> RoundSetting:
        """This setting with drafts, in short and long rounds."""
        return replace(self, group=self.group.drafted, label=self.label and f"{self.label} drafts")

    def described(self) -> dict[str, Any]:
        """The setting as JSON-able values."""
        terms = {name: getattr(self.terms, name) for name in (*TERMS, "num_prompts", "num_candidates")}
        return {"name": self.name, **terms, "short_rounds": self.group.described()}


def synchronous(terms: RunTerms) -> RoundSetting:
    """Baseline of the comparison: rounds that wait for all of their P0 prompts, with R0 candidates each."""
    return RoundSetting.of(replace(terms, prompt_speculation=1.0, response_speculation=1.0, queue_order="first_in"))


def responses_only(setting: RoundSetting) -> RoundSetting:
    """The setting with equal groups but without spare prompts."""
    return replace(setting, terms=replace(setting.terms, prompt_speculation=1.0, queue_order="first_in"), label="")


def with_baselines(settings: Sequence[RoundSetting]) -> list[RoundSetting]:
    """Each setting once, after the settings that it is compared with.

    Raises: ValueError if settings return different numbers of prompts.
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
    """Settings to compare if only the round's size is given: spare prompts only, and spare prompts and responses."""
    both = RunTerms(group_size, prompts_per_round)
    return [RoundSetting.of(replace(both, response_speculation=1.0)), RoundSetting.of(both)]


def parse_rounds(text: str, group_size: int, pruning: Mapping[str, Any] | None = None) -> RoundSetting:
    """Read "prompts_per_round=128,prompt_speculation=1.5". Fields of groups stand beside fields of rounds.

    `pruning`: defaults for a setting that prunes.

    Raises: PlanError, or ValueError for a field that is unknown or out of range.
    """
    of_groups = {field: row for field, row in setting_fields().items() if field not in NOT_OF_ROUNDS}
    given = written_fields(text, TERMS | of_groups)
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

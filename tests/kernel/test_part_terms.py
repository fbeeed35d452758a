"""Terms that parts make from fields of a request, with a part of these tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from vllm_rollout.kernel import parts
from vllm_rollout.kernel.part_terms import check_given, part_tables, terms_of
from vllm_rollout.kernel.parts import WITHOUT, Part
from vllm_rollout.kernel.rules.plan import GroupJoin, make_join, make_plan
from vllm_rollout.kernel.rules.rows import Integer, PlanError, row
from vllm_rollout.kernel.rules.terms_port import Origin, PartTerms, TermsPart, resumed_of, said_of

ORIGIN = Origin("g", "digest", 7)
NAMES = {"ripe": "fruit.ripe", "picked": "fruit.picked"}


@dataclass(frozen=True)
class FruitFields:
    ripe: int = row(Integer(1, 9), "Days.")
    picked: int = row(Integer(0, 9), "Days.", default=0)


class OtherFields(FruitFields):
    """A table of no part."""


@dataclass(frozen=True, slots=True)
class FruitTerms(PartTerms):
    ripe: int
    share: float = 0.0
    is_audited: bool = False

    def check(self, group_size: int, num_candidates: int, spare_field: str, names: Mapping[str, str]) -> None:
        if self.ripe > num_candidates:
            raise PlanError(names.get("ripe", "ripe"), f"more than {num_candidates} candidates, add {spare_field}")

    def audited(self, races: bool) -> FruitTerms:
        return replace(self, is_audited=races)

    def with_audits(self, ratio: float) -> FruitTerms:
        return replace(self, share=ratio)

    def said(self, origin: Origin) -> str:
        return f"{origin.group_id} {self.ripe}"

    def resumed(self, said: str, num_tokens: int, survival: float) -> str:
        return f"{said} after {num_tokens}, {survival}"


class FruitRequests(TermsPart):
    table = FruitFields

    def given(self, fields: Collection[str], names: Mapping[str, str]) -> None:
        if "ripe" not in fields:
            raise PlanError(names["picked"], f"needs {names['ripe']}")

    def terms(self, fields: Mapping[str, Any], names: Mapping[str, str]) -> FruitTerms:
        return FruitTerms(fields["ripe"])


LISTED = (Part("fruit", "", faces={"terms": f"{__name__}:FruitRequests"}), Part("salt", ""))


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lists two parts in place of ours."""
    monkeypatch.setattr(parts, "installed_parts", lambda: {part.name: part for part in LISTED})
    parts.parts.cache_clear()
    yield
    monkeypatch.undo()
    parts.parts.cache_clear()


def fruit(ripe: int = 3) -> dict[str, PartTerms]:
    return terms_of(FruitFields, {"ripe": ripe}, NAMES)


def test_a_part_makes_its_terms_from_its_fields_and_tags_carry_them():
    plan = make_plan(2, 2, parts=fruit(), max_candidates=8)
    assert plan.parts == plan.terms.parts == {"fruit": FruitTerms(3)}
    assert plan.pruning is None, "the part does not stop candidates"
    assert make_plan(2, 2, parts=terms_of(FruitFields, {}, NAMES), max_candidates=8).parts == {}


def test_terms_that_the_plan_contradicts_are_refused_in_the_words_of_the_user():
    with pytest.raises(PlanError, match=r"fruit\.ripe: more than 4 candidates, add spare"):
        make_plan(2, 2, parts=fruit(5), max_candidates=8, names={**NAMES, "redundancy": "spare"})
    with pytest.raises(PlanError, match="ripe: more than 4 candidates, add num_candidates"):
        make_join(GroupJoin(2, 4, parts=fruit(5)), max_candidates=8)


def test_a_field_that_needs_another_is_refused_before_values_are_read():
    check_given(FruitFields, [], NAMES)
    check_given(FruitFields, ["ripe", "picked"], NAMES)
    with pytest.raises(PlanError, match=r"fruit\.picked: needs fruit\.ripe"):
        check_given(FruitFields, ["picked"], NAMES)


def test_terms_change_with_the_audit_of_their_group():
    assert make_plan(2, 2, parts=fruit(), max_candidates=8).audited().parts == {"fruit": FruitTerms(3, is_audited=True)}
    assert make_plan(4, parts=fruit(), max_candidates=8).audited().parts == fruit()
    assert GroupJoin(2, 4, parts=fruit()).with_audits(0.5).parts == {"fruit": FruitTerms(3, 0.5)}


def test_candidates_carry_a_value_for_each_part_that_has_one():
    its = {**fruit(), "silent": PartTerms()}
    said = said_of(its, ORIGIN)
    assert said == {"fruit": "g 3"}
    assert resumed_of(its, {**said, "silent": 1, "other": 2}, 5, 0.5) == {"fruit": "g 3 after 5, 0.5", "silent": 1}


def test_tables_are_known_also_of_a_part_that_is_left_out(monkeypatch):
    assert part_tables() == [FruitFields]
    monkeypatch.setenv(WITHOUT, "fruit")
    parts.parts.cache_clear()
    assert part_tables() == [FruitFields]


def test_a_field_whose_part_is_left_out_is_refused_with_a_remedy(monkeypatch):
    monkeypatch.setenv(WITHOUT, "fruit")
    parts.parts.cache_clear()
    remedy = r"Leave it out, or start the server with the part\."
    for asked in (lambda: fruit(), lambda: check_given(FruitFields, ["ripe"], NAMES)):
        with pytest.raises(PlanError, match=rf"fruit\.ripe: this server runs without the part 'fruit'\. {remedy}"):
            asked()
    with pytest.raises(PlanError, match="ripe: no part of this server reads it"):
        terms_of(OtherFields, {"ripe": 8}, {})

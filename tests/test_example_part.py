"""The part of examples/part, whose rule a reader may copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.parts import load
from vllm_rollout.kernel.rules.plan import make_plan
from vllm_rollout.kernel.rules.rows import PlanError
from vllm_rollout.kernel.rules.step import GroupSteps
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.types import CandidateId

FOLDER = Path(__file__).parents[1] / "examples/part"


@pytest.fixture(scope="module", autouse=True)
def importable():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield


@pytest.fixture(scope="module")
def rules():
    return load("stragglers.rules")


def test_every_place_of_the_part_is_there():
    part = load("stragglers:PART")
    assert part.purpose
    assert all(load(reference) is not None for reference in part.faces.values())


@given(
    group_size=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 100), min_size=5, max_size=8),
    factor=st.floats(1, 4),
    ended=st.integers(1, 30),
)
def test_the_longest_stop_and_never_more_than_are_spare(rules, group_size, lengths, factor, ended):
    """One candidate ends with `ended` tokens, while each of the others has one of `lengths`."""
    steps = GroupSteps([rules.StragglerStep()])
    num = len(lengths) + 1
    terms = GroupTerms(group_size, num, early_stop=False, parts={"stragglers": rules.StragglerTerms(factor)})
    for _ in range(num):
        _, group = steps.launch("g", terms)
    steps.ended(CandidateId("g", 0), group, "stop", ended)
    stopped = steps.close_step({}, lambda id: lengths[id.index - 1]).stop
    assert {id.index for id in stopped} == set(group.indices) - {0, *group.running}
    assert set(stopped.values()) <= {"surplus"}
    out = sorted((lengths[id.index - 1] for id in stopped), reverse=True)
    too_long = sorted((length for length in lengths if length >= factor * ended), reverse=True)
    assert out == too_long[: num - group_size]


def test_without_spare_candidates_the_field_is_refused(rules):
    terms = {"stragglers": rules.StragglerTerms(2.0)}
    assert make_plan(2, redundancy=1, parts=terms, max_candidates=8).parts == terms
    with pytest.raises(PlanError, match="only spare candidates stop"):
        make_plan(2, parts=terms, max_candidates=8)

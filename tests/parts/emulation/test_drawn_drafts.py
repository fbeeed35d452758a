"""Made-up drafts: how many there are, and how often they are right."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.parts.drafts.acceptance import REFERENCE_SIBLINGS, DraftKind, DraftSettings, share_factor
from vllm_rollout.parts.drafts.with_emulation.worker import NO_DRAFTS, draw
from vllm_rollout.parts.emulation.settings import Settings, settings_type

DEFAULT = DraftSettings()
NUM_DRAWN = 20_000


@pytest.mark.parametrize(("at_least", "drafted", "tokens"), [(0.5, 0.58, 1.38), (0.3, 0.80, 1.45), (0.1, 1.57, 1.58)])
def test_by_default_running_siblings_give_what_was_measured(at_least, drafted, tokens):
    taken = [(kind.share, [p for p in kind.accepted if p >= at_least]) for kind in DEFAULT.kinds]
    assert sum(share * len(kept) for share, kept in taken) == pytest.approx(drafted, abs=0.07)
    assert 1 + sum(share * sum(kept) for share, kept in taken) == pytest.approx(tokens, abs=0.015)


def test_drafts_are_right_as_often_as_their_probabilities_say_and_kinds_come_with_their_shares():
    drawn = [draw(DEFAULT, 1.0, salt, number) for salt in range(200) for number in range(NUM_DRAWN // 200)]
    for kind in DEFAULT.kinds:
        its = [each.num_right for each in drawn if each.probabilities == kind.accepted]
        assert len(its) / NUM_DRAWN == pytest.approx(kind.share, abs=0.01)
        for place, probability in enumerate(kind.accepted):
            right = sum(num_right > place for num_right in its) / len(its)
            assert right == pytest.approx(probability, abs=3.5 * (probability * (1 - probability) / len(its)) ** 0.5)
    rest = 1 - sum(kind.share for kind in DEFAULT.kinds)
    assert drawn.count(NO_DRAFTS) / NUM_DRAWN == pytest.approx(rest, abs=0.01)


@given(st.integers(0, 2**53), st.integers(1, 10**6))
def test_a_draw_repeats_and_a_smaller_factor_finds_no_more(salt, number):
    drawn = draw(DEFAULT, 0.5, salt, number)
    assert drawn == draw(DEFAULT, 0.5, salt, number)
    assert draw(DEFAULT, 0.0, salt, number) == NO_DRAFTS
    if drawn != NO_DRAFTS:
        assert draw(DEFAULT, 1.0, salt, number) != NO_DRAFTS
    assert 0 <= drawn.num_right <= len(drawn.probabilities)


def test_more_answers_are_more_drafts_and_shares_hold_for_fifteen_siblings():
    factors = [share_factor(DEFAULT, siblings, 0) for siblings in (0, 1, 3, 7, REFERENCE_SIBLINGS)]
    assert factors[0] == DEFAULT.alone
    assert factors[-1] == pytest.approx(1.0)
    doubling = (1 - DEFAULT.alone) / 4
    assert [after - before for before, after in pairwise(factors)] == [pytest.approx(doubling)] * 4
    assert share_factor(DEFAULT, 7, 8) == pytest.approx(share_factor(DEFAULT, 7 + 8 * 6, 0))
    tokens = [1 + share_factor(DEFAULT, *known) * 0.58 for known in ((15, 0), (7, 8))]
    assert tokens[1] - tokens[0] == pytest.approx(0.15, abs=0.02)


def test_no_row_has_two_kinds_however_many_answers_are_known():
    assert share_factor(DEFAULT, 10**9, 10**9) * sum(kind.share for kind in DEFAULT.kinds) == pytest.approx(1.0)
    assert share_factor(DraftSettings(kinds=()), 15, 0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("drafts", "said"),
    [
        ({"kinds": [{"share": 0.6, "accepted": [0.5]}] * 2}, "must sum to 1 or less, got 1.2"),
        ({"kinds": [{"share": 0.5, "accepted": [0.2, 0.3]}]}, "must not increase"),
        ({"kinds": [{"share": 0.5, "accepted": []}]}, "at least 1 item"),
        ({"kinds": [{"share": 0.5, "accepted": [0.5] * 13}]}, "at most 12 items"),
        ({"kinds": [{"share": 0.5, "accepted": [0.0]}]}, "greater than 0"),
        ({"alone": 1.5}, "less than or equal to 1"),
        ({"estimates": []}, "drafts.estimates: is not a field"),
    ],
)
def test_what_cannot_be_is_refused_by_field(tmp_path, drafts, said):
    path = tmp_path / "device.json"
    path.write_text(json.dumps({"drafts": drafts}))
    with pytest.raises(ValueError, match="drafts") as refusal:
        Settings.read(path)
    assert said in str(refusal.value)


def test_a_file_says_its_kinds():
    settings = settings_type().model_validate({"drafts": {"kinds": [{"share": 0.5, "accepted": [1.0, 0.25]}]}})
    assert settings.drafts.kinds == (DraftKind(share=0.5, accepted=(1.0, 0.25)),)

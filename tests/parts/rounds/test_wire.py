"""Values of rounds survive the codecs between our processes."""

from tests.kernel.test_wire import assert_note_arrives, assert_tag_arrives
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.types import TooLate
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.rounds.rules.race import RacePlace
from vllm_rollout.parts.rounds.rules.step import LOST, PLACE


def test_a_place_in_a_race_reaches_the_scheduler_as_it_was():
    assert_tag_arrives(CandidateTag("g", 1, GroupTerms(4, 8), 64, PLACE.value(RacePlace("round", 3, 7))))


def test_a_group_that_was_too_late_is_said_to_the_api_process():
    assert_note_arrives(LOST.value(TooLate()))

"""Drafts, kept answers and refusals of a draft memory, in C++ and in Python alike."""

import math
import sys

import numpy as np
import pytest

from vllm_rollout.build_command import build_command
from vllm_rollout.parts.drafts.worker.memory import DraftMemory, draft_memory_implementation
from vllm_rollout.parts.drafts.worker.memory_reference import VOTE_KEPT
from vllm_rollout.parts.observing.tracker import dispatch


@pytest.fixture(params=["c++", "python"], autouse=True)
def implementation(request, monkeypatch):
    """The one that every memory of the test has."""
    monkeypatch.setenv(dispatch.OPS_VARIABLE, "auto" if request.param == "c++" else "torch")
    found = draft_memory_implementation()
    if found.name != request.param:
        pytest.skip(found.reason)
    return found


def memory(max_bytes=1_000_000, **limits):
    return DraftMemory(max_bytes, **limits)


def step(drafts_of, rows, longest=4):
    """Append `rows`, tokens by sequence; tokens and probabilities drafted for each."""
    width = max(len(tokens) for tokens in rows.values())
    padded = np.array([tokens + [-1] * (width - len(tokens)) for tokens in rows.values()], np.int32)
    drafts = drafts_of.step(np.array(list(rows)), padded.reshape(len(rows), width), np.full(len(rows), longest))
    assert ((drafts.tokens == -1) == (drafts.probabilities == 0)).all()
    return [
        ([token for token in tokens if token != -1], [p for p in probabilities if p])
        for tokens, probabilities in zip(drafts.tokens.tolist(), drafts.probabilities.tolist(), strict=True)
    ]


def drafted(drafts_of, sequence, tokens, longest=4):
    return step(drafts_of, {sequence: tokens}, longest)[0][0]


def answered(answers, key="p", **limits):
    """A memory in which a prompt has these answers, and one candidate that has begun."""
    made = memory(**limits)
    for answer in answers:
        filled(made, key, answer)
    return made, made.begin(key, [])


def filled(made, key, tokens):
    number = made.begin(key, [])
    step(made, {number: tokens}, 0)
    made.end([number])


def expected(share, votes, match):
    support = (match + 0.5) * votes**0.5
    return share**1.5 * support / (support + 2.6)


def test_a_sibling_that_wrote_the_same_is_followed_with_the_probabilities_of_one_vote():
    made, running = answered([[1, 2, 3, 4, 5, 6, 7]])
    [(tokens, probabilities)] = step(made, {running: [2, 3]})
    assert tokens == [4, 5, 6, 7]
    assert probabilities == pytest.approx(np.cumprod([expected(1, 1, match) for match in (2, 3, 4, 5)]))


def test_a_divided_vote_is_won_by_the_majority_and_by_the_most_recent_of_equals():
    made, running = answered([[1, 2, 8], [1, 2, 9], [1, 2, 9]])
    assert step(made, {running: [1, 2]}, 1) == [([9], [pytest.approx(expected(2 / 3, 3, 2))])]
    made, running = answered([[1, 2, 9], [1, 2, 8], [3, 2, 9], [3, 2, 9]])
    assert step(made, {running: [1, 2]}, 1) == [([8], [pytest.approx(expected(1 / 2, 2, 2))])]


def test_a_longer_match_outvotes_any_number_of_shorter_ones():
    made, running = answered([[5, 1, 2, 8], [6, 1, 2, 9], [7, 1, 2, 9], [7, 1, 2, 9]])
    assert drafted(made, running, [5, 1, 2], 1) == [8]


def test_a_match_counts_up_to_its_maximum_only():
    answers = [[5, 1, 2, 8], [6, 1, 2, 9]]
    made, running = answered(answers, max_match=3)
    assert drafted(made, running, [5, 1, 2], 1) == [8]
    made, running = answered(answers, max_match=2)
    assert step(made, {running: [5, 1, 2]}, 1) == [([9], [pytest.approx(expected(1 / 2, 2, 2))])]
    [(_, probabilities)] = step(answered([list(range(20))], max_match=2)[0], {1: [4, 5, 6]}, 3)
    assert probabilities == pytest.approx(np.cumprod([expected(1, 1, 2)] * 3))


def test_nothing_is_drafted_below_the_shortest_match():
    made, running = answered([[1, 2, 3, 4]], min_match=3)
    assert drafted(made, running, [2]) == []
    assert drafted(made, running, [3]) == []
    made.end([running])
    running = made.begin("p", [])
    assert drafted(made, running, [1, 2, 3]) == [4]


def test_only_the_most_recent_places_are_looked_at():
    answers = [[7, 1, 8], [6, 1, 9], [5, 1, 9]]
    made, running = answered(answers, max_places=3)
    assert drafted(made, running, [7, 1], 1) == [8]
    made, running = answered(answers, max_places=2)
    assert drafted(made, running, [7, 1], 1) == [9]


def test_where_the_voters_end_others_that_follow_the_drafts_go_on():
    made, running = answered([[4, 5, 6], [1, 2, 3, 4, 5]])
    assert drafted(made, running, [2, 3]) == [4, 5, 6]
    made, running = answered([[3, 4, 4, 8, 4], [1, 2, 3, 4]])
    assert drafted(made, running, [1, 2], 3) == [3, 4, 4]


def test_losers_of_a_vote_do_not_vote_on():
    made, running = answered([[1, 2, 9, 4], [1, 2, 8, 7], [1, 2, 8, 7]])
    [(tokens, probabilities)] = step(made, {running: [1, 2]}, 2)
    assert tokens == [8, 7]
    assert probabilities == pytest.approx([expected(2 / 3, 3, 2), expected(2 / 3, 3, 2) * expected(1, 2, 3)])


def test_all_rows_are_appended_before_any_is_drafted_for():
    made = memory()
    first, second = made.begin("p", []), made.begin("p", [])
    [ours, theirs] = step(made, {first: [1, 2], second: [1, 2, 3, 4]})
    assert ours == ([3, 4], pytest.approx([expected(1, 1, 2), expected(1, 1, 2) * expected(1, 1, 3)]))
    assert theirs == ([], [])


def test_a_candidate_drafts_from_its_own_text_but_not_from_where_it_stands():
    made = memory()
    running = made.begin("p", [])
    assert drafted(made, running, [1, 2, 3]) == []
    assert drafted(made, running, [1, 2]) == [3, 1, 2, 3]


def test_the_prompt_is_a_source_and_what_follows_it_too():
    made = memory()
    first = made.begin("p", [7, 8, 9])
    assert drafted(made, first, [7]) == [8, 9, 7, 8]
    made.end([first])
    second = made.begin("p", [7, 8, 9])
    assert step(made, {second: []}, 2) == [([7, 8], pytest.approx(np.cumprod([expected(1, 1, 3), expected(1, 1, 1)])))]


def test_a_context_that_leaves_the_first_ones_is_followed_through_what_they_share():
    made = memory(min_match=3)
    first = made.begin("p", [1, 2, 3, 4])
    second = made.begin("p", [1, 2, 3, 5, 6, 7])
    assert drafted(made, second, [1, 2, 3], 3) == [5, 6, 7]
    assert drafted(made, first, [2, 3, 5], 3) == [6, 7, 1]


def test_candidates_of_other_prompts_are_never_seen():
    made, _ = answered([[1, 2, 3, 4]], key="tenant/p")
    other = made.begin("other tenant/p", [])
    assert drafted(made, other, [1, 2, 3]) == []
    assert made.num_prompts == 2


def test_each_row_is_drafted_for_up_to_its_own_length():
    made, running = answered([[1, 2, 3, 4, 5]])
    other = made.begin("p", [])
    tokens = np.array([[2], [2]], np.int32)
    drafts = made.step(np.array([running, other]), tokens, np.array([1, 3]))
    assert drafts.tokens.tolist() == [[3, -1, -1], [3, 4, 5]]
    assert (drafts.tokens.dtype, drafts.probabilities.dtype) == (np.int32, np.float32)
    assert made.step(np.array([running]), tokens[:1], np.array([0])).tokens.shape == (1, 0)
    assert made.step(np.zeros(0, int), np.zeros((0, 3), np.int32), np.zeros(0, int)).tokens.shape == (0, 0)


def read(drafts_of, tokens, longest=1, key="p"):
    """Tokens and probabilities drafted for a candidate of which nothing stays."""
    reader = drafts_of.begin(key, [])
    [found] = step(drafts_of, {reader: tokens}, longest)
    drafts_of.end([reader], keep=False)
    return found


def test_what_is_older_has_less_of_a_vote_for_each_version():
    made, _ = answered([[1, 2, 8], [1, 2, 8]])
    made.age()
    filled(made, "p", [1, 2, 9])
    old, new = 2 * VOTE_KEPT, 1
    assert read(made, [1, 2]) == ([8], [pytest.approx(expected(old / (old + new), old + new, 2))])
    made.age()
    old, new = 2 * VOTE_KEPT**2, VOTE_KEPT
    assert read(made, [1, 2]) == ([8], [pytest.approx(expected(old / (old + new), old + new, 2))])
    filled(made, "p", [1, 2, 9])
    new += 1
    assert read(made, [1, 2]) == ([9], [pytest.approx(expected(new / (old + new), old + new, 2))])


def test_what_only_old_answers_say_is_less_and_less_probable():
    made, _ = answered([[1, 2, 8]])
    made.age()
    assert read(made, [1, 2]) == ([8], [pytest.approx(expected(1, VOTE_KEPT, 2))])
    for _ in range(100):
        made.age()
    assert read(made, [1, 2]) == ([8], [pytest.approx(expected(1, VOTE_KEPT**30, 2))])


def test_a_candidate_that_runs_counts_as_new_whatever_it_wrote_under():
    made = memory()
    writer, reader = made.begin("p", []), made.begin("p", [])
    step(made, {writer: [1, 2, 3]}, 0)
    made.age()
    assert step(made, {reader: [1, 2]}, 1) == [([3], [pytest.approx(expected(1, 1, 2))])]
    made.end([writer])
    made.age()
    other = made.begin("p", [])
    assert step(made, {other: [2]}, 1) == [([3], [pytest.approx(expected(1, VOTE_KEPT, 1))])]


def test_nothing_stays_of_what_is_not_kept():
    made = memory()
    for keep, left in ((False, []), (True, [3, 4])):
        first, second = made.begin("p", []), made.begin("p", [])
        step(made, {first: [1, 2, 3, 4]}, 0)
        made.end([first], keep)
        assert drafted(made, second, [1, 2]) == left
        made.end([second], False)
        assert (made.num_prompts > 0) == (made.num_bytes > 0) == keep


def test_what_is_left_keeps_its_order_when_one_is_taken_out():
    made, running = answered([[1, 2, 8], [1, 2, 9]])
    out = made.begin("p", [])
    step(made, {out: [1, 2, 7]}, 0)
    made.end([out], keep=False)
    assert drafted(made, running, [1, 2], 1) == [9]


def test_the_least_recently_used_prompt_leaves_first_and_its_first_answer_first():
    made = memory(20_000)
    texts = {name: list(range(start, start + 128)) for name, start in (("a", 0), ("a again", 1000), ("b", 2000))}
    filled(made, "a", texts["a"])
    filled(made, "a", texts["a again"])
    filled(made, "b", texts["b"])
    reader = made.begin("a", [])
    step(made, {reader: [9999]}, 0)
    for start in range(10_000, 20_000, 1000):
        filled(made, "c", list(range(start, start + 128)))
        assert made.num_bytes <= 20_000
        left = [name for name, text in texts.items() if _is_known(made, name[0], text)]
        assert left in (["a", "a again", "b"], ["a", "a again"], ["a again"], [])
        texts = {name: texts[name] for name in left}
    assert texts == {}


def _is_known(made, key, text):
    """True if the text is stored. The check does not count as a use of its prompt."""
    number = made.begin("reader", [])
    made.end([number], keep=False)
    other = memory()
    other.load(made.dump())
    return drafted(other, other.begin(key, []), text[:1], 1) == text[1:2]


def test_what_runs_is_stored_no_further_than_there_is_room_and_goes_on():
    made = memory(10_000)
    hostile, other = made.begin("p", []), made.begin("q", [])
    for _ in range(20):
        step(made, {hostile: list(range(10)) * 10}, 0)
        assert made.num_bytes <= 10_000
    assert drafted(made, other, [1, 2, 1]) == []
    assert drafted(made, hostile, [1, 2]) == [3, 4, 5, 6]
    assert drafted(made, hostile, [77, 78, 77]) == []
    made.end([hostile])
    step(made, {other: [1, 2, 3]}, 0)
    again = made.begin("q", [])
    assert drafted(made, again, [1]) == [], "what was cut is not taken up again"
    step(made, {again: [7, 8, 9, 7]}, 0)
    assert drafted(made, again, [8], 1) == [9], "a new one evicts what has ended"


def test_where_something_is_removed_only_the_most_recent_places_stay():
    made = memory(max_places=2)
    filled(made, "p", [1, 7])
    recent, gone, reader = (made.begin("p", []) for _ in range(3))
    step(made, {recent: [1, 8, 1, 9], gone: [2]}, 0)
    made.end([gone], keep=False)
    made.end([recent], keep=False)
    assert drafted(made, reader, [1], 1) == [], "a removal looks at no older place, however many there are"


def test_the_last_byte_is_used_and_not_one_more():
    text = list(range(130))
    enough = memory()
    step(enough, {enough.begin("p", []): text}, 0)
    for max_bytes, last in ((enough.num_bytes, 129), (enough.num_bytes - 1, 127)):
        made = memory(max_bytes)
        step(made, {made.begin("p", []): text}, 0)
        assert _is_known(made, "p", [last - 1, last])
        assert last == 129 or not _is_known(made, "p", [last, last + 1])


def test_beginning_more_than_fits_costs_its_record_only():
    made = memory(0)
    numbers = [made.begin("p", list(range(1000))) for _ in range(10)]
    assert made.num_bytes == 768 + 2 + 10 * (320 + 16 * 16)
    assert step(made, {number: [1, 2] for number in numbers}) == [([], [])] * 10
    made.end(numbers)
    assert made.num_bytes == 0


def test_memory_is_linear_and_siblings_share_their_prompt():
    rng = np.random.default_rng(0)
    made = memory(10**9)
    numbers = [made.begin("p", rng.integers(0, 50_000, 1000)) for _ in range(2)]
    prompt = rng.integers(0, 50_000, 4096)
    before = made.num_bytes
    numbers.append(made.begin("q", prompt))
    first = made.num_bytes - before
    assert 8 * 4096 < first < 20 * 4096
    made.begin("q", prompt)
    assert made.num_bytes - before - first == 320 + 16 * 16


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda m, n: m.step(np.array([99]), np.array([[1]], np.int32), np.array([1])),
            "must be one that runs, got 99",
        ),
        (lambda m, n: m.step(np.array([n, n]), np.ones((2, 1), np.int32), np.ones(2, int)), f"got {1} twice"),
        (lambda m, n: m.step(np.array([n]), np.array([[1, -2]], np.int32), np.array([1])), "got -2 at 1"),
        (lambda m, n: m.step(np.array([n]), np.array([[1, -1, 2]], np.int32), np.array([1])), "got 2 at 2"),
        (lambda m, n: m.step(np.array([n]), np.array([[1]], np.int32), np.array([-1])), "not be negative, got -1"),
        (lambda m, n: m.step(np.array([n]), np.array([[1]], np.int32), np.array([2**32])), "below 2"),
        (lambda m, n: m.step(np.array([n]), np.array([[1]]), np.array([1])), r"int32 \[1, width\], got int64 \[1, 1\]"),
        (lambda m, n: m.step(np.array([n]), np.array([1], np.int32), np.array([1])), r"got int32 \[1\]"),
        (lambda m, n: m.step(np.array([n]), np.array([[1]], np.int32), np.array([1, 1])), r"longest must be .* \[2\]"),
        (lambda m, n: m.step(np.array([1.5]), np.array([[1]], np.int32), np.array([1])), "sequences must be integers"),
        (lambda m, n: m.end([n, 99]), "must be one that runs, got 99"),
        (lambda m, n: m.end([n, n]), "got 1 twice"),
        (lambda m, n: m.begin("p", [1, -1]), "context must be tokens of 0 to"),
        (lambda m, n: m.begin("p", [2**31]), "context must be tokens of 0 to"),
        (lambda m, n: m.begin("p", [[1]]), "in one dimension"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_changed(call, said):
    made, running = answered([[1, 2, 3]])
    before = made.dump()
    with pytest.raises(ValueError, match=said):
        call(made, running)
    assert made.dump() == before
    assert drafted(made, running, [2]) == [3]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_bytes": -1}, "max_bytes must be at least 0"),
        ({"min_match": 0}, "min_match must be at least 1"),
        ({"min_match": 5, "max_match": 4}, "max_match must be at least 5"),
        ({"max_places": 0}, "max_places must be at least 1"),
    ],
)
def test_limits_that_cannot_be_are_refused(limits, said):
    with pytest.raises(ValueError, match=said):
        memory(**limits)


def test_what_was_dumped_drafts_elsewhere_as_it_did_here():
    made, running = answered([[1, 2, 8, 4], [1, 2, 8, 5]], key="ü\ud800")
    step(made, {running: [1, 2, 9]}, 0)
    made.age()
    made.age()
    other = memory()
    other.load(made.dump())
    assert other.num_prompts == 1
    reader = other.begin("ü\ud800", [])
    old = 2 * VOTE_KEPT**2
    assert step(other, {reader: [1, 2]}, 1) == [([8], [pytest.approx(expected(old / (old + 1), old + 1, 2))])]
    assert read(made, [1, 2], key="ü\ud800")[0] == [8]
    other.end([reader], keep=False)
    assert other.dump() == made.dump()


def test_a_prompt_that_is_known_by_another_context_takes_in_what_branches_off_what_they_share():
    made = memory()
    early = made.begin("p", [1, 2, 3, 4])
    late = made.begin("p", [1, 2])
    step(made, {early: [30, 31], late: [40, 41]}, 0)
    other = memory()
    here = other.begin("p", [1, 2, 7])
    other.load(made.dump())
    assert drafted(other, here, [40]) == [41]
    assert drafted(other, here, [30]) == []


def test_loading_more_than_there_is_room_for_leaves_the_most_recently_used():
    made = memory()
    for name in "abcdefgh":
        filled(made, name, list(range(128)))
    small = memory(10_000)
    small.load(made.dump())
    assert small.num_bytes <= 10_000
    assert [drafted(small, small.begin(name, []), [5], 1) for name in "ah"] == [[], [6]]


def test_which_implementation_serves_is_said(implementation):
    assert (memory().implementation.name, memory().implementation.reason) in (
        ("c++", None),
        ("python", "VLLM_ROLLOUT_OPS=torch"),
    )
    assert implementation == memory().implementation


def test_without_the_type_in_csrc_the_specification_serves_and_the_remedy_is_said(monkeypatch):
    monkeypatch.setenv(dispatch.OPS_VARIABLE, "auto")
    extension = pytest.importorskip("vllm_rollout._C")
    monkeypatch.delattr(extension, "DraftMemory", raising=False)
    said = f"vllm_rollout._C was built before it had DraftMemory: run `{build_command()}` to rebuild it"
    assert (memory().implementation.name, memory().implementation.reason) == ("python", said)
    monkeypatch.setitem(sys.modules, "vllm_rollout._C", None)
    monkeypatch.delattr("vllm_rollout._C", raising=False)
    assert memory().implementation.reason == f"vllm_rollout._C is not built: run `{build_command()}`"


def test_probabilities_never_grow_along_a_row():
    rng = np.random.default_rng(1)
    made, running = answered([rng.integers(0, 4, 200).tolist() for _ in range(5)])
    for token in rng.integers(0, 4, 50).tolist():
        [(_, probabilities)] = step(made, {running: [token]}, 12)
        assert probabilities == sorted(probabilities, reverse=True)
        assert all(0 < p <= 1 and math.isfinite(p) for p in probabilities)

"""Outcomes of emulated candidates: the stated distributions, and the same outcomes for the same seed."""

import json
import math
from itertools import product
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.rules.prompt_key import digest_of, history_key
from vllm_rollout.parts.emulation.fate import ENDLESS, Fates, TracedLengths, forced_length
from vllm_rollout.parts.emulation.settings import Settings
from vllm_rollout.parts.shaping.rules.trace import TracedCandidate, TracedPrompt


def fates_of(settings: dict, num_prompts: int = 200, num_candidates: int = 20) -> list[list]:
    fates = Fates(Settings.model_validate(settings))
    return [
        [fates.of([prompt, 7], index, index, {}) for index in range(num_candidates)] for prompt in range(num_prompts)
    ]


def test_lengths_have_the_stated_mean_and_spread_within_and_among_prompts():
    drawn = fates_of({"lengths": {"log_normal": {"mean": 500, "sigma": 0.5, "prompt_sigma": 0.4}}})
    logs = [[math.log(fate.length) for fate in prompt] for prompt in drawn]
    assert fmean(fate.length for prompt in drawn for fate in prompt) == pytest.approx(500, rel=0.06)
    assert fmean(map(stdev, logs)) == pytest.approx(0.5, rel=0.05)
    assert stdev(map(fmean, logs)) == pytest.approx(math.hypot(0.4, 0.5 / math.sqrt(20)), rel=0.1)


def test_no_length_is_beyond_the_cap():
    drawn = fates_of({"lengths": {"log_normal": {"mean": 500, "sigma": 1.5, "cap": 600}}}, num_prompts=20)
    assert max(fate.length for prompt in drawn for fate in prompt) == 600


@pytest.mark.parametrize("auc", [0.3, 0.5, 0.75, 0.95])
def test_scores_have_the_stated_auc(auc):
    drawn = [fate for prompt in fates_of({"score": {"auc": auc}}, 100) for fate in prompt]
    pairs = list(product((f.score for f in drawn if f.succeeds), (f.score for f in drawn if not f.succeeds)))
    assert fmean(above > below for above, below in pairs) == pytest.approx(auc, abs=0.03)


def test_success_has_the_stated_rate_and_depends_on_length_as_stated():
    success = {"rate": 0.7, "log_odds_per_doubling": -1.0, "reference_length": 400}
    fates = Fates(Settings.model_validate({"success": success}))

    def rate(length: int) -> float:
        forced = {"emulate_lengths": length}
        return fmean(fates.of([prompt], 0, 0, forced).succeeds for prompt in range(4000))

    odds = 0.7 / 0.3
    for length, expected in ((400, odds), (800, odds / math.e), (100, odds * math.e**2)):
        assert rate(length) == pytest.approx(expected / (1 + expected), abs=0.02)


@pytest.mark.parametrize("mean", [1, 4])
def test_conversations_have_the_stated_turns_however_many_there_were(mean):
    fates = Fates(Settings.model_validate({"turns": {"mean": mean}}))

    def num_turns(key: int) -> int:
        prompt = [7]
        while fates.of(prompt, key, None, {}).asks:
            prompt += [key, 8]
        return 1 + len(prompt) // 2

    drawn = [num_turns(key) for key in range(3000)]
    assert fmean(drawn) == pytest.approx(mean, rel=0.05)
    assert drawn == [num_turns(key) for key in range(3000)]
    assert not Fates(Settings()).of([7], 0, None, {}).asks


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_rate_without_chance_is_kept(rate):
    drawn = fates_of({"success": {"rate": rate, "prompt_sigma": 2.0}}, 20)
    assert {fate.succeeds for prompt in drawn for fate in prompt} == {bool(rate)}


def test_a_fate_follows_from_seed_prompt_and_key():
    def draw(seed: int, prompt: list[int], key: object):
        return Fates(Settings(seed=seed)).of(prompt, key, 0, {})

    assert draw(1, [1, 2], 5) == draw(1, [1, 2], 5)
    assert len({draw(1, [1, 2], 5), draw(2, [1, 2], 5), draw(1, [1, 3], 5), draw(1, [1, 2], 6)}) == 4


@given(st.lists(st.integers(1, 10**6), min_size=1), st.one_of(st.none(), st.integers(0, 100)))
def test_forced_lengths_go_by_index_and_begin_again(lengths, index):
    assert forced_length({"emulate_lengths": lengths}, index) == lengths[(index or 0) % len(lengths)]


@pytest.mark.parametrize("wanted", [0, -1, 1.5, True, "9", [], [3, 0], [3, None], {}])
def test_a_length_that_cannot_be_forced_is_an_error_that_names_it(wanted):
    with pytest.raises(ValueError, match="emulate_lengths must be a number of tokens, 1 or more"):
        forced_length({"emulate_lengths": wanted}, 0)


def prompt(id: str, *lengths: int, key: str = "", end: str = "stop") -> TracedPrompt:
    return TracedPrompt(id, tuple(TracedCandidate(length, end) for length in lengths), key=key)


def lengths(source: TracedLengths, tokens: list[int], num: int, name: str = "") -> list[int]:
    return [source.of(digest_of(tokens), name, index, 0.5, 0.5) for index in range(num)]


def test_a_traced_prompt_is_found_by_its_key_or_its_name_and_others_come_in_turn():
    rows = [prompt("a", 1, 2), prompt("b", 3, key=history_key(None, [9])), prompt("c", 4)]
    source = TracedLengths(rows, rank=0, num_ranks=1)
    assert lengths(source, [9], 2) == [3, 3]
    assert lengths(source, [5], 3) == [1, 2, 1]
    assert lengths(source, [6], 1) == [3]
    assert lengths(source, [7], 1, name="c") == [4]
    assert lengths(source, [5], 1) == [1]


def test_ranks_take_turns_through_a_trace():
    rows = [prompt(str(row), row + 1) for row in range(4)]
    sources = [TracedLengths(rows, rank, 2) for rank in range(2)]
    assert [[lengths(source, [i], 1)[0] for i in range(3)] for source in sources] == [[1, 3, 2], [2, 4, 3]]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 6, 8])
def test_every_rank_plays_every_prompt_of_a_trace_as_often(num_ranks):
    rows = [prompt(str(row), row + 1) for row in range(4)]
    for rank in range(num_ranks):
        source = TracedLengths(rows, rank, num_ranks)
        played = [lengths(source, [i], 1)[0] for i in range(16)]
        assert sorted(played) == sorted([1, 2, 3, 4] * 4)


def test_candidates_without_an_index_are_counted():
    source = TracedLengths([prompt("a", 1, 2, 3)], 0, 1)
    assert [source.of("x", "", None, 0.5, 0.5) for _ in range(4)] == [1, 2, 3, 1]


def test_stopped_candidates_count_only_alone_and_cut_ones_are_endless():
    candidates = (TracedCandidate(5, "surplus"), TracedCandidate(7), TracedCandidate(9, "length"))
    mixed = TracedPrompt("a", candidates)
    assert lengths(TracedLengths([mixed], 0, 1), [1], 2) == [7, ENDLESS]
    assert lengths(TracedLengths([prompt("a", 5, end="surplus")], 0, 1), [1], 1) == [5]


def test_of_a_prompt_that_was_recorded_several_times_the_row_with_the_most_whole_answers_is_played():
    raced = TracedPrompt("q1", (TracedCandidate(90), *[TracedCandidate(90, "surplus")] * 3))
    source = TracedLengths([prompt("q1", 100, 900, 700, 800), raced, prompt("q1", 1, 2, 3, 4), raced], 0, 1)
    assert lengths(source, [1], 4, "q1") == [1, 2, 3, 4]


def test_a_trace_named_in_the_settings_is_read_beside_them(tmp_path):
    (tmp_path / "trace.jsonl").write_text(json.dumps({"prompt_id": "q", "lengths": [11, 12]}) + "\n")
    (tmp_path / "device.json").write_text(json.dumps({"lengths": {"trace": "trace.jsonl"}}))
    fates = Fates(Settings.read(tmp_path / "device.json"))
    assert [fates.of([1], 0, index, {}).length for index in range(2)] == [11, 12]

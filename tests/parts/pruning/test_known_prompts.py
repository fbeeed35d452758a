import pytest

from vllm_rollout.parts.pruning.rules.known_prompts import in_order, known_prompts, prompt_rows
from vllm_rollout.parts.pruning.rules.success import SuccessHistory
from vllm_rollout.parts.shaping.rules.history import LengthHistory, ObservedLength


def histories() -> tuple[LengthHistory, SuccessHistory]:
    lengths, successes = LengthHistory(), SuccessHistory()
    for key, *num_tokens in (("a", 4, 8), ("b", 5), ("c", 2, 2), ("a", 4, 8)):
        lengths.observe(key, [ObservedLength(length, censored=False) for length in num_tokens])
    for key, positive in (("c", True), ("a", False), ("a", True), ("joined", True)):
        successes.observe(key, positive)
    return lengths, successes


def known(size: int = 512):
    return known_prompts(row for some in prompt_rows(*histories(), size) for row in some)


def test_the_last_seen_comes_first_and_each_prompt_once():
    prompts = known()
    assert [(p.key, p.prompts_ago) for p in prompts] == [("a", 0), ("c", 1), ("b", 2), ("joined", None)]
    a, c, b, joined = prompts
    assert (a.lengths.mean, a.lengths.variance, a.lengths.num_groups) == pytest.approx((6, 8, 2))
    assert b.lengths is None, "one length has no spread"
    assert b.success is None
    assert a.success.num_rewarded > 1.9
    assert c.success.rate == joined.success.rate == 1
    assert joined.lengths is None
    assert known(size=1) == prompts


def test_least_successful_first_and_unknown_last():
    assert [p.key for p in in_order(known(), "success")] == ["a", "c", "joined", "b"]
    assert in_order(known(), "last_seen") == known()


def test_a_prompt_that_is_seen_while_rows_are_read_comes_once():
    lengths, successes = histories()
    rows = prompt_rows(lengths, successes, 1)
    read = next(rows)  # of the one without lengths
    lengths.observe("joined", [ObservedLength(3, censored=False)] * 2)
    read += [row for some in rows for row in some]
    assert sorted(p.key for p in known_prompts(read)) == ["a", "b", "c", "joined"]

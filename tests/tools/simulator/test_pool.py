import math
import random
from statistics import fmean

from tests.tools.simulator.traces import traced
from vllm_rollout.parts.shaping.rules.trace import Trace, TracedCandidate, TracedPrompt, TracedRollout
from vllm_rollout.simulator.race import Pools


def trace_of(*candidates: TracedCandidate, max_tokens: int | None = None) -> Trace:
    return Trace((TracedRollout((TracedPrompt("q", candidates, max_tokens=max_tokens),)),))


def lengths(pool):
    return [candidate.num_tokens for candidate in pool]


def test_the_first_candidates_are_the_recorded_ones():
    pools = Pools(traced({"q": [5, 9, 7]}, max_tokens=9))
    pool = pools.candidates(0, 0, 0, 2)
    assert lengths(pool) == [5, 9]
    assert [c.end for c in pool] == ["stop", "length"]
    assert not any(c.resampled for c in pool)


def test_more_candidates_are_the_recorded_ones_once_more():
    pools = Pools(traced({"q": [5, 9, 7]}))
    pool = pools.candidates(0, 0, 0, 40)
    assert lengths(pool[:3]) == [5, 9, 7]
    assert set(lengths(pool[3:])) == {5, 7, 9}
    assert [c.resampled for c in pool] == [False] * 3 + [True] * 37
    assert pools.candidates(0, 0, 0, 12) == pool[:12]


def test_later_epochs_are_resampled_and_differ():
    pools = Pools(traced({"q": list(range(1, 30))}))
    epochs = [lengths(pools.candidates(epoch, 0, 0, 20)) for epoch in range(3)]
    assert epochs[0] == list(range(1, 21))
    assert epochs[1] != epochs[2]


def test_the_same_seed_draws_the_same_candidates_in_any_order():
    trace = traced({"a": [5, 9], "b": [1, 2]}, {"a": [5, 9]})
    forwards, backwards = Pools(trace, 3), Pools(trace, 3)
    places = [(0, 0), (0, 1), (1, 0)]
    drawn = {place: forwards.candidates(0, *place, 20) for place in places}
    assert {place: backwards.candidates(0, *place, 20) for place in reversed(places)} == drawn
    assert drawn[0, 0] != drawn[1, 0]
    assert Pools(trace, 4).candidates(0, 0, 0, 20) != drawn[0, 0]


def test_stopped_candidates_run_on_beyond_their_stop():
    stopped = [TracedCandidate(50, "surplus"), TracedCandidate(20, "pruned"), TracedCandidate(0, "surplus")]
    trace = trace_of(TracedCandidate(30), TracedCandidate(50), *stopped, max_tokens=400)
    pool = Pools(trace).candidates(0, 0, 0, 5)
    assert lengths(pool[:2]) == [30, 50]
    for recorded, completed in zip(stopped, pool[2:], strict=True):
        assert recorded.num_tokens < completed.num_tokens <= 400
        assert completed.num_known == recorded.num_tokens
        assert completed.end == ("length" if completed.num_tokens == 400 else "stop")


def test_drawn_lengths_restore_the_distribution_that_early_stop_hid():
    chance = random.Random(1)
    full, prompts = [], []
    for number in range(200):
        own = [max(1, round(math.exp(6 + 0.7 * chance.gauss(0, 1)))) for _ in range(16)]
        stop = sorted(own)[7]
        full += own
        seen = (TracedCandidate(min(n, stop), "stop" if n <= stop else "surplus") for n in own)
        prompts.append(TracedPrompt(str(number), tuple(seen), max_tokens=10**6))
    pools = Pools(Trace((TracedRollout(tuple(prompts)),)))
    drawn = [n for i in range(200) for n in lengths(pools.candidates(0, 0, i, 16))]
    assert abs(fmean(drawn) / fmean(full) - 1) < 0.1
    assert abs(sorted(drawn)[-320] / sorted(full)[-320] - 1) < 0.15

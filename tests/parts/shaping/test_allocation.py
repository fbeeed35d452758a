import itertools
import math
import statistics
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.config import DEFAULT_TRADEOFF
from vllm_rollout.kernel.rules.plan import GroupPlan, make_plan, upper_bound
from vllm_rollout.parts.shaping.rules.allocation import (
    BatchPrompt,
    Budget,
    allocate,
    allocate_batch,
    allocated,
    extreme_tails,
    normalized_weights,
    optimal_budget,
)
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.parts.shaping.rules.moments import LengthMoments

weights = st.lists(st.one_of(st.floats(0, 1), st.just(0.0), st.sampled_from([0.5, 1.0])), min_size=1, max_size=30)
FLAT = CostModel(((0.0, PTLCurve((1.0, 4096.0), (0.01, 0.01))),))
"""Every step takes 10 ms, whatever the batch."""
PROPORTIONAL = CostModel(((0.0, PTLCurve((1.0, 4096.0), (0.001, 4.096))),))
"""A candidate adds 1 ms to a step."""
MIXED = CostModel(((0.0, PTLCurve((1.0, 4096.0), (0.0101, 0.4196))),))
"""10 ms and 0.1 ms for each candidate."""


def lengths(mean: float, std: float) -> LengthMoments:
    return LengthMoments(mean, std**2, 3)


def objective(weights: list[float], shares: tuple[int, ...]) -> float:
    """Objective of DARTS Eq. 5."""
    return math.fsum(weight / share for weight, share in zip(weights, shares, strict=True))


@st.composite
def problems(draw, max_size=30, max_lower=8):
    weight = draw(weights.filter(lambda w: len(w) <= max_size))
    lower = draw(st.integers(1, max_lower))
    upper = draw(st.integers(lower, 2 * max_lower))
    return weight, draw(st.integers(len(weight) * lower, len(weight) * upper)), lower, upper


@settings(max_examples=60, deadline=None)
@given(problems(max_size=4, max_lower=3))
def test_shares_are_the_optimum_of_eq_5(problem):
    weight, total, lower, upper = problem
    shares = allocate(*problem)
    possible = itertools.product(range(lower, upper + 1), repeat=len(weight))
    best = min(objective(weight, candidate) for candidate in possible if sum(candidate) == total)
    assert objective(weight, tuple(shares)) == pytest.approx(best, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_shares_are_those_of_algorithm_1(problem):
    """Written down as printed, with our order among ties."""
    weight, total, lower, upper = problem
    shares = [lower] * len(weight)
    for _ in range(total - len(weight) * lower):
        open_ones = [i for i in range(len(weight)) if shares[i] < upper]
        most = max(open_ones, key=lambda i: (weight[i] / (shares[i] * (shares[i] + 1)), -shares[i], weight[i], -i))
        shares[most] += 1
    assert allocate(*problem) == shares


def test_a_hundred_thousand_prompts():
    num = 100_000
    weight = [(i * 7919 % num) / num for i in range(num)]
    shares = allocate(weight, 12 * num, 8, 16)
    assert sum(shares) == 12 * num
    assert {min(shares), max(shares)} == {8, 16}
    # what is left over gains nobody anything: no candidate could move to a prompt that gains more
    worst_given = min(w / ((m - 1) * m) for w, m in zip(weight, shares, strict=True) if m > 8)
    best_refused = max(w / (m * (m + 1)) for w, m in zip(weight, shares, strict=True) if m < 16)
    assert best_refused <= worst_given


@pytest.mark.parametrize(
    ("stds", "weights"),
    [
        ([10.0, 30.0, 20.0], [0.0, 1.0, 0.5]),
        ([10.0, None, 30.0, 12.0], [0.0, 0.1, 1.0, 0.1]),  # new: the median
        *((alike, [1.0, 1.0]) for alike in ([None, None], [5.0, 5.0], [5.0, None], [0.0, 0.0])),
    ],
)
def test_weights_are_min_max_normalised(stds, weights):
    assert normalized_weights(stds) == weights


@pytest.mark.parametrize(
    ("dataset", "cost"), [(None, MIXED), (lengths(500, 300), None), (None, None), (lengths(0, 0), MIXED)]
)
def test_without_profile_or_history_the_budget_is_the_papers_average(dataset, cost):
    budget = optimal_budget(dataset, cost, lower=64, upper=128)
    assert (budget.total, budget.source) == (96, "default")
    assert (budget.optimum, budget.seconds_per_candidate, budget.base_s) == (None, None, None)
    assert optimal_budget(dataset, cost, lower=64, upper=80).total == 80


def test_the_budget_maximises_gain_less_time():
    """Eq. 8 against every budget between the bounds."""
    budget = optimal_budget(lengths(500, 250), MIXED, lower=64, upper=128)
    assert budget.source == "profile"
    assert budget.rho == pytest.approx(0.5)
    assert 64 < budget.optimum < 128

    def utility(total: int) -> float:
        seconds = budget.base_s + budget.seconds_per_candidate * (total - 64)
        return budget.rho * math.log(total) - DEFAULT_TRADEOFF * seconds / budget.base_s

    assert abs(max(range(64, 129), key=utility) - budget.optimum) <= 1
    assert budget.total == math.floor(budget.optimum)


@pytest.mark.parametrize(
    ("std", "cost", "max_tokens", "total", "optimum"),
    [
        (250, PROPORTIONAL, None, 64, pytest.approx(0.5 * 64, rel=0.1)),  # redundancy does not pay
        (300, FLAT, None, 128, pytest.approx(234, rel=0.5)),  # only longer tails take time
        (300, FLAT, 1, 128, None),  # candidates cost no time
        (0, MIXED, None, 64, 0.0),  # nothing to gain
    ],
)
def test_the_budget_follows_what_candidates_cost(std, cost, max_tokens, total, optimum):
    budget = optimal_budget(lengths(500, std), cost, lower=64, upper=128, max_tokens=max_tokens)
    assert (budget.total, budget.optimum) == (total, optimum)


@pytest.mark.parametrize("tradeoff", [0.25, 2.0])
def test_a_larger_tradeoff_buys_less(tradeoff):
    base = optimal_budget(lengths(500, 250), MIXED, lower=64, upper=128)
    other = optimal_budget(lengths(500, 250), MIXED, lower=64, upper=128, tradeoff=tradeoff)
    assert other.optimum == pytest.approx(base.optimum / tradeoff)
    assert other.total < base.total if tradeoff > 1 else other.total > base.total


@pytest.mark.parametrize("max_tokens", [200, 5000])
def test_rho_is_of_the_lengths_as_they_run(max_tokens):
    """Against 20,000 quantiles of the distribution, cut."""
    log_std = 1.0
    normal = NormalDist(6.0, log_std)
    quantiles = [math.exp(normal.inv_cdf((i + 0.5) / 20_000)) for i in range(20_000)]
    mean = math.exp(6.0 + 0.5)
    dataset = lengths(mean, mean * math.sqrt(math.e - 1))
    cut = [min(x, max_tokens) for x in quantiles]
    budget = optimal_budget(dataset, None, lower=8, upper=16, max_tokens=max_tokens)
    assert budget.rho == pytest.approx(statistics.pstdev(cut) / statistics.fmean(cut), rel=0.02)


@settings(max_examples=40, deadline=None)
@given(
    st.floats(0, 1e15),
    st.floats(0, 1e18),
    st.integers(1, 64),
    st.integers(0, 64),
    st.sampled_from([FLAT, PROPORTIONAL, MIXED]),
    st.sampled_from([1, 1024]),
)
def test_any_history_gives_a_budget_within_its_bounds(mean, std, lower, spare, cost, max_tokens):
    budget = optimal_budget(lengths(mean, std), cost, lower=lower, upper=lower + spare, max_tokens=max_tokens)
    assert lower <= budget.total <= lower + spare
    for value in (budget.optimum, budget.rho, budget.seconds_per_candidate, budget.base_s):
        assert value is None or math.isfinite(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tradeoff": 0.0}, "tradeoff must be a positive number, got 0.0"),
        ({"tradeoff": math.nan}, "tradeoff must be a positive number"),
        ({"tradeoff": math.inf}, "tradeoff must be a positive number"),
    ],
)
def test_budgets_without_a_meaning_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        optimal_budget(lengths(500, 300), MIXED, **{"lower": 64, "upper": 128, **change})


def test_a_batch_gives_most_to_the_prompts_that_spread_most():
    prompts = [BatchPrompt(lengths(500, std)) for std in (10, 400, 30, 20)]
    batch = allocate_batch(prompts, lengths(500, 300), None, group_size=8, max_candidates=64)
    assert batch.budget.total == 48
    assert [p.num_candidates for p in batch.prompts] == [8, 16, 14, 10]
    assert [p.at_upper_bound for p in batch.prompts] == [False, True, False, False]
    assert [p.std_tokens for p in batch.prompts] == [10, 400, 30, 20]
    assert batch.prompts[1].weight == 1


@pytest.mark.parametrize(
    ("seen", "max_candidates", "upper", "share", "at_upper_bound"),
    [(lengths(500, 10), 8, 8, 8, False), (lengths(500, 10), 11, 11, 11, True), (None, 64, 16, 12, False)],
)
def test_prompts_alike_share_alike_within_what_the_engine_runs_at_once(
    seen, max_candidates, upper, share, at_upper_bound
):
    batch = allocate_batch([BatchPrompt(seen)] * 2, None, None, group_size=8, max_candidates=max_candidates)
    assert (batch.budget.lower, batch.budget.upper) == (16, 2 * upper)
    assert [(p.num_candidates, p.at_upper_bound) for p in batch.prompts] == [(share, at_upper_bound)] * 2


def test_every_prompt_gets_the_plan_of_its_share():
    prompts = [BatchPrompt(lengths(500, std)) for std in (10, 400)]
    batch = allocate_batch(prompts, lengths(500, 200), None, group_size=4, max_candidates=64)
    assert [p.extreme for p in batch.prompts] == [False, True]
    plan = GroupPlan(4, upper_bound(4, 64) - 4, False, "dual_end", 1)
    assert (
        batch.plans(plan)
        == batch.plans(plan, "auto")
        == [GroupPlan(4, 0, False, "dual_end", 1), GroupPlan(4, 4, True, "shortest")]
    )
    assert [its.early_stop for its in batch.plans(plan, False)] == [False, False]


@pytest.mark.parametrize(("num", "most"), [(20, 1), (39, 1), (40, 2), (128, 6), (1000, 50)])
def test_the_twentieth_that_spreads_most_is_extreme(num, most):
    assert sum(extreme_tails([float(i) for i in range(num)], 1.0)) == most


@pytest.mark.parametrize(
    ("stds", "usual", "extreme"),
    [
        ([500.0], 300.0, [True]),
        ([400.0], 300.0, [False]),
        ([500.0, 480.1, 100.0], 300.0, [True, True, False]),
        ([None], 300.0, [False]),
        ([500.0], None, [False]),
        ([500.0], 0.0, [False]),
        ([], None, []),
    ],
)
def test_among_few_prompts_the_history_says_whose_tail_is_extreme(stds, usual, extreme):
    assert extreme_tails(stds, usual) == extreme


@given(st.lists(st.none() | st.floats(0, 1e18), max_size=80), st.none() | st.floats(0, 1e18), st.randoms())
def test_extreme_prompts_are_few_the_heaviest_and_the_same_in_any_order(stds, usual, chance):
    extreme = dict(zip(stds, extreme_tails(stds, usual), strict=True))
    known = [std for std in stds if std is not None]
    if len(known) >= 20:
        assert sum(extreme[std] for std in known) <= 0.05 * len(known)
    for std in known:
        assert not extreme[std] or all(extreme[other] for other in known if other >= std)
    shuffled = chance.sample(stds, len(stds))
    assert extreme_tails(shuffled, usual) == [extreme[std] for std in shuffled]


def test_a_prompts_deviation_is_of_lengths_cut_at_its_max_tokens():
    """Four groups of which most ran into the cap: what is expected beyond would outweigh everything else."""
    seen = [lengths(4000, 12_836), lengths(900, 1200), lengths(300, 200), lengths(60, 40)]
    batch = allocate_batch([BatchPrompt(one, 100, 1024) for one in seen], None, None, group_size=8, max_candidates=64)
    stds = [prompt.std_tokens for prompt in batch.prompts]
    assert max(stds) <= 512, "half of max_tokens at each end is the most that lengths can vary"
    assert stds[3] == pytest.approx(40, rel=0.02)
    assert batch.prompts[2].weight > 0.3, "uncut it would be 0.01"


def test_a_batch_is_priced_with_its_mean_prompt_and_its_largest_limit():
    def budget(*prompts: BatchPrompt) -> Budget:
        return allocate_batch(prompts, lengths(500, 300), MIXED, group_size=8, max_candidates=64).budget

    mixed = budget(BatchPrompt(None, 100, 300), BatchPrompt(None, 300), BatchPrompt(None, 200, 600))
    assert mixed == budget(*[BatchPrompt(None, 200, 600)] * 3)
    assert mixed != budget(*[BatchPrompt(None, 200, 300)] * 3)


def test_only_a_prompt_with_an_extreme_tail_takes_the_shortest_and_stops_early():
    plan = make_plan(4, 4, selection="dual_end", patience=1.5, max_candidates=8)
    assert allocated(plan, 8, extreme=False) == plan
    assert allocated(plan, 8, extreme=True) == GroupPlan(4, 4, True, "shortest")
    assert allocated(plan, 8, extreme=True, early_stop=False) == GroupPlan(4, 4, False, "shortest")

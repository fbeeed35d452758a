"""Numbers of pruning at `/metrics`."""

from tests.kernel.http.test_metrics import samples


async def test_every_series_of_pruning_is_there_before_the_first_rollout(http):
    values = await samples(http)
    names = ["rewards_total.conflict", "labels_total.positive", "score_count.head", "survival_probability_count"]
    assert [values[name] for name in names] == [0] * 4

from collections.abc import Callable

import pytest

from tests.kernel.core.scheduler_runs import LOOPS, TracedRun, add_group
from tests.parts.moving.moving_runs import Ranks
from tests.parts.moving.ranked_llm import Cluster, Rank
from tests.support.time_limit import end_within
from vllm_rollout.parts.moving.api import moving


@pytest.fixture(params=LOOPS, ids=lambda loop: loop.name)
def loop(request):
    """vLLM's synchronous and its asynchronous step loop."""
    return request.param


@pytest.fixture
def new_run(loop, tiny_model):
    """Makes a TracedRun of that loop, with our scheduler unless told otherwise."""

    def make(scheduler_cls=loop.scheduler_cls, **kwargs) -> TracedRun:
        return TracedRun(scheduler_cls, tiny_model, depth=loop.depth, **kwargs)

    return make


@pytest.fixture
def new_ranks(new_run):
    """Makes TracedRuns between which groups move, two of them unless told otherwise."""
    return lambda **kwargs: Ranks(new_run, **kwargs)


@pytest.fixture
def two(new_ranks) -> Ranks:
    """Ranks of which the first runs a group `g` of two, of 50 and 70 tokens."""
    ranks = new_ranks()
    add_group(ranks.runs[0], "g", [50, 70], group_size=2)
    ranks.until("g-1", 20)
    return ranks


@pytest.fixture
def new_cluster(new_ranks, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cluster]:
    """Makes clients and their ranks, where nobody waits for a clock; the test ends after two minutes."""
    monkeypatch.setattr(moving, "LOOK_S", 0.0)
    monkeypatch.setattr(moving, "FOLLOW_S", 0.0)

    def make(num_ranks: int = 2, num_api_processes: int = 1) -> Cluster:
        end_within(120)
        return Cluster(new_ranks(core_cls=Rank, num_ranks=num_ranks), num_api_processes)

    return make

from collections.abc import Callable

import pytest

from tests.kernel.api.conftest import parsed, refusal, restored  # noqa: F401
from tests.kernel.core.conftest import loop, new_run  # noqa: F401
from tests.kernel.core.scheduler_runs import add_group
from tests.kernel.http.conftest import app, client, engine, http, server_url  # noqa: F401
from tests.parts.moving.moving_runs import Ranks
from tests.parts.moving.ranked_llm import Cluster, Rank
from tests.support.time_limit import end_within
from vllm_rollout.parts.moving.api import moving


@pytest.fixture
def new_ranks(new_run):  # noqa: F811
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

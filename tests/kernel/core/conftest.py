import pytest

from tests.kernel.core.scheduler_runs import LOOPS, TracedRun


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

from tests.tools.simulator.conftest import invoke, numbers, run  # noqa: F401

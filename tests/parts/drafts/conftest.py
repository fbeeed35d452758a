from tests.kernel.api.conftest import parsed, refusal, restored  # noqa: F401
from tests.tools.simulator.conftest import invoke, numbers, run  # noqa: F401

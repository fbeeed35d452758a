from tests.kernel.api.conftest import parsed, refusal, restored  # noqa: F401
from tests.kernel.core.conftest import loop, new_run  # noqa: F401
from tests.kernel.http.conftest import app, engine, http  # noqa: F401

from tests.kernel.api.conftest import parsed, refusal, restored  # noqa: F401
from tests.kernel.core.conftest import loop, new_run  # noqa: F401
from tests.kernel.http.conftest import app, client, engine, http, server_url  # noqa: F401
from tests.parts.moving.conftest import new_cluster, new_ranks  # noqa: F401
from tests.parts.sessions.turns import turns, url  # noqa: F401

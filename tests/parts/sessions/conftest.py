from tests.kernel.http.conftest import app, clock, engine, http, service  # noqa: F401
from tests.parts.sessions.turns import turns, url  # noqa: F401

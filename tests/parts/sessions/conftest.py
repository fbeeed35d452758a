from tests.kernel.http.conftest import app, engine, http  # noqa: F401
from tests.parts.sessions.fakes import clock, service  # noqa: F401
from tests.parts.sessions.turns import turns, url  # noqa: F401

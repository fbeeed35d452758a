from tests.kernel.http.conftest import app, clock, engine, http, service  # noqa: F401

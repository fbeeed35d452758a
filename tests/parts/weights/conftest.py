from tests.kernel.http.conftest import app, engine, http  # noqa: F401

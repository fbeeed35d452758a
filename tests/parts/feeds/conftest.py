from tests.kernel.http.conftest import app, client, engine, http, server_url  # noqa: F401

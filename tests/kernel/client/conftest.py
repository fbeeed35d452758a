"""The clients are tested against the app around a FakeEngine, over a socket."""

from tests.kernel.http.conftest import app, client, engine, server_url  # noqa: F401

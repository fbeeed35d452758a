"""The clients are tested against the app around a FakeEngine, over a socket."""

from tests.client.turns import turns, url  # noqa: F401
from tests.server.conftest import app, client, engine, server_url  # noqa: F401

"""A proxy that records the requests of a trainer: method, path, headers that matter, JSON body.

Runs in the trainer's environment: standard library and httpx. Invariant: requests and answers pass unchanged.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

HEADERS = ("x-data-parallel-rank", "x-session-id", "x-request-id", "x-correlation-id", "content-type")
"""Headers that a server may act on."""
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "accept-encoding"}
MAX_KEPT = 200


class Recorder:
    """A proxy's URL, and what passed through it: requests, statuses, and answers in JSON with their requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.answers: list[tuple[dict[str, Any], Any]] = []

    def samples(self) -> list[dict[str, Any]]:
        """One request of each kind, for tests to replay."""
        return samples(self.requests)


def samples(requests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The first request of each method, path and set of fields."""
    kept: dict[Any, dict[str, Any]] = {}
    for request in requests:
        kept.setdefault(
            (request["method"], request["path"].partition("?")[0], shape(request.get("body"))), dict(request)
        )
    return list(kept.values())


def without_folders(requests: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """The requests with each folder of this machine replaced by its name."""
    text = json.dumps(list(requests))
    for folder, name in names.items():
        text = text.replace(json.dumps(folder)[1:-1], name)
    return json.loads(text)


def shape(body: Any) -> str:
    """Names of a body's fields, at any depth, without values."""
    if isinstance(body, Mapping):
        return "{" + ",".join(f"{name}:{shape(body[name])}" for name in sorted(body)) + "}"
    if isinstance(body, list):
        return f"[{shape(body[0]) if body else ''}]"
    return ""


class Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """With the default of 5, one of many connections at once waits a second before it is tried again."""


@contextmanager
def recording(url: str, timeout_s: float = 600.0) -> Iterator[Recorder]:
    """A proxy before the server at `url`, until the block ends."""
    with httpx.Client(base_url=url, timeout=timeout_s, trust_env=False) as upstream:

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                content = self.rfile.read(int(self.headers.get("content-length") or 0))
                request = _entry(self.command, self.path, self.headers, content)
                recorder.requests = [*recorder.requests, request][-MAX_KEPT:]
                headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
                try:
                    with upstream.stream(self.command, self.path, headers=headers, content=content) as answer:
                        recorder.statuses.append(answer.status_code)
                        self.send_response(answer.status_code)
                        for name, value in answer.headers.items():
                            if name.lower() not in {*HOP_BY_HOP, "content-encoding"}:
                                self.send_header(name, value)
                        if (
                            length := answer.headers.get("content-length")
                        ) and "content-encoding" not in answer.headers:
                            self.send_header("content-length", length)  # SkyRL reads no body without it
                        self.send_header("connection", "close")  # the end of the body is the end of the connection
                        self.end_headers()
                        chunks: Iterable[bytes] = answer.iter_bytes()
                        if answer.headers.get("content-type") == "application/json":
                            content = answer.read()
                            recorder.answers.append((request, json.loads(content)))
                            chunks = [content]
                        for chunk in chunks:
                            self.wfile.write(chunk)
                            self.wfile.flush()
                except httpx.TransportError:
                    recorder.statuses.append(0)
                self.close_connection = True

            do_GET = do_POST = do_PUT = do_DELETE = _pass_on

            def log_message(self, *_: object) -> None:
                pass

        proxy = Proxy(("127.0.0.1", 0), Handler)
        recorder = Recorder(f"http://127.0.0.1:{proxy.server_port}")
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield recorder
        finally:
            proxy.shutdown()
            proxy.server_close()


def _entry(method: str, path: str, headers: Mapping[str, str], content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"method": method, "path": path}
    entry["headers"] = {name: headers[name] for name in HEADERS if headers.get(name)}
    if content:
        entry["body"] = json.loads(content)
    return entry

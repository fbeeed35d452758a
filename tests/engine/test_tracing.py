"""vLLM's `--otlp-traces-endpoint`: a rollout's spans and vLLM's own of each candidate arrive as one trace."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.engine.conftest import Server, emulating, serve_command
from tests.support.waiting import WAIT_S

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """An OTLP receiver over HTTP: its URL, and the spans that have come."""
    spans: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            spans.extend(span for of in request.resource_spans for scope in of.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", spans
        server.shutdown()
        thread.join(WAIT_S)


def test_candidates_are_below_their_group_in_the_clients_trace(
    tiny_model: str, tmp_path: Path, collector: tuple[str, list[Any]]
) -> None:
    url, spans = collector
    device = emulating(tmp_path, {"step": {"ms": 2.0}, "lengths": {"log_normal": {"mean": 60, "sigma": 0.8}}})
    command = serve_command(tiny_model, "--max-model-len", "2048", *device, "--otlp-traces-endpoint", url)
    environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    prompts = [{"id": f"p{i}", "prompt_token_ids": [40 + i, 50, 51]} for i in range(3)]
    body = {"prompts": prompts, "group_size": 2, "redundancy": 2, "sampling_params": {"max_tokens": 500}}
    with Server(command, tmp_path / "server.log", **environment) as server:
        headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
        answer = server.http.post("/v1/rollouts", json=body, headers=headers).json()
        server.wait_until(lambda: any(span.name == "rollout" for span in spans))
    mine = [span for span in spans if span.trace_id.hex() == TRACE_ID]
    assert Counter(span.name for span in mine) >= Counter(rollout=1, generating=1, group=3, llm_request=12)
    (rollout,) = [span for span in mine if span.name == "rollout"]
    told = {each.key: each.value for each in rollout.attributes}
    assert (told["rollout.id"].string_value, told["rollout.num_surplus"].int_value) == (answer["id"], 6)
    groups = {span.span_id for span in mine if span.name == "group" and span.parent_span_id == rollout.span_id}
    parents = Counter(span.parent_span_id for span in mine if span.name == "llm_request")
    assert parents == dict.fromkeys(groups, 4)

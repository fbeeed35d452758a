"""A file on the page: the same events as of a live server, whoever wrote it, and while it grows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.parts.page.session_rows import session_group
from vllm_rollout.parts.page.recording.file import TraceFile, pieces
from vllm_rollout.parts.page.watching import recorded_feed
from vllm_rollout.parts.page.watching.recorded_feed import RecordedFeed

pytestmark = pytest.mark.anyio
PROMPT = {"id": "q", "lengths": [3, 5], "ends": ["stop", "surplus"]}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_feed, "POLL_S", 0.01)


def rollout(id: str, **more: Any) -> dict[str, Any]:
    return {"rollout_id": id, "prompts": [PROMPT], **more}


def write(path: Path, *rows: Any) -> Path:
    with path.open("a") as file:
        file.writelines(row if isinstance(row, str) else f"{json.dumps(row)}\n" for row in rows)
    return path


class Told:
    def __init__(self, *paths: Path) -> None:
        self._feed = RecordedFeed(*paths).feed()

    async def next(self) -> list[tuple[str, Any]]:
        """Events of the next part."""
        async with asyncio.timeout(10):
            part = (await anext(self._feed)).decode()
        events = (event.split("\n") for event in part.split("\n\n") if event)
        return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in events]


async def test_a_file_is_told_as_a_server_tells_and_grows(tmp_path: Path):
    rewards = {"rollout_id": "a", "rewards": [{"prompt_id": "q", "index": 0, "reward": 1.0}]}
    path = write(tmp_path / "it.jsonl", rollout("a", began=5.0), rewards, "not a row\n", rollout("b", state="left"))
    told = Told(path)
    ((name, server),) = await told.next()
    assert (name, server["live"], server["file"]) == ("server", False, "it.jsonl")
    events = await told.next()
    assert [(name, data["rollout_id"]) for name, data in events] == [
        ("rollout", "a"),
        ("rewards", "a"),
        ("rollout", "b"),
    ]
    first = events[0][1]
    assert (first["state"], first["began"], first["num_prompts"], first["num_candidates"]) == ("over", 5.0, 1, 2)
    assert (first["prompts"][0]["position"], first["prompts"][0]["started_s"]) == (0, None)
    assert events[2][1]["state"] == "left"
    write(path, json.dumps(rollout("c"))[:20])
    await asyncio.sleep(0.05)
    write(path, json.dumps(rollout("c"))[20:] + "\n")
    ((name, data),) = await told.next()
    assert (name, data["rollout_id"]) == ("rollout", "c")


async def test_prompt_rows_that_follow_each_other_are_one_rollout(tmp_path: Path):
    rows = [{"prompt_id": id, "lengths": [n]} for id, n in (("a", 1), ("b", 2))]
    path = write(tmp_path / "it.jsonl", *rows, {"prompt_id": "a", "lengths": [4], "step": 1})
    told = Told(path)
    await told.next()
    events = await told.next()
    assert [(d["rollout_id"], [(p["id"], p["ends"]) for p in d["prompts"]]) for _, d in events] == [
        ("step-0", [("a", ["stop"]), ("b", ["stop"])]),
        ("step-1", [("a", ["stop"])]),
    ]


async def test_only_the_last_rollouts_of_a_file_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorded_feed, "MAX_ROLLOUTS", 3)
    told = Told(write(tmp_path / "it.jsonl", *(rollout(f"r{i}") for i in range(9))))
    await told.next()
    assert [data["rollout_id"] for _, data in await told.next()] == ["r6", "r7", "r8"]


def test_a_row_that_a_dead_server_had_begun_is_taken_back_by_the_next_one(tmp_path: Path):
    path = write(tmp_path / "run.jsonl", rollout("r1"))
    whole = path.read_bytes()
    path.write_bytes(whole + json.dumps(rollout("r2")).encode()[:-5])
    with recorded_feed.GrowingFile(path) as file:
        assert ["r1" in event.decode() for event in file.newest(8)] == [True]
        assert file.more() == []
        path.write_bytes(whole)  # as TraceFile mends it
        more = "".join(json.dumps(rollout(id)) + "\n" for id in ("r3", "r4", "r5"))
        with path.open("a") as appended:
            appended.write(more)
        told = b"".join(file.more()).decode()
    assert [id for id in ("r2", "r3", "r4", "r5") if f'"{id}"' in told] == ["r3", "r4", "r5"]


def test_rewards_of_what_is_told_no_more_push_nobody_out(tmp_path: Path):
    ids = [f"r{number}" for number in range(6)]
    posted = [{"rollout_id": id, "rewards": [{"prompt_id": "q", "index": 0, "reward": 1.0}]} for id in ids[:3]]
    with recorded_feed.GrowingFile(write(tmp_path / "run.jsonl", *map(rollout, ids), *posted)) as file:
        told = b"".join(file.newest(3)).decode()
    assert [id for id in ids if f'"{id}"' in told] == ids[3:]


def test_rewards_that_came_before_their_rollout_are_told_after_it(tmp_path: Path):
    early = [{"rollout_id": id, "rewards": [{"prompt_id": "q", "index": 0, "reward": 1.0}]} for id in ("a", "b")]
    path = write(tmp_path / "run.jsonl", *early, rollout("a"))
    with recorded_feed.GrowingFile(path) as file:
        told = [file.newest(3)]
        write(path, rollout("b"))
        told.append(file.more())
    for events, id in zip(told, ("a", "b"), strict=True):
        assert [event.split(b"\n")[0] for event in events] == [b"event: rollout", b"event: rewards"]
        assert all(f'"rollout_id":"{id}"'.encode() in event for event in events)


def test_a_file_that_is_not_there_is_refused_at_once(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        RecordedFeed(tmp_path / "none")


async def test_both_pieces_of_a_file_are_told_and_a_new_one_is_followed(tmp_path: Path):
    path = tmp_path / "it.jsonl"
    file = TraceFile(path, max_bytes=400)
    for name in ("a", "b", "c"):
        file.append(json.dumps(rollout(name)))
    assert len(pieces(path)) == 2
    told = Told(path)
    await told.next()
    assert [data["rollout_id"] for _, data in await told.next()] == ["a", "b", "c"]
    found = []
    for name in ("d", "e", "f", "g"):
        file.append(json.dumps(rollout(name)))
        found += [data["rollout_id"] for _, data in await told.next()]
    assert found == ["d", "e", "f", "g"]


async def test_several_files_share_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorded_feed, "MAX_ROLLOUTS", 4)
    step = {"prompt_id": "q", "lengths": [3]}
    one = write(tmp_path / "one.jsonl", *(rollout(f"r{i}") for i in range(5)), step)
    two = write(tmp_path / "two.jsonl", *(rollout(f"s{i}", setting="2x first") for i in range(5)), step)
    told = Told(one, two)
    ((_, server),) = await told.next()
    assert server["file"] == "one.jsonl, two.jsonl"
    events = await told.next()
    assert [data["rollout_id"] for _, data in events] == ["r4", "one.jsonl/step-0", "s4", "two.jsonl/step-0"]
    assert [data["setting"] for _, data in events[::2]] == [None, "2x first"]
    write(one, rollout("r5"))
    assert [data["rollout_id"] for _, data in await told.next()] == ["r5"]
    write(two, rollout("s5"))
    assert [data["rollout_id"] for _, data in await told.next()] == ["s5"]


async def test_groups_of_sessions_are_told_with_rewards_that_came_later(tmp_path: Path):
    late = {"name": "g1", "rewards": [{"index": 1, "reward": 0.5}, {"index": 3, "reward": 9.0}]}
    lost = {"name": "unknown", "rewards": [{"index": 0, "reward": 1.0}]}
    rows = [session_group("g1"), rollout("a"), late, lost, session_group("g2", began=1.0)]
    path = write(tmp_path / "it.jsonl", *rows)
    told = Told(path)
    await told.next()
    events = await told.next()
    assert [(name, data.get("name")) for name, data in events] == [
        ("rollout", None),
        ("sessions", "g1"),
        ("sessions", "g2"),
    ]
    first = events[1][1]
    assert [session["reward"] for session in first["sessions"]] == [1.0, 0.5, None]
    assert (first["status"], first["selected"], first["num_to_begin"]) == ("complete", [0], 0)
    assert first["sessions"][0]["turns"][1] == [5.0, 8.0, 20, 160, 128, "extended"]
    write(path, {**late, "name": "g2"})
    ((name, data),) = await told.next()
    assert (name, data["name"], data["sessions"][1]["reward"]) == ("sessions", "g2", 0.5)


async def test_many_groups_of_sessions_take_no_place_of_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorded_feed, "MAX_ROLLOUTS", 2)
    rows = [rollout("a"), *(session_group(f"g{i}") for i in range(5)), '{"sessions": []}\n']
    late = {"name": "g0", "rewards": [{"index": 0, "reward": 0.5}]}
    told = Told(write(tmp_path / "it.jsonl", *rows, late, json.dumps(session_group("half"))[:-9]))
    await told.next()
    assert [data.get("name") for _, data in await told.next()] == [None, "g3", "g4"]

"""The parts of the demo and of the group race that need no engine."""

import asyncio
import os
import sys
from contextlib import suppress

import pytest

from benchmarks.common import percentile
from benchmarks.drafts_ahead import Answers, play
from benchmarks.group_race import (
    TINY,
    Race,
    StreamingGroup,
    TokenStream,
    draw,
    split_group,
    summarize,
    tables,
)
from tests.support.waiting import wait_until
from vllm_rollout import process
from vllm_rollout.demo import picture
from vllm_rollout.demo.options import Options
from vllm_rollout.demo.phases import Phase, RacedCandidate, compare_kept, first_finished
from vllm_rollout.parts.drafts.worker.memory import DraftMemory

ANSWERS = Answers([5, 6], [[*range(10, 60)], [*range(10, 40), *range(70, 90)], [*range(10, 60)]])


def test_drafts_that_come_late_make_the_same_tokens_in_more_steps():
    rows = {}
    for late in (False, True):
        memory = DraftMemory(1 << 20)
        tokens, *_ = play(memory, ANSWERS, 0, 2, most=4, least=0.05, late=late)
        assert tokens == 100
        tokens, rows[late], _ = play(memory, ANSWERS, 2, 3, most=4, least=0.05, late=late)
        assert tokens == 50
    assert 10 <= rows[False] < rows[True] < 50


METRICS = """# HELP vllm:generation_tokens_total Number of generation tokens processed.
vllm:generation_tokens_total{engine="0",model_name="m"} 12.0
vllm:generation_tokens_total{engine="1",model_name="m"} 30.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
process_cpu_seconds_total 4.5
"""


def event(token_ids, reason=None):
    reason = "null" if reason is None else f'"{reason}"'
    ids = ",".join(map(str, token_ids))
    return f'data: {{"choices":[{{"text":"x","finish_reason":{reason},"token_ids":[{ids}]}}]}}\n\n'.encode()


class FakeTransport:
    def __init__(self):
        self.written, self.closed = b"", False

    def write(self, data):
        self.written += data

    def close(self):
        self.closed = True


def connected_group(size, num_candidates):
    group = StreamingGroup(size, [f"request {i}".encode() for i in range(num_candidates)])
    for stream in group.streams:
        stream.connection_made(FakeTransport())
    return group


def test_counter_sums_over_labels_and_reads_exact_names():
    assert process.counter(METRICS, "vllm:generation_tokens_total") == 42
    assert process.counter(METRICS, "process_cpu_seconds_total") == 4.5
    assert process.counter(METRICS, "vllm:generation_tokens") == 0


def test_last_message_skips_prefixes_and_routes():
    lines = [
        "(Worker pid=7) INFO 11-20 04:25:36 [default_loader.py:501] Loading weights took 0.15 seconds",
        "(APIServer pid=1) INFO 11-20 04:25:43 [launcher.py:195] Route: /metrics, Methods: GET",
        "",
    ]
    assert process.last_message(lines) == "Loading weights took 0.15 seconds"
    assert process.last_message([]) == "the process starts"


def test_percentile_interpolates_and_refuses_nothing():
    assert percentile([4, 1, 2, 3], 50) == 2.5
    assert percentile([5], 90) == 5
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    with pytest.raises(ValueError, match=r"\[0, 100\]"):
        percentile([1], 101)


def test_first_finished_prefers_those_that_ended_by_themselves():
    group = first_finished([[1], [1, 2, 3], [1, 2], [1, 2]], ["length", "stop", "stop", "stop"], 2)
    assert [candidate.state for candidate in group] == ["unused", "unused", "kept", "kept"]
    assert group[2].token_ids == (1, 2)


def test_first_finished_fills_up_with_cut_ones():
    group = first_finished([[1] * 8, [1]], ["length", "stop"], 2)
    assert {candidate.state for candidate in group} == {"kept"}


def test_split_group_counts_what_goes_on_after_the_group_is_complete():
    kept, beyond = split_group([(False, 5), (True, 20), (False, 3), (False, 9)], 2)
    assert kept == [3, 5]
    assert beyond == [4, 15]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000])
def test_token_stream_reads_any_fragmentation(chunk_bytes):
    ended = []
    stream = TokenStream(b"request", ended.append)
    stream.connection_made(FakeTransport())
    first = b'data: {"prompt_token_ids":[9,9,9],"choices":[{"finish_reason":null,"token_ids":[1]}]}\n\n'
    body = first + event([2, 3]) + event([4], "stop")
    for start in range(0, len(body), chunk_bytes):
        stream.data_received(body[start : start + chunk_bytes])
    assert stream.transport.written == b"request"
    assert ended == [stream]
    assert stream.stopped is True
    assert stream.transport.closed
    if chunk_bytes == 1000:
        assert stream.num_tokens == 4


def test_streaming_group_closes_the_others_when_enough_have_finished():
    async def race():
        group = connected_group(2, 4)
        group.streams[3].data_received(event([1, 2]))
        group.streams[0].data_received(event([1], "length"))
        group.streams[1].data_received(event([1], "stop"))
        assert not group.over.done()
        group.streams[2].data_received(event([1], "stop"))
        await group.over
        group.streams[3].data_received(event([3]))
        return group

    group = asyncio.run(race())
    assert group.kept == [group.streams[1], group.streams[2]]
    assert group.remaining == [group.streams[3]]
    assert group.streams[3].transport.closed
    assert group.streams[3].num_tokens == 2


def measurement(way, repeat, wall_s, after=None):
    counts = {"generated_tokens": 100, "returned_tokens": 40, "wasted_tokens": 60, "tokens_after_completion": after}
    return {"way": way, "repeat": repeat, "wall_s": wall_s, **counts, "api_process_cpu_s": 1.0, "client_cpu_s": 0.5}


def test_summary_pairs_ratios_by_repeat():
    race = Race("tiny model", TINY, 4, 8, 16, 512, ("c", "d"))
    # Repeat 1 ran in the other order, on a machine that had become twice as slow.
    runs = [measurement("c", 0, 3), measurement("d", 0, 2), measurement("d", 1, 4, 0.0), measurement("c", 1, 6)]
    summary = summarize(race, runs)
    assert summary["ratios"] == {"c/d": 1.5}
    assert summary["medians"]["d"]["wall_s"] == 3
    assert summary["medians"]["d"]["tokens_after_completion"] == 0
    assert summary["medians"]["c"]["tokens_after_completion"] is None


def test_pictures_are_drawn(tmp_path):
    race = Race("real model", "some-model", 8, 8, 16, 1024, ("a", "d"))
    tiny = Race("tiny model", TINY, 4, 8, 16, 512, ("a", "d"))
    runs = [measurement("a", 0, 3.0), measurement("d", 0, 1.0)]
    result = {"races": [summarize(race, runs), summarize(tiny, runs)]}
    assert "| real model, 8 groups | a: stock, n=16, wait for all | 3.00 | 3.00 | 100 |" in tables(result)
    draw(result, tmp_path / "race.png")

    options = Options(prompts=2, group_size=1, candidates=2, max_tokens=16)
    stock = [RacedCandidate(0, 3, "kept"), RacedCandidate(1, 9, "unused")]
    raced = [RacedCandidate(0, 3, "kept"), RacedCandidate(1, 3, "surplus")]
    phases = Phase("stock", 2.0, [stock] * 2), Phase("race", 1.0, [raced] * 2)
    picture.draw(*phases, options, tmp_path / "demo.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("race.png", "demo.png"))


def test_demo_says_how_much_the_race_changed():
    same = Phase("", 1.0, [[RacedCandidate(0, 2, "kept", (1, 2)), RacedCandidate(1, 1, "kept", (5,))]])
    other = Phase("", 1.0, [[RacedCandidate(0, 2, "kept", (1, 2)), RacedCandidate(1, 1, "kept", (6,))]])
    assert compare_kept(same, same).startswith("All 2")
    assert compare_kept(same, other).startswith("1 of 2")


@pytest.mark.parametrize(
    ("field", "value"), [("prompts", 0), ("group_size", 17), ("max_tokens", 5000), ("candidates", 0), ("prompts", 17)]
)
def test_demo_refuses_sizes_that_cannot_work(field, value):
    with pytest.raises(ValueError, match="must be at"):
        Options(**{field: value})


def server(tmp_path, code):
    return process.ServerProcess([sys.executable, "-c", code], process.free_port(), os.environ, tmp_path / "log")


def test_a_server_that_dies_shows_the_end_of_its_log(tmp_path):
    with (
        server(tmp_path, "import sys; print('no room for the KV cache'); sys.exit(3)") as dead,
        pytest.raises(process.ServerError, match=r"(?s)exit status 3.*no room for the KV cache.*What to do"),
    ):
        dead.wait_until_healthy(lambda seconds, line: None, timeout_s=60)


def test_a_server_and_its_children_are_gone_after_the_block(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "CHILDREN_GRACE_S", 0.1)
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    demo_server = server(tmp_path, code)
    with suppress(KeyboardInterrupt), demo_server:
        wait_until(lambda: demo_server.log_tail(1))
        raise KeyboardInterrupt
    child = int(demo_server.log_tail(1)[0])
    wait_until(lambda: not running(child))


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

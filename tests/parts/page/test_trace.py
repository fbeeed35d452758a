import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import WAIT_S
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.page.recording.file import TraceError, TraceFile, pieces, read_trace
from vllm_rollout.parts.page.recording.rows import RolloutPrompt, RolloutRow, reward_row
from vllm_rollout.parts.shaping.rules.trace import TracedCandidate, end_of, told_reasons

ROLLOUT = {
    "rollout_id": "r1",
    "model": "m",
    "group_size": 2,
    "max_tokens": 64,
    "prompts": [{"id": "q1", "prompt_tokens": 5, "lengths": [10, 64, 7], "ends": ["stop", "length", "surplus"]}],
}
PROMPT = {"prompt_id": "q1", "lengths": [3, 4]}


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


def ids(trace):
    return [[prompt.id for prompt in rollout.prompts] for rollout in trace.rollouts]


def test_a_rollout_row_is_one_rollout(write):
    trace = read_trace(write(ROLLOUT, "", ROLLOUT | {"rollout_id": "r2"}))
    assert ids(trace) == [["q1"], ["q1"]]
    (prompt,) = trace.rollouts[0].prompts
    assert prompt.candidates == (TracedCandidate(10), TracedCandidate(64, "length"), TracedCandidate(7, "surplus"))
    assert (prompt.prompt_tokens, prompt.max_tokens, prompt.history_key) == (5, 64, "q1")
    assert (trace.models, trace.group_size, trace.max_tokens, trace.num_stopped) == (("m",), 2, 64, 2)
    assert not trace.has_scores
    assert not trace.has_rewards


def test_prompt_rows_that_follow_each_other_are_one_rollout(write):
    second = PROMPT | {"prompt_id": "q2", "scores": [0.5, None], "rewards": [1, 0], "key": "long name"}
    trace = read_trace(write(PROMPT, second))
    assert ids(trace) == [["q1", "q2"]]
    assert trace.prompts[1].candidates == (TracedCandidate(3, "stop", 0.5, 1), TracedCandidate(4, "stop", None, 0))
    assert trace.prompts[1].history_key == "long name"
    assert (trace.group_size, trace.max_tokens) == (None, 4)
    assert trace.has_scores
    assert trace.has_rewards


def test_steps_and_cuts_make_rollouts_of_prompt_rows(write):
    stepped = write(*({"prompt_id": id, "lengths": [1], "step": step} for id, step in (("a", 1), ("b", 2), ("c", 1))))
    assert ids(read_trace(stepped)) == [["a", "c"], ["b"]]
    flat = write(*({"prompt_id": id, "lengths": [1]} for id in "abc"))
    assert ids(read_trace(flat, prompts_per_step=2)) == [["a", "b"], ["c"]]


def test_a_prompt_comes_once_in_a_rollout(write):
    with pytest.raises(TraceError, match=r"prompt 'q1' comes twice in step 0\. Give prompt rows a \"step\""):
        read_trace(write(PROMPT, PROMPT))
    assert ids(read_trace(write(PROMPT, PROMPT), prompts_per_step=1)) == [["q1"], ["q1"]]


def test_failed_candidates_are_left_out_and_counted(write):
    trace = read_trace(write(PROMPT | {"ends": ["failed", "stop"]}))
    assert (trace.num_failed, [c.num_tokens for c in trace.prompts[0].candidates]) == (1, [4])


def test_prompts_without_a_token_are_left_out_and_counted(write):
    failed = PROMPT | {"prompt_id": "q2", "ends": ["failed", "failed"]}
    waited = PROMPT | {"prompt_id": "q3", "lengths": [0, 0], "ends": ["surplus", "surplus"]}
    trace = read_trace(write(PROMPT, failed, ROLLOUT, waited))
    assert ids(trace) == [["q1"], ["q1"]]
    assert (trace.num_empty, trace.num_failed) == (2, 2)
    with pytest.raises(TraceError, match="holds no row that can be replayed"):
        read_trace(write(failed))


def test_rewards_come_after_their_rollout(write):
    failed_first = ROLLOUT | {"prompts": [ROLLOUT["prompts"][0] | {"ends": ["failed", "length", "stop"]}]}
    trace = read_trace(write(failed_first, reward_row("r1", [("q1", 2, 1.0), ("q1", 1, 0.0)])))
    assert [c.reward for c in trace.prompts[0].candidates] == [0.0, 1.0]


def test_rewards_may_come_before_their_rollout_or_without_one(write):
    early, wrong = reward_row("r1", [("q1", 2, 1.0)]), reward_row("r1", [("q1", 9, 1.0)])
    path = write(early, wrong, reward_row("r9", [("q1", 0, 1.0)]), ROLLOUT)
    trace = read_trace(path)
    assert [c.reward for c in trace.prompts[0].candidates] == [None, None, 1.0]
    assert trace.skipped == (
        f"{path}:2: rewards name candidate 9 of prompt 'q1': there is none",
        f"{path}:3: rewards for rollout_id 'r9', which no row has",
    )


def test_what_the_server_writes_is_read_as_it_was(write, tmp_path):
    endings = [
        Ending(0, "finished", 9),
        Ending(1, "surplus", 7),
        Ending(2, "pruned", 4),
        Ending(3, "finished", 64, truncated=True),
        Ending(4, "failed", 0),
        Ending(5, "surplus", 11, ended_by_itself=True),
    ]
    each = {"lengths": [e.num_tokens for e in endings], "ends": [end_of(e) for e in endings]}
    each |= {"scores": [None, None, 0.25, None, None, None], "ended_s": [0.1 * e.index for e in endings]}
    prompt = RolloutPrompt(id="q1", prompt_tokens=5, key="tokens:1", status="complete", moves=[(0.5, 1)], **each)
    row = RolloutRow(
        rollout_id="r1", model="m", group_size=2, max_tokens=64, detection_length=4, prompts=[prompt], began=5.0
    )
    file = TraceFile(tmp_path / "recorded.jsonl")
    file.append(row.model_dump_json(exclude_none=True, exclude_defaults=True))
    file.append(reward_row("r1", [("q1", 0, 1.0)]))
    trace = read_trace(tmp_path / "recorded.jsonl")
    assert trace.prompts[0].candidates == (
        TracedCandidate(9, "stop", None, 1.0),
        TracedCandidate(7, "surplus"),
        TracedCandidate(4, "pruned", 0.25),
        TracedCandidate(64, "length"),
        TracedCandidate(11, "stop"),
    )
    assert (trace.models, trace.group_size, trace.max_tokens, trace.detection_length) == (("m",), 2, 64, 4)
    assert (trace.prompts[0].history_key, trace.prompts[0].prompt_tokens, trace.num_failed) == ("tokens:1", 5, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON (Expecting property name"),
        ("[1]", "a row is a JSON object, got [1]"),
        ("[" * 200_000, "nested too deeply"),
        ("{}", 'no row of a trace: a rollout row has "prompts"'),
        ('{"a": 1}', "got 'a'"),
        (PROMPT | {"lengths": [3, -1]}, "lengths.1: input should be greater than or equal to 0, got -1"),
        ('{"prompt_id": "q", "lengths": [NaN]}', "lengths.0: input should be a valid integer, got nan"),
        ('{"prompt_id": "q", "lengths": [3.5]}', "lengths.0: input should be a valid integer, got 3.5"),
        ('{"prompt_id": "q", "lengths": ["3"]}', "lengths.0: input should be a valid integer, got '3'"),
        ('{"prompt_id": "q", "lengths": [true]}', "lengths.0: input should be a valid integer, got True"),
        ('{"prompt_id": "q", "lengths": [99999999999]}', "less than or equal to 10000000, got 99999999999"),
        ('{"prompt_id": "q", "lengths": []}', "lengths: list should have at least 1 item"),
        ('{"prompt_id": "q"}', "lengths: is missing"),
        ('{"lengths": [1]}', "prompt_id: is missing"),
        (PROMPT | {"lenghts": [1]}, "lenghts: is not a field of a trace"),
        (PROMPT | {"\x1b]0;owned\x07": [1]}, r"\x1b]0;owned\x07: is not a field of a trace"),
        (PROMPT | {"ends": ["stop"]}, "ends has 1 entries, lengths has 2; they must be equally long"),
        (PROMPT | {"scores": [1.0] * 3}, "scores has 3 entries, lengths has 2"),
        (PROMPT | {"ends": ["stop", "done"]}, "ends.1: input should be 'stop', 'length', 'surplus'"),
        ('{"prompt_id": "q", "lengths": [1], "scores": [NaN]}', "scores.0: input should be a finite number, got nan"),
        ('{"prompt_id": "q", "lengths": [1], "rewards": [Infinity]}', "rewards.0: input should be a finite number"),
        (PROMPT | {"lengths": [0, 1]}, "lengths.0 is 0, but a candidate that ended by itself has at least 1 token"),
        (ROLLOUT, "rollout_id 'r1' was there before"),
        (ROLLOUT | {"rollout_id": "r2", "prompts": ROLLOUT["prompts"] * 2}, "prompt 'q1' comes twice in one rollout"),
        (ROLLOUT | {"rollout_id": "r2", "max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        (reward_row("r1", [("q1", 9, 1.0)]), "rewards name candidate 9 of prompt 'q1': there is none"),
        ('{"prompt_id": "\\ud800", "lengths": [1]}', "prompt_id: "),
    ],
)
def test_a_broken_row_is_named_with_its_line(write, row, message):
    path = write(ROLLOUT, row)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)
    assert "--skip-broken" in str(caught.value)


def test_broken_rows_can_be_skipped_and_are_counted(write):
    path = write(ROLLOUT, "{", "nonsense", "[]", PROMPT | {"lengths": [-1]}, PROMPT)
    trace = read_trace(path, skip_broken=True)
    assert ids(trace) == [["q1"], ["q1"]]
    told = told_reasons(trace.skipped)
    assert told.startswith(f"4 broken rows were skipped: {path}:2: not JSON")
    assert told.endswith("got []; …")


def test_bytes_that_are_no_text_are_a_broken_row(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"prompt_id": "\xff\xfe", "lengths": [1]}\n{"prompt_id": "q", "lengths": [1]}\n')
    assert len(read_trace(path, skip_broken=True).prompts) == 1


scraps = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["q1", "r1", "stop", "pruned"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["prompt_id", "lengths", "ends", "scores", "rewards", "rollout_id", "prompts", "id", "index"]
            ),
            inner,
        )
    ),
)


@given(st.lists(scraps, max_size=4))
def test_whatever_a_row_is_it_is_read_or_named(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "scraps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [PROMPT, *rows]))
    trace = read_trace(path, skip_broken=True)
    assert len(trace.prompts) + len(trace.skipped) + trace.num_empty >= 1
    for told in trace.skipped:
        assert told.startswith(f"{path}:")


@pytest.mark.parametrize("rows", [[], ["", "  "]])
def test_an_empty_trace_says_what_a_row_is(write, rows):
    with pytest.raises(TraceError, match=r"holds no row that can be replayed\. Every line is JSON"):
        read_trace(write(*rows))


def test_a_trace_of_broken_rows_only_cannot_be_replayed(write):
    with pytest.raises(TraceError, match=r"all 2 rows are broken, first .*:1: not JSON"):
        read_trace(write("{", "{"), skip_broken=True)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"nothing\.jsonl: No such file"):
        read_trace(tmp_path / "nothing.jsonl")
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)


def row_of(name: str) -> str:
    return json.dumps(ROLLOUT | {"rollout_id": name})


def rollouts_in(path: Path) -> list[str]:
    """Their ids, by the older piece first."""
    return [json.loads(line)["rollout_id"] for piece in pieces(path) for line in piece.read_text().splitlines()]


def test_a_file_that_is_full_becomes_the_older_piece_and_both_are_bounded(tmp_path):
    path = tmp_path / "recorded.jsonl"
    size = len(row_of("r0")) + 1
    file = TraceFile(path, max_bytes=6 * size)
    for number in range(8):
        file.append(row_of(f"r{number}"))
        assert sum(piece.stat().st_size for piece in pieces(path)) <= 6 * size
    assert rollouts_in(path) == ["r3", "r4", "r5", "r6", "r7"]
    assert [piece.name for piece in pieces(path)] == ["recorded.jsonl.1", "recorded.jsonl"]
    file.append(reward_row("r0", [("q1", 0, 1.0)]))  # its row was thrown away: of no use, and no reason to complain
    file.append(reward_row("r4", [("q1", 0, 1.0)]))
    trace = read_trace(path)
    assert [rollout.prompts[0].candidates[0].reward for rollout in trace.rollouts] == [None, 1.0, None, None, None]


def test_a_row_that_is_larger_than_a_piece_is_written(tmp_path):
    path = tmp_path / "recorded.jsonl"
    file = TraceFile(path, max_bytes=10)
    for number in range(3):
        file.append(row_of(f"r{number}"))
    assert rollouts_in(path) == ["r1", "r2"]


def test_several_processes_write_whole_rows_into_the_same_pieces(tmp_path):
    path = tmp_path / "recorded.jsonl"
    script = (
        "import sys; from pathlib import Path; from vllm_rollout.parts.page.recording.file import TraceFile\n"
        "file = TraceFile(Path(sys.argv[1]), int(sys.argv[3]))\n"
        'for number in range(60): file.append(\'{"prompts": [], "rollout_id": "%s-%d"}\' % (sys.argv[2], number))'
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(path), name, str(1 << 12)]) for name in ("a", "b", "c")
    ]
    assert [process.wait(WAIT_S) for process in processes] == [0, 0, 0]
    found = rollouts_in(path)
    assert len(set(found)) == len(found) < 180
    for name in ("a", "b", "c"):
        numbers = [int(id.removeprefix(f"{name}-")) for id in found if id.startswith(name)]
        assert numbers == sorted(numbers)
    assert sum(piece.stat().st_size for piece in pieces(path)) <= 1 << 12


@pytest.mark.parametrize(
    ("left", "ids"),
    [
        ('{"rollout_id": "torn", "prom', ["r0", "next"]),
        ('{"prompts": [], "rollout_id": "whole"}', ["r0", "whole", "next"]),
        ('{"rollout_id": "' + "x" * (1 << 17), ["r0", "next"]),
        ("{", ["r0", "next"]),
    ],
)
def test_what_a_killed_writer_left_is_no_row(tmp_path, left, ids):
    path = tmp_path / "recorded.jsonl"
    path.write_text(f"{row_of('r0')}\n{left}")
    TraceFile(path).append(row_of("next"))
    assert rollouts_in(path) == ids


def test_a_recording_whose_only_row_is_torn_is_begun_again(tmp_path):
    path = tmp_path / "recorded.jsonl"
    path.write_text(row_of("torn")[:30])
    TraceFile(path).append(row_of("next"))
    assert rollouts_in(path) == ["next"]


@pytest.mark.parametrize(
    "content",
    [
        b'{\n  "a": 1\n}',
        b'{"a": 1}',
        b'{"a": 1}\n',
        b"first\nlast line",
        b"\x01\n" + b"\xff" * 100_000,
        b'{"name": "x", "version"',
        b'\n{"',
        row_of("r0").encode() + b"\nlast line",
        row_of("r0").encode() + b'\n{"a": 1}',
    ],
)
def test_a_file_that_is_no_recording_stays_as_it_is(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"it is no recording, since it (begins|ends) with b"):
        TraceFile(path)
    assert path.read_bytes() == content


def test_a_file_that_is_no_recording_keeps_its_mode(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("first\nlast line")
    path.chmod(0o644)
    with pytest.raises(OSError, match="it is no recording"):
        TraceFile(path)
    assert path.stat().st_mode & 0o777 == 0o644

"""Runs whose deferred prompts go on where they were stopped, and what is kept of them, as bytes."""

from __future__ import annotations

import json
import zlib
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.kernel.http.conftest import events_of, http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.pruning.steps import pruned_by
from tests.parts.shaping.fakes import FakeShaping
from vllm_rollout.kernel.http.ended import candidate_of, trajectory_of
from vllm_rollout.kernel.http.engine import CandidateEnd, GroupOrder, Happening, PreparedPrompt
from vllm_rollout.kernel.http.plan_port import GroupRecord
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.types import BASE_MODEL, CandidateState, Ending
from vllm_rollout.parts.page.http.recorder import TraceRecorder
from vllm_rollout.parts.page.recording.file import read_trace
from vllm_rollout.parts.pruning.http.plan import ScoredGroup
from vllm_rollout.parts.pruning.rules.assessment import Assessment, Confidence, Scores
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.pruning.rules.step import SCORES
from vllm_rollout.parts.rounds.http import kept as kept_module
from vllm_rollout.parts.rounds.http.kept import keep, read_kept
from vllm_rollout.parts.rounds.http.resumed import ResumedGroup
from vllm_rollout.parts.rounds.rules.resumption import VersionSpan
from vllm_rollout.parts.shaping.rules.history import ObservedLength

NUM_PROMPTS = 6
RUN = {
    "id": "a",
    "group_size": 3,
    "prompts_per_round": 4,
    "prompt_speculation": 1.5,
    "response_speculation": 2.0,
    "sampling_params": {"seed": 5},
    "include": ["text", "logprobs"],
    "resume": True,
}


class TellingShaping(FakeShaping):
    """Remembers what it was told of lengths."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.told: dict[str, list[list[ObservedLength]]] = {}

    async def observe_lengths(self, key: str, lengths: Sequence[ObservedLength], adapter: str = BASE_MODEL) -> None:
        self.told.setdefault(key, []).append(list(lengths))
        await super().observe_lengths(key, lengths, adapter)


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.parts["shaping"] = TellingShaping(engine)
    return engine


async def short_round(http: httpx.AsyncClient, **fields) -> dict:
    response = await http.post("/v1/runs", json={**RUN, **fields})
    assert response.status_code == 201, response.text
    prompts = [{"id": f"q{i}", "prompt": f"question {i}"} for i in range(NUM_PROMPTS)]
    response = await http.post(f"/v1/runs/{response.json()['id']}/rounds", json={"prompts": prompts})
    assert response.status_code == 200, response.text
    return response.json()


async def long_round(http: httpx.AsyncClient, run: str = "a", **fields) -> dict:
    response = await http.post(f"/v1/runs/{run}/rounds", json={"kind": "long", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def trajectories(answer: dict) -> dict[tuple[str, int], dict]:
    return {(g["prompt_id"], t["index"]): t for g in answer["groups"] for t in g["trajectories"]}


async def test_a_prompt_that_goes_on_becomes_what_it_would_have_become_at_once(http: httpx.AsyncClient) -> None:
    short = await short_round(http)
    await short_round(http, id="b", resume=False)
    resumed, anew = await long_round(http), await long_round(http, "b")
    assert [group["prompt_id"] for group in resumed["groups"]] == short["deferred"]
    assert len(short["deferred"]) == 2
    ours, theirs = trajectories(resumed), trajectories(anew)
    for name, trajectory in ours.items():
        assert 0 < trajectory["num_resumed_tokens"] <= trajectory["num_tokens"]
        assert trajectory | {"num_resumed_tokens": 0, "off_policy": False} == theirs[name]
    assert ours.keys() == theirs.keys()
    num_resumed = sum(t["num_resumed_tokens"] for t in ours.values())
    assert any(t["num_resumed_tokens"] == t["num_tokens"] for t in ours.values())
    assert any(t["num_resumed_tokens"] < t["num_tokens"] for t in ours.values())
    usage = resumed["usage"]
    assert usage["resumed_tokens"] == num_resumed
    assert usage["generated_tokens"] == anew["usage"]["generated_tokens"] - num_resumed
    assert usage["generated_tokens"] + num_resumed == usage["returned_tokens"] + usage["wasted_tokens"]


async def test_metrics_count_a_token_once_as_generated(http: httpx.AsyncClient) -> None:
    answers = [await short_round(http), await long_round(http)]
    text = (await http.get("/metrics")).text
    generated, resumed = ({kind: float(text.split(f':{name}_total{{kind="{kind}"}} ')[1].split("\n")[0])
                           for kind in ("returned", "wasted", "deferred")}
                          for name in ("tokens", "resumed_tokens"))  # fmt: skip
    used = {kind: sum(a["usage"][f"{kind}_tokens"] for a in answers)
            for kind in ("generated", "returned", "wasted", "resumed")}  # fmt: skip
    assert sum(generated.values()) == used["generated"]
    assert sum(resumed.values()) == used["resumed"] > 0
    assert generated["returned"] + resumed["returned"] == used["returned"]
    assert generated["deferred"] >= used["resumed"], "a long round takes over what a short one deferred"
    assert sum(each[kind] for each in (generated, resumed) for kind in ("wasted", "deferred")) == used["wasted"]
    run = (await http.get("/v1/runs/a")).json()["totals"]
    assert run["generated_tokens"] == sum(generated.values())
    assert run["returned_tokens"] == used["returned"]


async def test_chunks_join_without_a_gap(http: httpx.AsyncClient) -> None:
    await short_round(http)
    events = await events_of(http, "/v1/runs/a/rounds", kind="long", stream_tokens=2)
    said: dict[tuple[str, int], list[int]] = {}
    for event in events:
        if event["type"] == "tokens":
            tokens = said.setdefault((event["prompt_id"], event["index"]), [])
            assert event["offset"] == len(tokens)
            tokens += event["token_ids"]
            assert len(event["logprobs"]) == len(event["token_ids"])
    ended = {(e["prompt_id"], e["trajectory"]["index"]): e["trajectory"]["token_ids"]
             for e in events if e["type"] == "trajectory"}  # fmt: skip
    assert len(ended) == 6
    assert said == ended


async def test_each_length_is_learned_once_and_whole(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    short = await short_round(http)
    answer = await long_round(http)
    for group in answer["groups"]:
        told = engine.part(TellingShaping).told[f"id:{group['prompt_id']}"]
        assert Counter(map(len, told)) == Counter([3, 3])  # the spare ones when it was deferred, the others now
        lengths = sorted(length.num_tokens for length in told[-1])
        assert lengths == sorted(t["num_tokens"] for t in group["trajectories"])
        assert not any(length.censored for length in told[-1])
    returned = [group["prompt_id"] for group in short["groups"]]
    assert all([len(lengths) for lengths in engine.part(TellingShaping).told[f"id:{id}"]] == [6] for id in returned)


@pytest.mark.parametrize(("first", "second", "expected"), [("v1", "v1", False), ("v1", "v2", True), (None, None, True)])
async def test_off_policy_is_said_of_what_other_weights_may_have_made(http, engine, first, second, expected):
    engine.weight_version = first
    short = await short_round(http)
    assert not short["off_policy"]
    engine.weight_version = second
    answer = await long_round(http)
    assert answer["off_policy"] is expected
    assert {group["off_policy"] for group in answer["groups"]} == {expected}
    for trajectory in trajectories(answer).values():
        assert trajectory["off_policy"] is expected
        joint, num = trajectory["num_resumed_tokens"], trajectory["num_tokens"]
        spans = [(span["version"], span["start"], span["end"]) for span in trajectory["weight_versions"]]
        if first is None:
            assert spans == []
        elif first == second or joint == num:
            assert spans == [(first, 0, num)]
        else:
            assert spans == [(first, 0, joint), (second, joint, num)]


async def test_what_was_kept_waits_through_a_long_round_that_was_interrupted_and_given_up(http, engine):
    await short_round(http)
    engine.dies_at_step = 0
    assert (await http.post("/v1/runs/a/rounds", json={"kind": "long", "idempotency_key": "k"})).status_code == 503
    engine.dies_at_step = None
    number = (await http.get("/v1/runs/a")).json()["open_round"]["round"]
    assert (await http.delete(f"/v1/runs/a/rounds/{number}")).status_code == 200
    engine.dies_at_step = 0
    assert (await http.post("/v1/runs/a/rounds", json={"kind": "long", "idempotency_key": "l"})).status_code == 503
    engine.dies_at_step = None
    answer = await long_round(http, idempotency_key="l")
    assert all(trajectory["num_resumed_tokens"] for trajectory in trajectories(answer).values())


async def test_a_state_carries_what_was_kept(http: httpx.AsyncClient) -> None:
    await short_round(http)
    state = (await http.get("/v1/rollouts/state")).content
    async with http_of(make_app(FakeEngine())) as other:
        assert (await other.put("/v1/rollouts/state", content=state)).status_code == 204
        assert (await other.get("/v1/runs/a")).json() == (await http.get("/v1/runs/a")).json()
        there, here = await long_round(other), await long_round(http)
    assert trajectories(there) == trajectories(here)
    assert there["usage"] == here["usage"]


@pytest.mark.parametrize(
    ("fields", "param"), [({"sampling_params": {"seed": 6}}, "sampling_params"), ({"include": []}, "include")]
)
async def test_a_round_says_nothing_else_than_its_run(http: httpx.AsyncClient, fields: dict, param: str) -> None:
    await short_round(http)
    response = await http.post("/v1/runs/a/rounds", json={"kind": "long", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert (await http.get("/v1/runs/a")).json()["open_round"] is None
    assert len((await long_round(http, **{param: RUN[param]}))["groups"]) == 2


async def test_a_run_that_cannot_go_on_is_refused_when_it_is_made(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/runs", json={**RUN, "sampling_params": {"stop": ["x"]}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "resume")
    assert (await http.get("/v1/runs")).json()["data"] == []


async def test_lost_candidates_are_made_up_for_by_new_ones(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Two candidates of a deferred group are left: the third one of its long round begins anew."""
    engine.lengths = {index: 30 + index for index in range(40)}
    engine.failures = dict.fromkeys(range(2, 40), 1)
    short = await short_round(http, response_speculation=1.0)
    engine.failures = {}
    assert len(short["deferred"]) == NUM_PROMPTS
    answer = await long_round(http)
    for group in answer["groups"]:
        assert [t["num_resumed_tokens"] > 0 for t in group["trajectories"]] == [True, True, False]
        assert [t["num_tokens"] for t in group["trajectories"]] == [30, 31, 32]


async def test_a_trace_has_whole_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    async with http_of(make_app(FakeEngine(), recorder=TraceRecorder(path))) as http:
        short, answer = await short_round(http), await long_round(http)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["rollout_id"] for row in rows] == [short["id"], answer["id"]]
    lengths = {prompt["id"]: prompt["lengths"] for prompt in rows[1]["prompts"]}
    assert lengths == {g["prompt_id"]: [t["num_tokens"] for t in g["trajectories"]] for g in answer["groups"]}
    assert read_trace(path).num_stopped > 0


PLAIN = GroupRecord(0, "g", None, GroupPlan(1), 0.0, None, None)
ASSESSMENT = Assessment("head", 0.5, 0.6, 0.25, True, 3, Confidence(3.0, 2.0, 2.5))


def end(index: int, state: CandidateState, num_tokens: int, **fields) -> CandidateEnd:
    return CandidateEnd(
        ending=Ending(index, state, num_tokens),
        token_ids=[1000 * index + i for i in range(num_tokens)],
        logprobs=[-0.1 * i for i in range(num_tokens)],
        text=None,
        finish_reason="stop" if state == "finished" else "abort",
        stop_reason=None if state == "finished" else state,
        confidence=(2.0, 0.5),
        weight_versions=[{"version": "v", "start": 0, "end": num_tokens}] if num_tokens else [],
        **fields,
    )


def test_candidates_are_read_as_they_were_kept():
    ends = [end(0, "deferred", 4), end(1, "failed", 9), end(2, "finished", 7), end(3, "deferred", 0)]
    first, second, third = read_kept(keep(ends, 3, PLAIN.fields_of))
    assert list(first.token_ids) == [0, 1, 2, 3]
    assert list(first.logprobs) == ends[0].logprobs  # exactly
    assert (first.whole, first.finish_reason, first.stop_reason) == (False, None, None)
    assert (first.confidence, first.spans) == ((2.0, 0.5), [VersionSpan("v", 0, 4)])
    assert (second.whole, second.num_tokens, second.finish_reason) == (True, 7, "stop")
    assert (third.whole, third.num_tokens, third.spans) == (False, 0, [])


def test_only_as_many_as_a_long_round_runs_are_kept():
    assert len(read_kept(keep([end(i, "deferred", 3) for i in range(5)], 2, PLAIN.fields_of))) == 2


def test_one_that_lost_a_tie_is_over_by_itself():
    tie = end(0, "surplus", 3)
    tie = replace(tie, ending=replace(tie.ending, ended_by_itself=True))
    (kept,) = read_kept(keep([tie], 1, PLAIN.fields_of))
    assert (kept.whole, kept.finish_reason, kept.stop_reason) == (True, "stop", None)
    said = [candidate_of(each, frozenset({"stopped"}), {}) for each in (tie, end(1, "surplus", 3))]
    assert [candidate.ended_by_itself for candidate in said] == [True, False]


@pytest.mark.parametrize(("mode", "expected"), [("active", 0.125), ("shadow", 0.5)])
def test_survival_is_not_forgotten(mode, expected):
    plan = PruningPlan(2, mode=mode)
    judged = end(0, "deferred", 4, parts=SCORES.value(Scores(ASSESSMENT, None)), survival_before=0.5)
    record = GroupRecord(0, "g", None, GroupPlan(1, parts=pruned_by(plan)), 0.0, None, None)
    record.parts = [ScoredGroup(None, record, None, 0)]
    (kept,) = read_kept(keep([judged], 1, record.fields_of))
    assert kept.survival_probability == expected
    later = end(0, "finished", 9, survival_before=kept.survival_probability)
    record.plan = GroupPlan(1, parts=pruned_by(replace(plan, mode="shadow")))
    fields = record.fields_of(later, selected=True)
    trajectory = trajectory_of(later, frozenset({"logprobs"}), fields)
    assert trajectory.survival_probability == trajectory.inclusion_probability == expected


async def test_the_engine_hears_with_what_probability_each_was_kept():
    orders: list[GroupOrder] = []

    class Deaf:
        async def run_group(self, order: GroupOrder) -> AsyncGenerator[Happening, None]:
            orders.append(order)
            return
            yield

    kept = read_kept(keep([end(0, "deferred", 4, survival_before=0.25), end(1, "deferred", 2)], 2, PLAIN.fields_of))
    prompt = PreparedPrompt("q", [1], None, 50)
    order = GroupOrder("g", GroupPlan(3), prompt, "q")
    async for _ in ResumedGroup(kept, Deaf(), order, want_text=False).events():
        pass
    assert [order.beginnings.survival for order in orders] == [{0: 0.25, 1: 1.0}]


def test_what_is_too_much_is_not_kept(monkeypatch):
    monkeypatch.setattr(kept_module, "MAX_KEPT_BYTES", 600)
    assert keep([end(0, "deferred", 20)], 1, PLAIN.fields_of) is not None
    assert keep([end(0, "deferred", 60)], 1, PLAIN.fields_of) is None


def test_a_token_takes_a_few_bytes():
    """Bytes a token, as guides/rounds.md has them, of log probabilities as vLLM has them."""
    logprobs = array("f", [-(((7919 * i) % 10_007) / 2503) for i in range(20_000)]).tolist()
    candidate = replace(
        end(0, "deferred", 0), token_ids=[(7919 * i) % 49_152 for i in range(20_000)], logprobs=logprobs
    )
    assert 5 < len(keep([candidate], 1, PLAIN.fields_of)) / 20_000 < 9


GOOD = [False, False, array("i", [1]).tobytes(), None, [["v", 0, 1]], None, None, None, 1.0]


@pytest.mark.parametrize(("position", "value", "words"), [
    (2, b"abc", "must be 0, got 3 bytes"),
    (2, array("i", [-1]).tobytes(), "at least 0"),
    (3, array("d", [1.0, 2.0]).tobytes(), "must be 1, got 16 bytes"),
    (4, [["v", 0, 2]], "must cover its 1 tokens"),
    (4, [["v", 1, 1]], "must cover its 1 tokens"),
    (8, 0.0, "> 0"),
    (0, 3, "Expected `bool`"),
])  # fmt: skip
def test_what_was_not_kept_so_is_refused(position, value, words):
    wrong = [value if i == position else field for i, field in enumerate(GOOD)]
    with pytest.raises(ValueError, match=words):
        read_kept(zlib.compress(msgspec.msgpack.encode([wrong])))


@pytest.mark.parametrize("blob", [b"", b"abc", zlib.compress(b""), zlib.compress(msgspec.msgpack.encode([GOOD]))[:-1]])
def test_bytes_that_are_none_are_refused(blob):
    with pytest.raises(ValueError):  # noqa: PT011
        read_kept(blob)

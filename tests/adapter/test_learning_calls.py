"""LearningCalls: what engine cores learn from each other, with workers that are quality heads without a model."""

import json
from base64 import b64encode
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.config import ParallelConfig

from vllm_rollout.adapter.core.calls import _rank, rollout_call
from vllm_rollout.adapter.core.learning_calls import LearningCalls
from vllm_rollout.adapter.worker.worker import RolloutWorker
from vllm_rollout.config import MAX_DETECTION_LENGTHS
from vllm_rollout.group.judge import Judge, Scoring
from vllm_rollout.group.lifecycle import Group, GroupTerms
from vllm_rollout.group.pruning_plan import PruningPlan
from vllm_rollout.group.types import Confidence, Observation
from vllm_rollout.tracker.feature_ring import FeatureRing
from vllm_rollout.tracker.quality_heads import QualityHeads
from vllm_rollout.tracker.tracker import CandidateTracker

HIDDEN_SIZE = 8
LENGTH = 10
PLAN = PruningPlan(LENGTH, mode="shadow")


@pytest.fixture(autouse=True)
def _one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Rank:
    """An engine core's learning half: its judge, and a worker that has heads but no model."""

    def __init__(self, rank: int, model: str = "model") -> None:
        self.judge = Judge()
        self.ring = FeatureRing(HIDDEN_SIZE, torch.float32, 1 << 20)
        self.heads = QualityHeads(
            CandidateTracker(torch.device("cpu")), self.ring,
            hidden_size=HIDDEN_SIZE, model=model, device=torch.device("cpu"),
        )  # fmt: skip
        worker = SimpleNamespace(quality_heads=self.heads)
        self._calls = LearningCalls(
            self.judge, lambda method, *args: getattr(RolloutWorker, method)(worker, *args), model=model, rank=rank
        )

    def call(self, operation: str, *arguments: Any) -> Any:
        """As over the wire: tuples become lists."""
        arguments = msgspec.msgpack.decode(msgspec.msgpack.encode(arguments))
        return msgspec.msgpack.decode(msgspec.msgpack.encode(getattr(self._calls, operation)(*arguments)))

    def run_rollout(self, rollout_id: str, num: int = 120, seed: int = 0, plans: tuple[PruningPlan, ...] = (PLAN,)):
        """Score and finish candidates whose first feature says whether they succeed."""
        states = torch.randn(num, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed))
        group = Group(GroupTerms(num, num))
        for index in range(num):
            plan = plans[index % len(plans)]
            group.launch()
            request_id = f"{rollout_id}-{index}"
            entry = self.judge.ledger.open(rollout_id, "p", index, request_id, plan)
            logit = states[index, 0].item()
            seen = Observation(Confidence(1.0, 1.0, 2.0 + logit), logit, 1)
            self.judge.judge(group, Scoring(rollout_id, "p", 7, plan), {index: (entry, seen)})
            entry.state, entry.num_tokens = "finished", 30
        self.ring.put([f"{rollout_id}-{index}" for index in range(num)], states)
        return [["p", index, float(states[index, 0] > 0), bool(states[index, 0] > 0)] for index in range(num)]

    def labels(self) -> list:
        return [calibrator["labels"] for calibrator in self.judge.memory.learnings[LENGTH].to_state()["calibrators"]]

    def train(self) -> None:
        while self.call("train", 10.0):
            pass


def post(ranks: list[Rank], rollout_id: str, rewards: list) -> list:
    """As the API process does."""
    answers = [rank.call("rewards", rollout_id, rewards, len(ranks) > 1) for rank in ranks]
    for origin, answer in enumerate(answers):
        if answer is not None and answer[3]:
            for rank in ranks:
                rank.call("teach", origin, answer[3])
    return answers


def test_one_rank_learns_where_it_observed():
    rank = Rank(0)
    rewards = rank.run_rollout("r")
    assert post([rank], "r", rewards) == [[LENGTH, ["accepted"] * 120, 120, []]]
    assert post([rank], "r", rewards) == [[LENGTH, ["duplicate"] * 120, 0, []]]
    assert rank.call("train", 0.0) > 0
    rank.train()
    ((length, hidden_size, version, num_steps, num_labels, losses),) = rank.call("heads")
    assert (length, hidden_size, version, num_labels) == (LENGTH, HIDDEN_SIZE, 1, 120)
    assert num_steps > 0
    assert len(losses) == 1
    assert rank.call("rewards", "nobody's", rewards, False) is None


def test_ranks_teach_each_other_and_learn_every_label_once():
    ranks, alone = [Rank(0), Rank(1)], Rank(0)
    ones, others = ranks[0].run_rollout("r0", seed=1), ranks[1].run_rollout("r1", seed=2)
    for rollout, seed in (("r0", 1), ("r1", 2)):
        post([alone], rollout, alone.run_rollout(rollout, seed=seed))
    first, second = post(ranks, "r0", ones), post(ranks, "r1", others)
    assert [answer and answer[2] for answer in first + second] == [120, None, None, 120]
    assert ranks[0].labels() == ranks[1].labels() == alone.labels()
    assert ranks[0].call("heads")[0][4] == alone.call("heads")[0][4] == 240
    assert ranks[1].call("heads") == []  # only the first rank trains
    for rank in (*ranks, alone):
        rank.train()
    assert ranks[0].heads.summaries() == alone.heads.summaries()


def test_one_rollout_over_two_ranks_gives_each_reward_one_status():
    ranks = [Rank(0), Rank(1)]
    rewards = ranks[0].run_rollout("r", num=40)
    group = Group(GroupTerms(1, 1))
    group.launch()
    entry = ranks[1].judge.ledger.open("r", "q", 0, "other", PLAN)
    seen = Observation(Confidence(1.0, 1.0, 1.0), 0.5, 1)
    ranks[1].judge.judge(group, Scoring("r", "q", 7, PLAN), {0: (entry, seen)})
    entry.state = "finished"
    one, other = post(ranks, "r", [*rewards, ["q", 0, 1.0, True]])
    assert one[1] == ["accepted"] * 40 + ["unknown"]
    assert other[1] == ["unknown"] * 40 + ["accepted"]
    assert other[2] == 0  # its feature was never kept
    for mine, others in zip(ranks[0].labels(), ranks[1].labels(), strict=True):
        assert sorted(mine) == sorted(others)
        assert len(mine) == 41


def test_heads_of_the_first_rank_reach_the_others():
    ranks = [Rank(0), Rank(1)]
    post(ranks, "r", ranks[1].run_rollout("r"))
    ranks[0].train()
    data = ranks[0].call("export_head", LENGTH)
    assert [rank.call("receive_head", data) for rank in ranks] == [["ok", None], ["ok", LENGTH]]
    published = [rank.heads._tracker.heads[LENGTH] for rank in ranks]
    assert published[0].version == published[1].version == 1
    assert all(torch.equal(a, b) for a, b in zip(published[0].weights, published[1].weights, strict=True))


def test_features_that_are_gone_are_counted_and_the_label_still_calibrates():
    rank = Rank(0)
    rewards = rank.run_rollout("r", num=6)
    rank.ring.take(["r-1", "r-4"])
    assert post([rank], "r", rewards)[0][2] == 4
    ((length, num_awaiting, num_evicted, _),) = rank.call("report")
    assert (length, num_awaiting, num_evicted) == (LENGTH, 0, 2)
    assert len(rank.labels()[0]) == 6


@pytest.mark.parametrize("share", [False, True])
def test_candidates_with_other_detection_lengths_train_their_own_heads(share):
    ranks = [Rank(0), Rank(1)] if share else [Rank(0)]
    rewards = ranks[0].run_rollout("joined", num=10, plans=(PLAN, replace(PLAN, detection_length=20)))
    (answer, *_) = post(ranks, "joined", rewards)
    assert answer[:3] == [LENGTH, ["accepted"] * 10, 10]
    assert {summary[0]: summary[4] for summary in ranks[0].call("heads")} == {LENGTH: 5, 20: 5}
    for rank in ranks:
        assert {length: len(learning._outcomes) for length, learning in rank.judge.memory.learnings.items()} == {
            LENGTH: 5,
            20: 5,
        }


def learned(seed: int = 0) -> Rank:
    rank = Rank(0)
    post([rank], "r", rank.run_rollout("r", seed=seed))
    rank.train()
    return rank


def content(rank: Rank) -> tuple:
    state = json.loads(rank.call("state"))
    return state["learnings"], [head.version for head in rank.heads._tracker.heads.values()], rank.heads.summaries()


def test_what_is_saved_can_be_restored_elsewhere():
    saved, other = learned(1), learned(2)
    other.judge._learning_at(99)
    assert other.call("set_state", saved.call("state")) == ["ok", None]
    assert content(other) == content(saved)
    (one,), (two,) = saved.heads._tracker.heads.values(), other.heads._tracker.heads.values()
    assert all(torch.equal(a, b) for a, b in zip(one.weights, two.weights, strict=True))
    for rank in (saved, other):
        post([rank], "s", rank.run_rollout("s", seed=3))
        rank.train()
    assert content(other) == content(saved)


def test_an_empty_state_can_be_saved_and_restored():
    rank = learned()
    assert rank.call("set_state", Rank(0).call("state")) == ["ok", None]
    assert content(rank) == ([], [], [])


def changed(state: dict, **fields: Any) -> bytes:
    return json.dumps({**state, **fields}).encode()


GARBAGE = [
    b"", b"garbage", b"\xff\xfe", b"[]", b"5", b"null", b'"text"', b"{}", b'{"format": 1}', b"[" * 100_000,
    b'{"format": 1, "model": "model", "learnings": [], "heads": "x"}',
    b'{"format": 1, "model": "model", "learnings": 5, "heads": []}',
    b'{"format": 1, "model": "model", "learnings": [5], "heads": []}',
    b'{"format": 1, "model": "model", "learnings": ["x"], "heads": []}',
    b'{"format": 1, "model": "model", "learnings": [{"detection_length": Infinity}], "heads": []}',
    b'{"format": 1, "model": "model", "learnings": [], "heads": ["%%%"]}',
    b'{"format": 1, "model": "model", "learnings": [], "heads": [5]}',
    b'{"format": 1, "model": "model", "learnings": [], "heads": ["aGVsbG8="]}',
    b'{"format": 1, "model": "model", "learnings": []}',
]  # fmt: skip


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_for_a_state_changes_nothing_and_says_so(data):
    rank = learned()
    before = content(rank)
    kind, message = rank.call("set_state", data)
    assert kind == "invalid"
    assert message
    assert content(rank) == before


def test_a_state_of_something_else_changes_nothing_and_says_so():
    rank = learned()
    before, state = content(rank), json.loads(learned(5).call("state"))
    learning = state["learnings"][0]
    many = [{**learning, "detection_length": 20 + i} for i in range(MAX_DETECTION_LENGTHS + 1)]
    cases = {
        changed(state, format=2): ("invalid", "format must be 1, got 2"),
        changed(state, model="other"): ("mismatch", "the state is of model 'other', this server's is 'model'"),
        changed(state, learnings=many): ("invalid", "at most 8 different ones"),
        changed(state, learnings=[learning, learning]): ("invalid", "at most 8 different ones"),
        changed(state, learnings=[{**learning, "detection_length": 0}]): (
            "invalid",
            "must be an integer in [1, 4096], got 0",
        ),
        changed(state, learnings=[{**learning, "outcomes": [[1, 2]]}]): ("invalid", "an outcome must be a list of 10"),
        changed(state, heads=[b64encode(head).decode() for head in Rank(0, "other").heads.state()] or ["AAAA"]): (
            "invalid",
            "safetensors",
        ),
        changed(state, heads=state["heads"] * 2): ("invalid", "different detection lengths"),
    }
    for data, (kind, message) in cases.items():
        answer = rank.call("set_state", data)
        assert answer[0] == kind
        assert message in answer[1]
        assert content(rank) == before
    other = Rank(0, "another")
    post([other], "r", other.run_rollout("r"))
    heads = json.loads(other.call("state"))["heads"]
    assert rank.call("set_state", changed(state, heads=heads))[0] == "mismatch"
    assert content(rank) == before


def test_a_head_that_does_not_fit_is_an_answer_and_changes_nothing():
    rank, other = learned(), Rank(0, "another")
    before = content(rank)
    post([other], "r", other.run_rollout("r"))
    other.train()
    assert rank.call("put_head", b"garbage")[0] == "invalid"
    assert rank.call("put_head", other.call("export_head", LENGTH))[0] == "mismatch"
    assert content(rank) == before
    assert rank.call("put_head", learned(4).call("export_head", LENGTH)) == ["ok", LENGTH]
    assert rank.call("export_head", 99) is None


@pytest.mark.parametrize(
    ("fields", "rank"),
    [
        ({}, 0),
        ({"data_parallel_index": 1}, 1),
        ({"data_parallel_index": 3, "data_parallel_rank_local": 1}, 3),
        ({"data_parallel_index": 3, "data_parallel_rank_local": 1, "data_parallel_hybrid_lb": True}, 1),
        ({"data_parallel_index": 3, "data_parallel_external_lb": True}, 0),
    ],
)
def test_a_rank_is_counted_among_those_its_api_process_calls(fields, rank):
    parallel = ParallelConfig()
    for name, value in fields.items():
        setattr(parallel, name, value)
    parallel.reconfigure_for_independent_dp_rank()  # as vLLM does to ranks of a dense model
    assert _rank(parallel) == rank


def test_the_engine_core_s_method_finds_judge_worker_model_and_rank():
    rank = learned()
    worker = SimpleNamespace(quality_heads=rank.heads)
    silent = SimpleNamespace(quality_heads=None)  # a tensor-parallel rank whose outputs nobody reads

    def collective_rpc(method: str, args: tuple) -> list:
        return [getattr(RolloutWorker, method)(each, *args) for each in (silent, worker)]

    core = SimpleNamespace(
        scheduler=SimpleNamespace(judge=rank.judge),
        collective_rpc=collective_rpc,
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="model"), parallel_config=ParallelConfig()
        ),
    )
    assert json.loads(rollout_call(core, "state", []))["model"] == "model"
    assert rollout_call(core, "heads", [])[0][:2] == [LENGTH, HIDDEN_SIZE]
    assert rollout_call(core, "receive_head", [b"ignored on the first rank"]) == ["ok", None]

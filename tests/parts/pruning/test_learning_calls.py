"""Messages about learning between API process and engine cores: the real calls of both ends over the real codecs. The
workers are quality heads without a model."""

import asyncio
import gc
import json
import math
import struct
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from tests.parts.pruning.reports import report_of
from tests.parts.pruning.scoring import new_scorer
from tests.parts.pruning.steps import group_terms, judge_of
from tests.parts.shaping.steps import lengths_of
from tests.support.steps import group_steps
from tests.support.waiting import WAIT_S, eventually
from vllm_rollout.config import MAX_ADAPTERS
from vllm_rollout.kernel.api.engine_calls import EngineCalls
from vllm_rollout.kernel.call_table import Operation
from vllm_rollout.kernel.core.calls import answered, rollout_call
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward
from vllm_rollout.kernel.rules.types import BASE_MODEL, CandidateId
from vllm_rollout.kernel.worker.worker import RolloutWorker
from vllm_rollout.parts.memories.rules import Memory
from vllm_rollout.parts.pruning.api import learning
from vllm_rollout.parts.pruning.api.learning import REWARDS_PER_CALL, EngineLearning
from vllm_rollout.parts.pruning.calls import POST_REWARDS, TRAIN, PostedRewards
from vllm_rollout.parts.pruning.core import learning_calls, readings
from vllm_rollout.parts.pruning.core.learning_calls import REWARDS_AT_ONCE, LearningCalls, PruningCore
from vllm_rollout.parts.pruning.core.readings import MAX_READINGS, Readings
from vllm_rollout.parts.pruning.options import PruningOptions
from vllm_rollout.parts.pruning.rules import calibration
from vllm_rollout.parts.pruning.rules.assessment import Confidence
from vllm_rollout.parts.pruning.rules.judge import Judge, JudgedGroup
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.memory import MAX_DETECTION_LENGTHS
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, HeadKey, Observation, PruningPlan
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing, StateKey
from vllm_rollout.parts.pruning.worker.quality_heads import QualityHeads
from vllm_rollout.parts.shaping.calls import LENGTH_HISTORY, OBSERVE_LENGTHS, LengthsToLookUp, ObservedGroup
from vllm_rollout.parts.shaping.rules.history import LengthHistory, ObservedLength

pytestmark = pytest.mark.anyio

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
    """An engine core with a judge, and a worker that has heads but no model."""

    def __init__(self, model: str = "model") -> None:
        self.ring = FeatureRing(HIDDEN_SIZE, torch.bfloat16, 1 << 20)
        self.heads = QualityHeads(
            new_scorer(torch.device("cpu")), self.ring,
            hidden_size=HIDDEN_SIZE, model=model, device=torch.device("cpu"),
        )  # fmt: skip
        self.scheduler = SimpleNamespace(group_steps=group_steps())
        self.part = PruningCore(self.scheduler)
        self.scheduler.part = {PruningCore: self.part}.get
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(served_model_name=model))
        self.worker_calls: list[str] = []
        self.arguments: dict[str, list[Any]] = {name: [] for name in answered()}

    @property
    def judge(self) -> Judge:
        return judge_of(self.scheduler)

    def collective_rpc(self, method: str, args: tuple) -> list[Any]:
        """A tensor-parallel rank whose outputs nobody reads answers first."""
        self.worker_calls.append(method)
        workers = [SimpleNamespace(quality_heads=None), SimpleNamespace(quality_heads=self.heads)]
        return [getattr(RolloutWorker, method)(worker, *args) for worker in workers]

    def call(self, operation: Operation, argument: Any) -> Any:
        return operation.decode_result(rollout_call(self, operation.name, operation.encode_argument(argument)))

    def run_rollout(
        self,
        rollout_id: str,
        num: int = 120,
        seed: int = 0,
        plan: PruningPlan = PLAN,
        prompt_id: str = "p",
        prompt_key: str = "",
        adapter: str = BASE_MODEL,
    ) -> list[Reward]:
        """Score and finish candidates whose first feature says whether they succeed."""
        states = torch.randn(num, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed)).bfloat16()
        group = Group(group_terms(num, num, pruning=plan))
        judged = JudgedGroup(group, plan)
        scoring = Scoring(rollout_id, prompt_id, 7, prompt_key=prompt_key, adapter=adapter)
        for index in range(num):
            group.launch()
            entry = self.judge.ledger.open(scoring, CandidateId("", index), f"{rollout_id}-{index}", plan)
            logit = states[index, 0].item()
            seen = Observation(Confidence(1.0, 1.0, 2.0 + logit), logit, 1)
            self.judge.judge(judged, scoring, {index: (entry, seen)})
            entry.state, entry.num_tokens = "finished", 30
        self.ring.put([StateKey(f"{rollout_id}-{index}", plan.detection_length) for index in range(num)], states)
        good = [bool(states[index, 0] > 0) for index in range(num)]
        return [Reward(prompt_id, index, float(good[index]), good[index]) for index in range(num)]

    def labels(self) -> list:
        state = self.judge.memory.learnings[LENGTH].to_state()
        return [[label[:3] for label in calibrator["labels"]] for calibrator in state["calibrators"]]


class Client:
    """An engine client with several ranks."""

    errored = False
    """Asked for of a call that takes long, as on a busy machine."""

    def __init__(self, *ranks: Rank) -> None:
        self.core_engines = ranks
        self.num_ranks = len(ranks)
        self.living_ranks = list(range(len(ranks)))
        self.engine_core = self

    async def _call_utility_async(self, method: str, operation: str, payload: bytes, *, engine: Rank) -> bytes:
        engine.arguments[operation].append(payload)
        answer = rollout_call(engine, operation, payload)
        await asyncio.sleep(0)
        return answer


class Engine:
    """The API process: the service's engine, waited for."""

    def __init__(self, *ranks: Rank) -> None:
        self._client = Client(*ranks)

    def __getattr__(self, name: str) -> Any:
        def do(*args: Any) -> Any:
            async def done() -> Any:
                engine = EngineLearning(EngineCalls(self._client), PruningOptions(train_budget_s=10.0))
                result = await getattr(engine, name)(*args)
                await engine.settled()
                return result

            return asyncio.run(done())

        return do


def test_one_rank_learns_where_it_observed():
    rank = Rank()
    engine, rewards = Engine(rank), rank.run_rollout("r")
    receipt = engine.post_rewards("r", rewards)
    assert (receipt.num_training, receipt.head_versions) == (120, {HeadKey(LENGTH): 0})
    assert list(receipt.statuses) == ["accepted"] * 120
    receipt = engine.post_rewards("r", rewards)
    assert (list(receipt.statuses), receipt.num_training) == (["duplicate"] * 120, 0)
    assert receipt.head_versions == {HeadKey(LENGTH): 1}
    (head,) = rank.heads.infos()
    assert (head.detection_length, head.hidden_size, head.version, head.num_labels) == (LENGTH, HIDDEN_SIZE, 1, 120)
    assert engine.quality_head(None) == (head, rank.heads.export(HeadKey(LENGTH)))
    assert engine.post_rewards("nobody's", rewards) is None


def test_ranks_teach_each_other_and_learn_every_label_once():
    ranks, alone = [Rank(), Rank()], Rank()
    ones, others = ranks[0].run_rollout("r0", seed=1), ranks[1].run_rollout("r1", seed=2)
    for rollout, seed in (("r0", 1), ("r1", 2)):
        Engine(alone).post_rewards(rollout, alone.run_rollout(rollout, seed=seed))
    engine = Engine(*ranks)
    assert [engine.post_rewards(name, posted).num_training for name, posted in (("r0", ones), ("r1", others))] == [
        120
    ] * 2
    assert ranks[0].labels() == ranks[1].labels() == alone.labels()
    assert ranks[0].heads.infos() == alone.heads.infos()
    assert ranks[0].heads.infos()[0].num_labels == 240
    assert ranks[1].arguments["learn_features"] == [], "only the first rank trains"
    published = [rank.heads.scorer.heads[HeadKey(LENGTH)] for rank in ranks]
    assert published[0].version == published[1].version > 0
    assert all(torch.equal(a, b) for a, b in zip(published[0].weights, published[1].weights, strict=True))


def test_a_head_that_is_put_begins_a_scale_of_its_own_on_every_rank():
    ranks = [Rank(), Rank()]
    engine = Engine(*ranks)
    engine.post_rewards("r", ranks[0].run_rollout("r"))
    _, data = engine.quality_head(None)
    for rank in ranks:
        rank.run_rollout("again")
    engine.set_quality_head(data)
    for rank in ranks:
        state = rank.judge.memory.learnings[LENGTH].calibrators["head"].to_state()
        assert state["scales"][state["present"]][-2] == 0, "no score has come since"
        assert state["present"] not in {scale for _, scale in state["recent"]}
        assert len(state["recent"]) > 0


def test_one_rollout_over_two_ranks_gives_each_reward_one_status_and_counts_features_that_are_gone():
    ranks = [Rank(), Rank()]
    rewards = ranks[0].run_rollout("r", num=40)
    ranks[1].run_rollout("r", num=1, prompt_id="q")
    ranks[1].ring.take([StateKey("r-0", LENGTH)])  # its feature is gone
    receipt = Engine(*ranks).post_rewards("r", [*rewards, Reward("q", 0, 1.0, True), Reward("z", 0, 1.0, True)])
    assert list(receipt.statuses) == ["accepted"] * 41 + ["unknown"]
    assert receipt.num_training == 40
    for mine, others in zip(ranks[0].labels(), ranks[1].labels(), strict=True):
        assert sorted(mine) == sorted(others)
        assert len(mine) == 41
    report = Engine(*ranks).learning_report(None)
    assert (report.detection_length, report.num_awaiting, report.num_evicted) == (LENGTH, 0, 1)
    assert report.signals == report_of(ranks[0].judge.memory.learnings[LENGTH]).signals


def test_ends_are_learned_beside_a_detection_length_and_reported_by_name():
    rank = Rank()
    plan = PruningPlan(LENGTH, mode="shadow", final_score=True)
    rewards = rank.run_rollout("r", num=120, plan=plan)
    states = torch.randn(120, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
    for index in range(120):
        entry = rank.judge.ledger._rollouts["r"]["p", index]
        rank.judge.value(entry, Observation(Confidence(1.0, math.nan, math.nan), None, 0, WHOLE))
    rank.ring.put([StateKey(f"r-{index}", 30, at_end=True) for index in range(120)], states)
    engine = Engine(rank)
    receipt = engine.post_rewards("r", rewards)
    assert (set(receipt.statuses), receipt.num_training) == ({"accepted"}, 240)
    assert engine.learning_report(None).detection_length == LENGTH
    ends = engine.learning_report(WHOLE)
    assert (ends.head.num_labels, ends.num_evicted, ends.num_awaiting) == (120, 0, 0)
    assert len(rank.ring) == 0


def test_a_report_over_ranks_counts_the_verdicts_of_all():
    plan = PruningPlan(LENGTH, min_labels=4, allow_fewer=True)
    ranks = [Rank(), Rank()]
    Engine(*ranks).post_rewards("r", ranks[0].run_rollout("r"))
    for number, rank in enumerate(ranks):
        rank.run_rollout(f"s{number}", num=30, seed=number, plan=plan)
    learnings = [rank.judge.memory.learnings[LENGTH] for rank in ranks]
    active = Engine(*ranks).learning_report(LENGTH).active
    assert active.num_scored == sum(learning.num_judged for learning in learnings) == 60
    assert active.num_pruned == sum(learning.num_pruned for learning in learnings) > 0


# -- what a call may take


class Clock:
    """Each look at it takes a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rewards_are_posted_in_as_many_calls_as_they_take(num_ranks, monkeypatch):
    monkeypatch.setattr(LearningCalls.__init__, "__kwdefaults__", {"clock": Clock(), "budget_s": 0.0015})
    ranks = [Rank() for _ in range(num_ranks)]
    rewards = ranks[0].run_rollout("r", num=REWARDS_PER_CALL + 100)
    receipt = Engine(*ranks).post_rewards("r", rewards)
    assert list(receipt.statuses) == ["accepted"] * len(rewards)
    assert receipt.num_training == len(rewards)
    posted = [POST_REWARDS.decode_argument(payload).rewards for payload in ranks[0].arguments["post_rewards"]]
    assert max(map(len, posted)) == REWARDS_PER_CALL
    assert len(posted) == -(-len(rewards) // (2 * REWARDS_AT_ONCE))
    for rank in ranks:
        assert [len(labels) for labels in rank.labels()] == [len(rewards)] * 2


def test_of_two_posts_alike_one_is_accepted_and_one_a_duplicate(monkeypatch):
    monkeypatch.setattr(LearningCalls.__init__, "__kwdefaults__", {"clock": Clock(), "budget_s": 0.0})
    rank = Rank()
    rewards = rank.run_rollout("r", num=100)

    async def both() -> list:
        engine = EngineLearning(EngineCalls(Client(rank)), PruningOptions(train_budget_s=10.0))
        return await asyncio.gather(*(engine.post_rewards("r", rewards) for _ in range(2)))

    assert [list(receipt.statuses) for receipt in asyncio.run(both())] == [["accepted"] * 100, ["duplicate"] * 100]


@pytest.mark.thorough
async def test_rewards_are_taken_to_the_end_when_the_client_goes_away():
    ranks = [Rank(), Rank()]
    rewards = ranks[1].run_rollout("r", num=2 * REWARDS_PER_CALL)
    calls = EngineCalls(Client(*ranks))
    engine = EngineLearning(calls, PruningOptions(train_budget_s=10.0))
    posting = asyncio.create_task(engine.post_rewards("r", rewards))
    for _ in range(4):
        await asyncio.sleep(0)
    posting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await posting
    assert calls.is_busy
    await eventually(lambda: not calls.is_busy)
    await engine.settled()
    assert ranks[0].labels() == ranks[1].labels()
    assert len(ranks[0].labels()[0]) == len(rewards)


def test_rewards_of_one_call_are_predicted_by_one_table_of_each_signal(monkeypatch):
    """A table takes a millisecond of the engine's time, and rewards of a call may be of many rollouts."""
    rank = Rank()
    for number in range(4):
        Engine(rank).post_rewards(f"r{number}", rank.run_rollout(f"r{number}", seed=number))
    rewards = [
        NamedReward("rollout", f"s{number}", reward)
        for number in range(REWARDS_AT_ONCE)
        for reward in rank.run_rollout(f"s{number}", num=1, seed=9)
    ]
    made, combine = [], calibration.combined_table
    monkeypatch.setattr(calibration, "combined_table", lambda *args: made.append(1) or combine(*args))
    progress = rank.call(POST_REWARDS, PostedRewards(rewards, share=False))
    assert progress.statuses == ["accepted"] * REWARDS_AT_ONCE
    assert 0 < len(made) <= 2


async def test_while_rewards_keep_coming_heads_are_shared_and_the_state_can_be_saved(monkeypatch):
    monkeypatch.setattr(learning, "SETTLE_S", 0.05)
    ranks, saves = [Rank(), Rank()], []
    calls = EngineCalls(Client(*ranks))
    calls.after_change = lambda: saves.append(1)
    engine = EngineLearning(calls, PruningOptions(train_budget_s=10.0))
    train = ranks[0].heads.train
    monkeypatch.setattr(ranks[0].heads, "train", lambda budget_s: train(budget_s) + 1)
    await engine.post_rewards("r", ranks[0].run_rollout("r"))
    await eventually(lambda: len(saves) > 1)
    assert ranks[1].heads.infos()[0].version > 0
    async with asyncio.timeout(WAIT_S):
        state = await engine.learning_state()
    assert engine.is_busy
    monkeypatch.undo()
    await engine.settled()
    await EngineLearning(EngineCalls(Client(Rank())), PruningOptions()).set_learning_state(state)


async def test_only_a_head_that_was_trained_is_sent_to_the_other_ranks(monkeypatch):
    ranks = [Rank(), Rank()]
    engine = EngineLearning(EngineCalls(Client(*ranks)), PruningOptions(train_budget_s=10.0))
    for length in (LENGTH, LENGTH + 1):
        plan = replace(PLAN, detection_length=length)
        await engine.post_rewards(f"r{length}", ranks[0].run_rollout(f"r{length}", plan=plan))
        await engine.settled()
    before = len(ranks[1].arguments["put_head"])
    left, train = iter([1, 1, 1]), ranks[0].heads.train

    def train_slowly(budget_s: float) -> int:
        time.sleep(2 * learning.SETTLE_S)  # heads are shared after each slice
        return train(budget_s) + next(left, 0)

    monkeypatch.setattr(learning, "SETTLE_S", 0.01)
    monkeypatch.setattr(ranks[0].heads, "train", train_slowly)
    await engine.post_rewards("again", ranks[0].run_rollout("again", seed=3))
    await engine.settled()
    assert [head.version for head in ranks[1].heads.infos()] == [2, 1]
    assert len(ranks[1].arguments["put_head"]) == before + 1


async def test_rewards_that_come_while_the_last_heads_are_shared_are_trained_too(monkeypatch):
    ranks = [Rank(), Rank()]
    engine = EngineLearning(EngineCalls(Client(*ranks)), PruningOptions(train_budget_s=10.0))
    share, late = engine._share_heads, []

    async def share_slowly(shared) -> None:
        if not late:
            late.append(await engine.post_rewards("late", ranks[0].run_rollout("late", seed=5)))
        await share(shared)

    monkeypatch.setattr(engine, "_share_heads", share_slowly)
    await engine.post_rewards("r", ranks[0].run_rollout("r"))
    await engine.settled()
    assert (late[0].num_training > 0, ranks[0].call(TRAIN, 0.0)) == (True, 0)


def test_a_piece_ends_when_its_time_is_spent_or_it_is_large_enough(monkeypatch):
    monkeypatch.setattr(readings, "MAX_PIECE_BYTES", 10)
    some = Readings(Clock(), budget_s=0.0025)
    some.open("slow", iter([b"a"] * 7))
    pieces = [some.read("slow") for _ in range(3)]
    assert [(piece.data, piece.is_last) for piece in pieces] == [(b"aaa", False), (b"aaa", False), (b"a", True)]
    assert some.read("slow") is None
    some = Readings(lambda: 0.0)
    some.open("large", iter([b"aaaa"] * 4))
    assert [(piece.data, piece.is_last) for piece in (some.read("large"), some.read("large"))] == [
        (b"a" * 12, False), (b"aaaa", True),
    ]  # fmt: skip


def test_readers_that_go_away_do_not_fill_memory():
    some = Readings()
    for reader in range(3 * MAX_READINGS):
        some.open(str(reader), iter([b""]))
    assert len(some) == MAX_READINGS
    assert some.read("0") is None
    assert some.read(str(3 * MAX_READINGS - 1)) is not None


@pytest.mark.thorough
def test_a_state_is_read_in_parts_between_which_the_engine_goes_on(monkeypatch):
    monkeypatch.setattr(learning_calls, "MAX_PIECE_BYTES", 4096)
    monkeypatch.setattr(readings, "MAX_PIECE_BYTES", 4096)
    rank = learned()
    for number in range(3000):
        lengths_of(rank.judge).observe(f"id:{number}", [ObservedLength(5, False), ObservedLength(9, False)])
    whole = Engine(rank).learning_state()
    assert len(rank.arguments["read"]) > len(whole) / 200_000
    assert Engine(Rank()).set_learning_state(whole) is None
    # Now with rewards, lengths and training in between.
    rank.part.readings.open("r", LearningCalls(
        rank.judge, rank.part.readings, lambda *call: rank.collective_rpc(call[0], call[1:])[1], model="model"
    )._state("r"))  # fmt: skip
    parts, number = [], 0
    while (piece := rank.part.readings.read("r")) is not None:
        parts.append(piece.data)
        number += 1
        if number < 30:
            lengths_of(rank.judge).observe(f"new:{number}", [ObservedLength(5, False)])
            lengths_of(rank.judge).observe("id:1", [ObservedLength(5, False)])
            Engine(rank).post_rewards(f"s{number}", rank.run_rollout(f"s{number}", num=70, seed=number))
        if piece.is_last:
            break
    restored = Rank()
    assert Engine(restored).set_learning_state(b"".join(parts)) is None
    goes_on(restored)


def test_a_detection_length_that_displaces_another_while_the_state_is_read_is_not_in_it():
    rank, lengths = Rank(), range(20, 20 + MAX_DETECTION_LENGTHS)

    def learn(length: int) -> None:
        rewards = rank.run_rollout(f"r{length}", num=70, seed=length, plan=replace(PLAN, detection_length=length))
        Engine(rank).post_rewards(f"r{length}", rewards)

    for length in lengths:
        learn(length)
    calls = LearningCalls(
        rank.judge, rank.part.readings, lambda *call: rank.collective_rpc(call[0], call[1:])[1], model="model"
    )
    parts = []
    for part in calls._state("r"):
        parts.append(part)
        if len(parts) == 3:
            learn(28)
    assert {head.detection_length for head in rank.heads.infos()} == {*lengths[1:], 28}
    restored = Rank()
    assert Engine(restored).set_learning_state(b"".join(parts)) is None
    assert {head.detection_length for head in restored.heads.infos()} == set(lengths[1:])


# -- heads and states


def learned(seed: int = 0, model: str = "model", length: int = LENGTH) -> Rank:
    rank = Rank(model)
    Engine(rank).post_rewards("r", rank.run_rollout("r", seed=seed, plan=replace(PLAN, detection_length=length)))
    lengths_of(rank.judge).observe("id:a", [ObservedLength(10, False), ObservedLength(30, True)])
    return rank


def goes_on(rank: Rank) -> None:
    """A rollout, rewards, training, a report, a head, a save and a restart work."""
    engine = Engine(rank)
    for length in (LENGTH, 77):
        rewards = rank.run_rollout(f"on{length}", num=80, seed=length, plan=replace(PLAN, detection_length=length))
        assert list(engine.post_rewards(f"on{length}", rewards).statuses) == ["accepted"] * 80
        assert engine.learning_report(length).signals["confidence"].num_positive > 0
        json.dumps(engine.learning_report(length).losses, allow_nan=False)
    lengths_of(rank.judge).observe("id:on", [ObservedLength(10, False), ObservedLength(30, True)])
    state = engine.learning_state()
    Engine(Rank()).set_learning_state(state)
    for head in rank.heads.infos():
        if head.version:
            Engine(Rank()).set_quality_head(engine.quality_head(head.detection_length)[1])


def content(rank: Rank) -> tuple:
    state = Engine(rank).learning_state()
    return state, [head.version for head in rank.heads.scorer.heads.values()], rank.heads.infos()


def refused(rank: Rank, put: str, data: bytes) -> RequestError:
    """Error of a refused head or state. A refusal changes nothing."""
    before = content(rank)
    with pytest.raises(RequestError) as caught:
        getattr(Engine(rank), put)(data)
    assert content(rank) == before
    assert 0 < len(str(caught.value)) < 1000
    return caught.value


def opened(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    (length,) = struct.unpack_from("<Q", data)
    return load(data), json.loads(data[8 : 8 + length])["__metadata__"]


def written(lines: Iterable[Any], heads: Sequence[bytes] = ()) -> bytes:
    """A state as it is written: its header and rows, then heads."""
    state = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    state += b"".join(b'["head", %d]\n' % len(head) + head for head in heads)
    return state + b'["end", %d]\n' % len(heads)


SAVED = learned()
HEAD, HEAD_STATE, STATE = SAVED.heads.export(HeadKey(LENGTH)), SAVED.heads.state()[0][1], Engine(SAVED).learning_state()
HEADER = {"format": 2, "model": "model"}
TOTALS = ["lengths", LengthHistory().totals()]
BEGUN = written([HEADER, TOTALS]).removesuffix(b'["end", 0]\n')
GARBAGE = [
    b"", b"garbage", b"\xff\xfe", b"[]", b"5", b"null", b'"text"', b"{}", b'{"format": 1}', b'{"format": 3}',
    b"[" * 100_000, b'{"format": 2, "model": "model"}',
    written([{**HEADER, "model": 5}, TOTALS]),
    BEGUN + b'["end", 1]',
    BEGUN + b'["end", 0]\n["end", 0]',
    BEGUN + b'["head", 10]\n12',
    BEGUN + b'["head", -1]\n["end", 0]',
    b'{"format": 1, "model": "model", "learnings": [], "heads": []}',
    *(STATE[: int(len(STATE) * place)] for place in (0.01, 0.2, 0.4, 0.6, 0.8, 0.99)),
]  # fmt: skip


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_for_a_state_changes_nothing_and_says_so(data):
    assert refused(learned(), "set_learning_state", data).status == 400


@pytest.mark.parametrize(
    "data",
    [
        b'{"format": 2, "model": "model"}\n[' + b"[]," * 3_000_000 + b"0]",
        b'{"format": 2, "model": "model"}\n' + (b'["prompts", [' + b"[]," * 200_000 + b"0]]\n") * 5,
        b'{"format": 2, "model": "model"}\n'
        + b"".join(b'["learning", {"detection_length": %d}]\n' % length for length in range(9)),
    ],
    ids=["row", "prompts", "learnings"],
)  # fmt: skip
def test_a_small_file_does_not_become_large_objects(data):
    rank = Rank()
    gc.collect()
    tracemalloc.start()
    try:
        assert refused(rank, "set_learning_state", data).status == 400
        assert tracemalloc.get_traced_memory()[1] < 80e6
    finally:
        tracemalloc.stop()


def test_a_state_of_something_else_changes_nothing_and_says_so():
    rank, saved = learned(), learned(5)
    rows = list(saved.judge.memories.to_state())
    learning = rows[0][1]
    others = [row for row in rows if row[0] not in ("learning", "outcomes")]
    heads = [data for _, data in saved.heads.state()]
    ((_, another),) = learned(model="another").heads.state()

    def at(*lengths: int) -> list[Any]:
        return [["learning", {**learning, "detection_length": length}] for length in lengths]

    lengths = range(20, 20 + MAX_DETECTION_LENGTHS)
    for state, status, message in (
        (written([{**HEADER, "format": 1}, *rows], heads), 400, "format must be 2, got 1"),
        (written([{**HEADER, "model": "other"}, *rows], heads), 409, "of model 'other', this server's is 'model'"),
        (written([HEADER, *at(*lengths, 99), *others], heads), 400, "at most 8 different ones"),
        (written([HEADER, *at(LENGTH, LENGTH), *others], heads), 400, "at most 8 different ones"),
        (written([HEADER, *at(*lengths), *others], heads), 400, "at most 8 different detection lengths"),
        (written([HEADER, *at(-1), *others], heads), 400, "must be an integer in [0, 4096], got -1"),
        (written([HEADER, rows[0], ["outcomes", LENGTH, [[1, 2]]], *others]), 400, "an outcome must be a list of 11"),
        (written([HEADER, *rows], [b"\0\0\0"]), 400, "safetensors"),
        (written([HEADER, *rows], heads * 2), 400, "different detection lengths"),
        (written([HEADER, *rows], [another]), 409, "the head's model is 'another'"),
        (written([HEADER, ["prompts", [["id:a", 1, -5.0, 1, 0.0]]], TOTALS], heads), 400, "-5"),
    ):
        error = refused(rank, "set_learning_state", state)
        assert error.status == status, message
        assert message in str(error)


def test_a_head_that_does_not_fit_is_said_and_changes_nothing():
    rank, other = learned(), learned(model="another")
    assert refused(rank, "set_quality_head", b"garbage").status == 400
    assert refused(rank, "set_quality_head", other.heads.export(HeadKey(LENGTH))).status == 409
    head = Engine(rank).set_quality_head(learned(4).heads.export(HeadKey(LENGTH)))
    assert head == rank.heads.infos()[0]
    with pytest.raises(RequestError, match=f"no trained quality head for 99, only for {LENGTH}"):
        Engine(rank).quality_head(99)


def test_a_head_that_is_put_scores_on_every_rank_that_has_room():
    ranks = [Rank(), Rank(), Rank()]
    for length in range(20, 20 + MAX_DETECTION_LENGTHS):
        ranks[1].run_rollout(f"awaited{length}", num=1, plan=replace(PLAN, detection_length=length))
    head = Engine(*ranks).set_quality_head(learned().heads.export(HeadKey(LENGTH)))
    assert [rank.heads.infos() for rank in ranks] == [[head], [], [head]]
    ranks[0].run_rollout("awaited", num=1, plan=replace(PLAN, detection_length=99))
    for length in range(20, 20 + MAX_DETECTION_LENGTHS - 1):
        ranks[0].run_rollout(f"awaited{length}", num=1, plan=replace(PLAN, detection_length=length))
    with pytest.raises(RequestError, match="rewards are awaited for all there are"):
        Engine(*ranks).set_quality_head(learned(length=100).heads.export(HeadKey(100)))
    assert [HeadKey(100) in rank.heads.scorer.heads for rank in ranks] == [False] * 3, (
        "what rank 0 refuses nobody takes"
    )


def test_heads_that_are_put_take_the_place_of_what_nobody_awaits_rewards_for():
    rank, engine = learned(), None
    engine = Engine(rank)
    for length in range(20, 20 + MAX_DETECTION_LENGTHS - 1):
        rank.run_rollout(f"awaited{length}", num=1, plan=replace(PLAN, detection_length=length))
    engine.set_quality_head(learned(length=100).heads.export(HeadKey(100)))
    assert LENGTH not in rank.judge.memory.learnings
    assert HeadKey(LENGTH) not in rank.heads.scorer.heads
    assert {head.detection_length for head in rank.heads.infos()} == {100}
    assert len(rank.judge.memory.learnings) == MAX_DETECTION_LENGTHS
    rank.run_rollout("awaited100", num=1, plan=replace(PLAN, detection_length=100))
    error = refused(rank, "set_quality_head", learned(length=101).heads.export(HeadKey(101)))
    assert "rewards are awaited for all there are" in str(error)
    goes_on_with = rank.run_rollout("more", num=5, plan=replace(PLAN, detection_length=100))
    assert list(engine.post_rewards("more", goes_on_with).statuses) == ["accepted"] * 5


def test_a_detection_length_that_gave_way_takes_its_head_with_it():
    rank = learned()
    for length in range(20, 20 + MAX_DETECTION_LENGTHS):
        plan = replace(PLAN, detection_length=length)
        Engine(rank).post_rewards(f"r{length}", rank.run_rollout(f"r{length}", seed=length, plan=plan))
    assert HeadKey(LENGTH) not in rank.heads.scorer.heads
    assert {head.detection_length for head in rank.heads.infos()} == set(range(20, 28))
    assert Engine(rank).quality_head(27)[0].version == 1
    rewards = rank.run_rollout("again", seed=3)
    assert Engine(rank).post_rewards("again", rewards).head_versions == {HeadKey(LENGTH): 0}, "it begins anew"


# -- served names


def rewarded(engine: Engine, rank: Rank, adapter: str, seed: int = 0, length: int = LENGTH, num: int = 120) -> None:
    """A rollout under a served name, its rewards and its lengths."""
    name = f"{adapter or 'base'}{seed}at{length}"
    plan = replace(PLAN, detection_length=length)
    rewards = rank.run_rollout(name, num, seed, plan, prompt_key=f"id:{name}", adapter=adapter)
    receipt = engine.post_rewards(name, rewards)
    assert (receipt.num_training, [*receipt.head_versions]) == (num, [HeadKey(length, adapter)])
    lengths = [ObservedLength(5 + seed, False), ObservedLength(9, False)]
    for each in engine._client.core_engines:
        each.call(OBSERVE_LENGTHS, ObservedGroup(f"id:{name}", lengths, adapter))


def rows_of(memory: Memory) -> list[Any]:
    return [row for section in memory.values() for row in section.to_rows()]


def known_of(rank: Rank, engine: Engine, adapter: str) -> list[Any]:
    """All that is known of a name."""
    heads = [head for head in rank.heads.infos() if head.adapter == adapter]
    report = engine.learning_report(LENGTH, adapter)
    return [
        rows_of(rank.judge.memories.known(adapter)), heads, report, engine.known_prompts(adapter),
        rank.call(LENGTH_HISTORY, LengthsToLookUp([f"id:{adapter or 'base'}0at{LENGTH}"], adapter)),
    ]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_told_of_one_adapter_leaves_the_others_and_the_base_model_alone(num_ranks):
    ranks = [Rank() for _ in range(num_ranks)]
    engine, last = Engine(*ranks), ranks[-1]
    for seed, adapter in enumerate((BASE_MODEL, "a", "b")):
        rewarded(engine, last, adapter, seed)
    before = {adapter: known_of(ranks[0], engine, adapter) for adapter in (BASE_MODEL, "b")}
    of_a = known_of(ranks[0], engine, "a")
    rewarded(engine, last, "a", seed=7)
    assert {adapter: known_of(ranks[0], engine, adapter) for adapter in before} == before
    assert known_of(ranks[0], engine, "a") != of_a
    assert engine.quality_head(None, "a")[0].num_labels == 240
    assert engine.quality_head(None)[0].num_labels == 120
    assert engine.learning_report(None, "a").adapter == "a"
    assert [prompt.key for prompt in engine.known_prompts("a")] == [f"id:a7at{LENGTH}", f"id:a1at{LENGTH}"]
    with pytest.raises(RequestError, match="there is no report yet"):
        engine.learning_report(None, "unheard of")
    assert engine.known_prompts("unheard of") == []
    nothing = ranks[0].call(LENGTH_HISTORY, LengthsToLookUp(["id:x"], "unheard of"))
    assert (nothing.dataset, nothing.prompts) == (None, [None])
    for rank in ranks:
        assert "unheard of" not in rank.judge.memories.all(), "to look is not to learn"
        assert set(rank.heads.scorer.heads) == {HeadKey(LENGTH, adapter) for adapter in (BASE_MODEL, "a", "b")}


@pytest.mark.thorough
def test_names_are_saved_and_go_on_elsewhere_as_here():
    saved, other = Rank(), Rank()
    for seed, adapter in enumerate((BASE_MODEL, "a", "b")):
        rewarded(Engine(saved), saved, adapter, seed)
    rewarded(Engine(other), other, "gone")
    other.run_rollout("s", num=1, plan=replace(PLAN, detection_length=99))
    Engine(other).set_learning_state(Engine(saved).learning_state())
    assert content(other) == content(saved)
    for one, two in zip(saved.heads.scorer.heads.values(), other.heads.scorer.heads.values(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.weights, two.weights, strict=True))
    for rank in (saved, other):
        rewarded(Engine(rank), rank, "a", seed=5)
    assert content(other) == content(saved)
    goes_on(other)
    Engine(other).set_learning_state(Engine(Rank()).learning_state())
    assert content(other) == content(Rank()), "nothing, when nothing was saved"


def test_a_head_is_put_in_an_adapters_place():
    ranks = [Rank(), Rank()]
    engine = Engine(*ranks)
    head = engine.set_quality_head(learned().heads.export(HeadKey(LENGTH)), "a")
    assert head.key == HeadKey(LENGTH, "a")
    for rank in ranks:
        assert list(rank.heads.scorer.heads) == [HeadKey(LENGTH, "a")]
        assert list(rank.judge.known("a").learnings) == [LENGTH]
    assert engine.quality_head(None, "a")[1] == learned().heads.export(HeadKey(LENGTH))


def test_an_adapter_that_gave_way_takes_its_heads_with_it():
    rank = Rank()
    engine = Engine(rank)
    for number in range(MAX_ADAPTERS + 1):
        rewarded(engine, rank, f"{number}", num=70)
    assert "0" not in rank.judge.memories.all()
    assert {head.adapter for head in rank.heads.infos()} == {f"{number}" for number in range(1, MAX_ADAPTERS + 1)}
    assert HeadKey(LENGTH, "0") not in rank.heads.scorer.heads
    rewarded(engine, rank, "0", seed=1, num=70)
    assert engine.quality_head(None, "0")[0].num_labels == 70, "it begins anew"


def test_a_head_for_one_adapter_too_many_is_refused_and_nothing_gives_way_for_a_bad_one():
    rank, data = Rank(), learned().heads.export(HeadKey(LENGTH))
    for number in range(MAX_ADAPTERS):
        rewarded(Engine(rank), rank, f"{number}", num=70)
    before = content(rank)
    with pytest.raises(RequestError) as caught:
        Engine(rank).set_quality_head(b"garbage", "another")
    assert caught.value.status == 400
    assert content(rank) == before
    for number in range(MAX_ADAPTERS):
        rank.run_rollout(f"awaited{number}", num=1, adapter=f"{number}")
    with pytest.raises(RequestError, match="at most 8 adapters"):
        Engine(rank).set_quality_head(data, "another")
    assert "another" not in rank.judge.memories.all()
    assert Engine(rank).set_quality_head(data).adapter == BASE_MODEL


def test_a_rank_without_room_for_an_adapter_learns_nothing_of_it():
    first, second = Rank(), Rank()
    for number in range(MAX_ADAPTERS):
        first.run_rollout(f"awaited{number}", num=1, adapter=f"{number}")
    rewards = second.run_rollout("r", num=70, adapter="another")
    assert list(Engine(first, second).post_rewards("r", rewards).statuses) == ["accepted"] * 70
    assert "another" not in first.judge.memories.all()
    assert first.heads.infos() == []


def test_rewards_that_come_after_another_state_teach_as_far_as_there_is_room():
    rank = Rank()
    rewards = rank.run_rollout("r", num=40, adapter="a")
    Engine(rank).set_learning_state(Engine(Rank()).learning_state())
    assert Engine(rank).post_rewards("r", rewards).num_training == 40
    assert list(rank.judge.memories.all()) == [BASE_MODEL, "a"]
    rewards = rank.run_rollout("s", num=40, adapter="a")
    full = Rank()
    for number in range(MAX_ADAPTERS):
        rewarded(Engine(full), full, f"{number}", num=2)
    Engine(rank).set_learning_state(Engine(full).learning_state())
    for number in range(MAX_ADAPTERS):
        rank.run_rollout(f"awaited{number}", num=1, adapter=f"{number}")
    receipt = Engine(rank).post_rewards("s", rewards)
    assert (list(receipt.statuses), receipt.num_training) == (["accepted"] * 40, 0)
    assert "a" not in rank.judge.memories.all()


@pytest.mark.parametrize(
    "line", ['["head",{size},"b"]', '["head",{size},5]', '["head",{size},["a"]]', '["head",{size},"a",1]', '["head"]']
)
def test_a_head_of_an_adapter_without_rows_is_refused(line):
    rank = learned()
    state = Engine(rank).learning_state()
    start = state.index(b'["head"')
    end = state.index(b"\n", start)
    size = len(rank.heads.state()[0][1])
    changed = state[:start] + line.replace("{size}", str(size)).encode() + state[end:]
    assert refused(rank, "set_learning_state", changed).status == 400


# -- whatever a client makes up

NUMBERS = ["NaN", "-1", str(2**53), str(2**53 + 1), str(10**24), "1e300", "", "x", "0", "1", "9" * 5000, "\u0663"]
VALUES = [0.0, -1.0, 1.0, 1e-30, 1e5, 1e9, 1e13, 1e18, 1e30, 3e38, float("nan"), float("inf"), -1e30]


@st.composite
def changed_head(draw: st.DrawFn, data: bytes) -> bytes:
    """A head file with another number, tensor, shape, dtype or metadata, or other bytes."""
    kind = draw(st.sampled_from(["bytes", "cut", "metadata", "values", "value", "tensor", "drop", "claim"]))
    if kind == "bytes":
        at = draw(st.integers(0, len(data) - 1))
        return data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
    if kind == "cut":
        return data[: draw(st.integers(0, len(data)))] + b"\0" * draw(st.integers(0, 3))
    if kind == "claim":  # a tiny file that claims a large shape
        shape = draw(st.sampled_from([[10**9, 10**9], [0, 10**18], [2**62], [-1], [128, 8]]))
        dtype = draw(st.sampled_from(["F32", "F64", "BOOL", "F8_E4M3", "C64", "no"]))
        end = draw(st.sampled_from([0, 4, 2**40]))
        header = json.dumps({"w1": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}).encode()
        return struct.pack("<Q", draw(st.sampled_from([len(header), 2**63, 10**8]))) + header + b"\0" * 4
    tensors, metadata = opened(data)
    name = draw(st.sampled_from(sorted(tensors)))
    tensor = tensors[name]
    if kind == "metadata":
        metadata[draw(st.sampled_from(sorted(metadata)))] = draw(st.sampled_from(NUMBERS))
    elif kind == "values":
        tensors[name] = torch.full_like(tensor, _fitting(tensor, draw(st.sampled_from(VALUES))))
    elif kind == "value" and tensor.numel():
        tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = _fitting(tensor, draw(st.sampled_from(VALUES)))
    elif kind == "tensor":
        dtype = draw(st.sampled_from([torch.float64, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]))
        tensors[name] = torch.zeros(draw(st.sampled_from([(), (0,), (8,), (128, 8), (8, 128)]))).to(dtype)
    elif kind == "drop":
        del tensors[name]
    return save(tensors, metadata)


def _fitting(tensor: torch.Tensor, value: float) -> float:
    if tensor.dtype.is_floating_point:
        return value
    return max(-(2**62), min(2**62, int(value))) if abs(value) < 1e30 else 2**62


def put(name: str, data: bytes) -> None:
    """It is refused with a 4xx, and nothing has changed, or taken, and then the engine goes on."""
    rank = Rank()
    Engine(rank).post_rewards("r", rank.run_rollout("r", num=4))
    before = content(rank)
    try:
        getattr(Engine(rank), name)(data)
    except RequestError as error:
        status, said = error.status, str(error)
    else:
        goes_on(rank)
        return
    assert status in (409, 400)
    assert len(said) < 1000
    assert content(rank) == before


def put_head(data: bytes) -> tuple[str, bytes]:
    return "set_quality_head", data


def state_with(head: bytes) -> tuple[str, bytes]:
    start = STATE.index(b'["head"')
    return "set_learning_state", STATE[:start] + f'["head",{len(head)}]\n'.encode() + head + b'["end",1]\n'


many = settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.thorough
@settings(many, max_examples=120)
@given(st.one_of(changed_head(HEAD).map(put_head), changed_head(HEAD_STATE).map(state_with)))
def test_a_changed_head_is_refused_or_taken_and_the_engine_goes_on(changed):
    put(*changed)


@st.composite
def changed_state(draw: st.DrawFn) -> bytes:
    if draw(st.booleans()):
        at = draw(st.integers(0, len(STATE) - 1))
        return STATE[:at] + draw(st.sampled_from([b"", b"\n", b"9", b"\xff", b"e999", b"[[["])) + STATE[at + 1 :]
    lines = STATE[: STATE.index(b'["head"')].splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    line = json.loads(lines[at])
    place: Any = line
    while isinstance(place, list | dict) and place:
        key = draw(st.sampled_from(range(len(place)) if isinstance(place, list) else sorted(place)))
        if not isinstance(place[key], list | dict) or not place[key] or not draw(st.integers(0, 5)):
            place[key] = draw(st.sampled_from([None, "NaN", -1, 10**24, 2**53, 1e200, 0, [], {}, [1e200] * 3, True]))
            break
        place = place[key]
    lines[at] = json.dumps(line).encode()
    return b"\n".join([*lines, STATE[STATE.index(b'["head"') :]])


@pytest.mark.thorough
@many
@given(changed_state())
def test_a_changed_state_is_refused_or_taken_and_the_engine_goes_on(data):
    put("set_learning_state", data)


def test_every_rank_knows_the_success_of_every_prompt_and_one_is_asked(monkeypatch):
    """Piece by piece, in the order in which they were seen."""
    monkeypatch.setattr(readings, "MAX_PIECE_BYTES", 10)
    first, second = Rank(), Rank()
    engine = Engine(first, second)
    rewards = {rank: rank.run_rollout(name, 6, seed, prompt_key=f"id:{name}") for seed, (name, rank) in
               enumerate((("a", first), ("b", second)))}  # fmt: skip
    for name, rank in (("a", first), ("b", second)):
        engine.post_rewards(name, rewards[rank])
        for each in (first, second):
            lengths_of(each.judge).observe(f"id:{name}", [ObservedLength(5, False), ObservedLength(9, False)])
    assert list(first.judge.memory.to_rows())[-1] == list(second.judge.memory.to_rows())[-1]
    for prompt, name, ago in zip(engine.known_prompts(), "ba", (0, 1), strict=True):
        assert (prompt.key, prompt.prompts_ago, prompt.lengths.mean) == (f"id:{name}", ago, 7)
        assert prompt.success == first.judge.memory.successes.of(f"id:{name}")
        assert prompt.success.num_rewarded == pytest.approx(6, rel=0.1)

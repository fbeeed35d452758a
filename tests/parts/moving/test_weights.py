"""Weights that change under running requests: whose KV is read by whom, and which version sampled which token.

A made-up model knows for each place of the KV cache the oldest weights that it rests on. Random schedules of updates,
preemptions, aborts and requests with common prompts show a stale block at once.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tests.kernel.core.scheduler_runs import TracedRun, add_group, assert_nothing_left
from tests.parts.moving.moving_runs import Ranks
from vllm_rollout.adapter.compat import WEIGHT_SPANS, has
from vllm_rollout.adapter.weights import Changes, listen, listen_to_calls
from vllm_rollout.kernel.call_table import NAME_ADAPTER, RECOMPUTE, WEIGHT_VERSION
from vllm_rollout.kernel.core import weights as core_weights
from vllm_rollout.kernel.core.calls import rollout_call
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE, RunnerReport, nothing_seen
from vllm_rollout.parts.moving.core.moving import GroupMoves, salt_to_move

BLOCK_SIZE = 16
SQL = LoRARequest("sql", 1, "/sql")
ACTS = ["group", "other", "update", *["adapter"] * 2, "name", "abort", *["move"] * 2, "pause", "recompute", "steps"]
NUM_SCHEDULES = int(os.environ.get("NUM_SCHEDULES", 40))
SEEDS = [pytest.param(seed, marks=pytest.mark.thorough if seed >= 20 else ()) for seed in range(NUM_SCHEDULES)]
"""In each loop. 5,000 take a quarter of an hour."""


class KnownKV:
    """The KV cache of a run, and the versions of its tokens."""

    def __init__(self, run: TracedRun, other: KnownKV | None = None) -> None:
        """`other`: that of another rank, between which requests move."""
        self.run = run
        self._oldest: dict[tuple[int, int], int] = {}
        """For each place, by block and position in it: the oldest weights that its KV rests on."""
        self._mixed: dict[tuple[int, int], str] = {}
        """Places that rest on several, and whose they are."""
        self.born: dict[str, int] = {} if other is None else other.born
        """The weights with which each request began."""
        self.sampled: dict[str, list[int]] = {} if other is None else other.sampled
        self.ended: dict[str, list[tuple[int, str]]] = {} if other is None else other.ended
        """Expected content of notes, by the names that were known when they were written."""
        self._weights: dict[int, int] = {}
        self.recomputed = 0
        """The weights by which all groups were computed again last."""
        self.of_sql: set[int] = set() if other is None else other.of_sql
        """Weights that only the adapter SQL has got. Others concern every request."""
        self._schedule, run.scheduler.schedule = run.scheduler.schedule, self.schedule
        self._sample, run.sample = run.sample, self.sample
        self._update, run.scheduler.update_from_output = run.scheduler.update_from_output, self.update_from_output

    def current(self, request_id: str, weights: int | None = None) -> int:
        """The newest weights up to these that concern a request."""
        weights = Changes.num if weights is None else weights
        skipped = self.of_sql if self.run.requests[request_id].lora_request is None else set()
        return next(each for each in range(weights, -1, -1) if each not in skipped)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        scheduled = self._schedule(*args, **kwargs)
        self._weights[id(scheduled)] = Changes.num
        cached = scheduled.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        for request_id, num in scheduled.num_scheduled_tokens.items():
            self._compute(request_id, starts[request_id], starts[request_id] + num)
        return scheduled

    def _compute(self, request_id: str, start: int, end: int) -> None:
        now = self.current(request_id)
        born = self.born.setdefault(request_id, now)
        (blocks,) = self.run.scheduler.kv_cache_manager.get_block_ids(request_id)
        places = [(blocks[position // BLOCK_SIZE], position % BLOCK_SIZE) for position in range(end)]
        rests_on = min((self._oldest[place] for place in places[:start]), default=now)
        others = {self._mixed[place] for place in places[:start] if place in self._mixed} - {request_id}
        if self.run.requests[request_id].cache_salt != "client":
            assert rests_on >= born, f"{request_id}, which began with {born}, reads KV of {rests_on}"
            assert not others, f"{request_id} reads KV of several weights, which is {others}'s"
        for place in places[start:]:
            self._oldest[place] = min(rests_on, now)
            self._mixed.pop(place, None)
            if rests_on < now:
                self._mixed[place] = request_id

    def copy_of(self, blocks: list[int]) -> list[dict[int, tuple[int, str | None]]]:
        """Weights versions and owners of these blocks, by position in each block."""
        return [
            {
                place[1]: (oldest, self._mixed.get(place))
                for place, oldest in self._oldest.items()
                if place[0] == block
            }
            for block in blocks
        ]  # fmt: skip

    def paste(self, copies: list[dict[int, tuple[int, str | None]]], blocks: list[int]) -> None:
        for copy, block in zip(copies, blocks, strict=True):
            for position, (oldest, owner) in copy.items():
                self._oldest[block, position] = oldest
                self._mixed.pop((block, position), None)
                if owner is not None:
                    self._mixed[block, position] = owner

    def sample(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        weights = self._weights[id(scheduled)]
        output = self._sample(scheduled)
        report: RunnerReport = output.__dict__.get(REPORT_ATTRIBUTE) or nothing_seen(len(output.req_ids))
        setattr(output, REPORT_ATTRIBUTE, report._replace(weights=weights))
        return output

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> Any:
        requests = [self.run.requests[request_id] for request_id in scheduled.num_scheduled_tokens]
        before = [request.num_output_tokens for request in requests]
        outputs = self._update(scheduled, output)
        weights = self._weights.pop(id(scheduled))
        for request, num in zip(requests, before, strict=True):
            self.sampled.setdefault(request.request_id, []).extend([weights] * (request.num_output_tokens - num))
        return outputs

    def recompute(self) -> None:
        """All groups: from now on none of their candidates may read KV of older weights."""
        self.run.scheduler.recompute(None)
        self.recomputed = Changes.num
        self.born_anew()

    def born_anew(self) -> None:
        begun = (RequestStatus.RUNNING, RequestStatus.PREEMPTED)
        requests = [candidate.request for candidate in self.run.scheduler.launched.values()]
        ids = [request.request_id for request in requests if request.status in begun]
        self.born |= {id: self.current(id) for id in ids}

    def step(self) -> bool:
        goes_on = self.run.step()
        for request_id, outputs in self.run.outputs.items():
            if request_id not in self.ended and outputs[-1].finished:
                self.ended[request_id] = self.spans(request_id)
        return goes_on

    def spans(self, request_id: str) -> list[tuple[int, str]]:
        """Expected spans of the note."""
        spans: list[tuple[int, str]] = []
        for position, weights in enumerate(self.sampled.get(request_id, ())[: self.run.num_tokens(request_id)]):
            version = self.run.scheduler.weights.version(self.current(request_id, weights))
            if not spans or spans[-1][1] != version:
                spans.append((position, version))
        return spans


class TwoRanks:
    """Groups move between them, with their KV."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        first = KnownKV(ranks.runs[0])
        self.known = [first, KnownKV(ranks.runs[1], first)]
        self._copies: list[dict[int, tuple[int, str | None]]] = []
        for known, core in zip(self.known, ranks.cores, strict=True):
            core.kv.call = partial(self._call, known, core.kv.call)

    def _call(self, known: KnownKV, call: Callable[..., Any], method: str, args: tuple[Any, ...]) -> Any:
        if method == "rollout_share_kv":
            self._copies = known.copy_of(args[0])
        elif method == "rollout_fetch_kv":
            _, slots, blocks = args
            known.paste([self._copies[slot] for slot in slots], blocks)
        return call(method, args)

    def move(self, group_id: str, source: int) -> None:
        released = self.ranks.cores[source].release(group_id)
        for _ in range(50):
            if released.outcome not in ("in_flight", "busy"):
                break
            self.known[source].step()
            released = self.ranks.cores[source].release(group_id)
        if released.outcome == "released":
            self.ranks.cores[1 - source].adopt(group_id, released.parcel)
            if 0 < self.known[1 - source].recomputed == Changes.num:
                self.known[1 - source].born_anew()
            self.ranks.cores[source].confirm(group_id)


@pytest.fixture(autouse=True)
def changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Changes, "num", 0)


@pytest.fixture
def known(new_run) -> KnownKV:
    return KnownKV(new_run(block_size=BLOCK_SIZE))


def steps(run: TracedRun | KnownKV, num: int) -> None:
    for _ in range(num):
        run.step()


def test_requests_that_begin_after_a_change_read_no_older_kv_and_those_that_run_go_on(known):
    run = known.run
    ids = add_group(run, "g", [60, 90], group_size=2)
    steps(run, 20)
    Changes.num += 1
    ids += add_group(run, "h", [30, 40], group_size=2)
    run.run()
    assert run.requests["g-0"].cache_salt is None
    assert known.born["h-0"] == 1
    assert [run.note(id).weights for id in ids] == [known.spans(id) for id in ids]
    assert [version for _, version in run.note("g-0").weights] == ["default", "1"]
    assert [version for _, version in run.note("h-0").weights] == ["1"]
    assert_nothing_left(run)


def test_a_request_that_waits_gets_the_new_salt(new_run):
    known = KnownKV(new_run(block_size=BLOCK_SIZE, max_num_seqs=1))
    add_group(known.run, "g", [20, 20, 20], group_size=3)
    steps(known.run, 5)
    Changes.num += 1
    known.run.run()
    assert [known.born[f"g-{index}"] for index in range(3)] == [0, 1, 1]
    assert known.run.requests["g-1"].cache_salt == known.run.requests["g-2"].cache_salt is not None


def test_a_clients_own_salt_is_its_choice(known):
    request = known.run.add("o", 40)
    request.cache_salt = "client"
    steps(known.run, 5)
    hashes = list(request.block_hashes)
    Changes.num += 1
    known.run.run()
    assert request.cache_salt == "client"
    assert request.block_hashes[: len(hashes)] == hashes
    assert salt_to_move(request) == "client"


def test_a_group_that_moves_between_new_weights_and_the_next_step_takes_its_kv_along(new_ranks):
    two, _ = straddling(new_ranks, look=False)
    two.move("g", 0)
    assert two.ranks.runs[1].scheduler.part(GroupMoves).kv.num_groups_in == 1


def test_a_request_that_straddles_moves_with_a_salt_of_its_own(known):
    add_group(known.run, "g", [60, 60], group_size=2)
    steps(known.run, 10)
    assert salt_to_move(known.run.requests["g-0"]) is None
    Changes.num += 1
    steps(known.run, 1)
    assert salt_to_move(known.run.requests["g-0"]) != salt_to_move(known.run.requests["g-1"])


def test_what_is_computed_again_reads_no_older_kv_and_finds_its_siblings(known):
    run = known.run
    ids = add_group(run, "chat-1-0123abcd", [60, 90], group_size=2)
    others = add_group(run, "chat-2-0123abcd", [60, 90], group_size=2)
    run.add("plain", 80)
    own = run.add("own", 80)
    own.cache_salt = "client"
    steps(run, 20)
    assert run.scheduler.recompute(None) == 0, "no weights have come"
    Changes.num += 1
    steps(run, 2)
    assert run.scheduler.recompute(frozenset({"chat-1"})) == 2
    assert [run.requests[id].num_computed_tokens for id in ids] == [0, 0]
    assert [run.requests[id].num_preemptions for id in [*others, "plain", "own"]] == [0] * 4, "others are undisturbed"
    assert run.scheduler.recompute(frozenset({"chat-1"})) == 0, "its KV is the new weights' own"
    assert run.scheduler.num_preemptions == 0
    known.born |= dict.fromkeys(ids, 1)
    assert run.requests[ids[0]].cache_salt == run.requests[ids[1]].cache_salt == "vllm_rollout/1"
    run.run()
    assert [run.note(id).num_preemptions for id in ids] == [0, 0]
    assert [run.note(id).weights for id in ids] == [known.spans(id) for id in ids]
    assert_nothing_left(run)


@pytest.mark.parametrize("acts", ["recompute", "returns"])
def test_no_request_runs_in_the_step_that_tells_the_worker_of_its_preemption(two, acts):
    """With --enable-return-routed-experts vLLM's worker dies of such a step."""
    aux_outputs = pytest.importorskip("vllm.distributed.aux_output_connector.connector")
    scheduler = two.runs[0].scheduler
    made = aux_outputs.AuxOutputSchedulerConnector
    managers = [scheduler.kv_cache_manager] if signature(made).parameters else []  # from vLLM 0.33 on
    connector = scheduler.aux_output_connector = made(*managers)
    connector.take_output = lambda request, output: None
    told, build = [], connector.build_connector_meta
    connector.build_connector_meta = lambda *args: told.append(build(*args)) or told[-1]
    steps(two.runs[0], 2)
    num_told = len(told)
    if acts == "recompute":
        Changes.num += 1
        assert scheduler.recompute(None) == 2
    else:
        assert two.release("g", 0).outcome == "released"
        num_told = len(told)
        two.cores[0].keep("g")
    two.run()
    assert [two.runs[0].state(id) for id in ("g-0", "g-1")] == ["finished"] * 2
    assert {id for each in told[num_told:] for id in each.finished_requests} == {"g-0", "g-1"}
    assert not any(each.requests.keys() & set(each.finished_requests) for each in told)


def test_a_group_that_moved_in_a_pause_is_computed_again_too(new_ranks):
    two, ids = straddling(new_ranks)
    two.move("g", 0)
    assert two.ranks.runs[1].scheduler.recompute(None) == 2
    assert two.ranks.runs[1].scheduler.recompute(None) == 0, "it finds nothing older"
    two.known[1].born |= dict.fromkeys(ids, Changes.num)
    steps(two.known[1], 3)


def test_a_group_that_moved_is_computed_again_too_after_kv_that_is_not_finite(new_ranks):
    two, ids = straddling(new_ranks)
    two.move("g", 0)
    two.ranks.runs[1].scheduler.weights.clean = lambda: 1
    two.known[1].born |= dict.fromkeys(ids, Changes.num)
    steps(two.known[1], 3)


def test_a_group_that_arrives_after_all_were_computed_again_leaves_its_older_kv_behind(new_ranks):
    """Another API process moves it meanwhile. With its client's salt, nothing tells old KV from new."""
    two, ids = straddling(new_ranks)
    for id in ids[:1]:
        two.ranks.runs[0].requests[id].cache_salt = "client"
    two.known[1].recompute()
    two.move("g", 0)
    assert two.ranks.runs[1].scheduler.part(GroupMoves).kv.num_groups_in == 0
    two.known[1].born |= dict.fromkeys(ids, Changes.num)
    steps(two.known[1], 3)


def straddling(new_ranks: Callable[..., Ranks], *, look: bool = True) -> tuple[TwoRanks, list[str]]:
    """A group of the first rank, which pauses, and has new weights since then."""
    two = TwoRanks(new_ranks(block_size=BLOCK_SIZE, num_blocks=200))
    run = two.ranks.runs[0]
    ids = add_group(run, "g", [200, 200], group_size=2)
    while run.requests["g-1"].num_output_tokens < 40:
        two.known[0].step()
    depth, run._depth = run._depth, 0
    while run._in_flight:
        two.known[0].step()
    run._depth = depth
    Changes.num += 1
    for run in two.ranks.runs if look else ():
        run.scheduler.weights.look()
    return two, ids


def test_without_a_name_nothing_is_computed_again(known):
    add_group(known.run, "g", [60], group_size=1)
    steps(known.run, 20)
    Changes.num += 1
    core = SimpleNamespace(scheduler=known.run.scheduler)
    answer = rollout_call(core, RECOMPUTE.name, RECOMPUTE.encode_argument([]))
    assert RECOMPUTE.decode_result(answer) == 0


def test_a_candidate_with_its_clients_salt_is_computed_again_too(known):
    (id,) = add_group(known.run, "g", [60], group_size=1)
    known.run.requests[id].cache_salt = "client"
    steps(known.run, 20)
    Changes.num += 1
    assert known.run.scheduler.recompute(None) == 1
    scheduled = known.run.scheduler.schedule()
    assert scheduled.num_scheduled_tokens[id] == known.run.requests[id].num_tokens, "nothing of it is found"
    assert known.run.requests[id].cache_salt == "client"


def test_before_the_first_change_nothing_is_salted(known):
    add_group(known.run, "g", [30, 30], group_size=2)
    known.run.run()
    assert {request.cache_salt for request in known.run.requests.values()} == {None}
    assert known.run.note("g-0").weights == [(0, "default")]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_schedules_show_no_stale_block_and_no_wrong_version(new_ranks, seed):
    chance = random.Random(seed)
    two = TwoRanks(
        new_ranks(
            block_size=BLOCK_SIZE,
            num_blocks=chance.choice([20, 40, 200]),
            max_num_seqs=chance.choice([2, 5, 16]),
        )
    )
    runs = two.ranks.runs
    prompts = [[chance.randrange(10, 99) for _ in range(chance.choice([20, 40, 70]))] for _ in range(3)]
    for run in runs:
        run.scripts = Talk()
    live: dict[str, list[str]] = {}
    for number in range(40):
        run = chance.choice(runs)
        act = chance.choice(ACTS)
        if act == "group":
            live[f"g{number}"] = add_prompts(run, f"g{number}", chance.choice(prompts), chance)
        elif act == "other":
            prompt, lora = chance.choice(prompts), chance.choice([None, SQL])
            run.add(f"o{number}", chance.randrange(1, 60), prompt_token_ids=prompt, lora_request=lora)
            if chance.random() < 0.2:
                run.requests[f"o{number}"].cache_salt = "client"
        elif act == "update":
            Changes.num += chance.choice([1, 1, 30])
        elif act == "adapter":
            load_sql(two)
        elif act == "name":
            if any(run.scheduler.weights.is_named_otherwise(f"v{number}") for run in runs):
                Changes.num += 1
            for each in runs:
                each.scheduler.weights.look()
                each.scheduler.weights.name(f"v{number}")
        elif act == "abort" and live:
            for each in runs:
                each.abort(chance.choice(chance.choice(list(live.values()))))
        elif act == "move" and live:
            two.move(chance.choice(list(live)), chance.randrange(2))
        elif act == "recompute":
            chance.choice(two.known).recompute()
        elif act == "pause":
            for state in (PauseState.PAUSED_ALL, PauseState.UNPAUSED):
                run.scheduler.set_pause_state(state)
        for _ in range(chance.randrange(0, 12)):
            chance.choice(two.known).step()
    while sum(known.step() for known in two.known):
        pass
    for request_id, spans in two.known[0].ended.items():
        if request_id.startswith("g"):
            assert runs[0].note(request_id).weights[: len(spans)] == spans, request_id
    for run in runs:
        assert_nothing_left(run)


class Talk(dict[str, list[int]]):
    """All requests say the same, so that what one has generated is in the cache for another."""

    def __init__(self) -> None:
        super().__init__()
        self._said = [200 + place % 50 for place in range(400)]

    def get(self, request_id: str, default: Any = None) -> list[int]:
        return self._said


def add_prompts(run: TracedRun, group_id: str, prompt: list[int], chance: random.Random) -> list[str]:
    """A group of one to four candidates; sometimes it goes on from what was said before, as turns do."""
    size = chance.randrange(1, 5)
    if chance.random() < 0.5:
        prompt = [*prompt, *[200 + place % 50 for place in range(chance.randrange(1, 60))]]
    return add_group(
        run,
        group_id,
        [chance.randrange(1, 80) for _ in range(size)],
        chance.randrange(1, size + 1),
        prompt_token_ids=prompt,
        lora_request=chance.choice([None, SQL]),
    )


def load_sql(two: TwoRanks) -> None:
    """Each rank hears of the adapter's new weights at once."""
    weights = [known.run.scheduler.weights for known in two.known]
    for each in weights:
        each.have_come()
    Changes.num += 1
    two.known[0].of_sql.add(Changes.num)
    for each in weights:
        each.have_come("sql")


class Model:
    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def load_weights(self, weights: Any) -> str:
        self.loaded.append(weights)
        if weights == "broken":
            raise ValueError(weights)
        return "loaded"


def test_each_load_of_a_model_is_counted_also_one_that_fails():
    model = Model()
    listen(model)
    assert model.load_weights("a") == "loaded"
    with pytest.raises(ValueError, match="broken"):
        model.load_weights("broken")
    assert model.loaded == ["a", "broken"]
    assert Changes.num == 2


class Executor:
    """Workers that are processes of their own: they count for themselves, if they are ours."""

    def __init__(self, *, is_ours: bool = True) -> None:
        self.num_changes, self.calls, self.is_ours, self.is_clean = 0, [], is_ours, True
        self.lacks_weights = 0

    def collective_rpc(self, method: str, *args: Any) -> list[int]:
        self.calls.append(method)
        if method == "no such method" or (method.startswith("rollout_") and not self.is_ours):
            raise AttributeError(method)
        self.num_changes += method in ("reload_weights", "rollout_count_change")
        told = {"rollout_clean_kv": int(not self.is_clean), "rollout_lacks_weights": self.lacks_weights}
        return [told.get(method, self.num_changes)]

    def add_lora(self, lora: Any) -> bool:
        return True


@pytest.fixture
def core(known) -> Any:
    listen_to_calls()
    listen_to_calls()  # once per engine of a process
    from vllm.v1.engine.core import EngineCore

    core = EngineCore.__new__(EngineCore)
    core.scheduler, core.model_executor = known.run.scheduler, Executor()
    return core


def test_engine_cores_of_others_in_the_process_are_left_alone(core):
    """A trainer's process may have a second engine, with vLLM's own scheduler. A core that begins has none yet."""
    del core.scheduler
    assert core.collective_rpc("reload_weights") == [1]
    core.scheduler = SimpleNamespace()
    assert core.collective_rpc("reload_weights") == [2]
    assert Changes.num == 0


def test_no_step_runs_while_the_model_lacks_weights_whoever_resumes(core):
    core.model_executor.lacks_weights = 1
    core.collective_rpc("start_weight_update")
    scheduler = core.scheduler
    assert scheduler.pause_state == PauseState.PAUSED_ALL
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.pause_state == PauseState.PAUSED_ALL
    core.model_executor.lacks_weights = 0
    core.collective_rpc("finish_weight_update")
    assert scheduler.pause_state == PauseState.UNPAUSED


def test_an_engine_core_hears_of_new_weights_by_the_call_that_brought_them(core):
    core.collective_rpc("rollout_train")
    core.collective_rpc("something else")
    assert Changes.num == 0
    core.collective_rpc("reload_weights")
    assert Changes.num == 1
    assert core.model_executor.calls.count("reload_weights") == 1
    with pytest.raises(AttributeError):
        core.collective_rpc("no such method")
    core.add_lora(SimpleNamespace(load_inplace=False))
    assert Changes.num == 1
    core.add_lora(LoRARequest("sql", 1, "/sql", load_inplace=True))
    assert Changes.num == 2


def asked(core: Any, adapter: str) -> str:
    return WEIGHT_VERSION.decode_result(
        rollout_call(core, WEIGHT_VERSION.name, WEIGHT_VERSION.encode_argument(adapter))
    )


def loads(core: Any, adapter: str) -> None:
    core.add_lora(LoRARequest(adapter, 1, f"/{adapter}", load_inplace=True))


def named(core: Any, adapter: str, version: str) -> None:
    rollout_call(core, NAME_ADAPTER.name, NAME_ADAPTER.encode_argument((adapter, version)))


def names(core: Any) -> list[str]:
    return [asked(core, adapter) for adapter in ("", "sql", "math", "unknown")]


def test_weights_of_an_adapter_concern_its_requests_only(core, known):
    run = known.run
    (base,) = add_group(run, "g", [60], group_size=1)
    (sql,) = add_group(run, "h", [60], group_size=1, lora_request=SQL)
    steps(run, 20)
    loads(core, "sql")
    named(core, "sql", "sql-1")
    steps(run, 5)
    assert names(core) == ["default", "sql-1", "default", "default"]
    loads(core, "math")
    named(core, "math", "math-1")
    steps(run, 5)
    assert names(core) == ["default", "sql-1", "math-1", "default"]
    core.collective_rpc("reload_weights")
    steps(run, 5)
    assert names(core) == ["default", "sql-1", "math-1", "default"], "not named yet"
    core.set_weight_version("base-1")
    assert names(core) == ["base-1"] * 4
    loads(core, "sql")
    steps(run, 5)
    salts = [run.requests[id].cache_salt for id in (base, sql)]
    assert run.scheduler.recompute(None) == 2
    run.run()
    assert [version for _, version in run.note(base).weights] == ["default", "base-1"]
    assert [version for _, version in run.note(sql).weights] == ["default", "sql-1", "base-1", "4"]
    assert salts == [None, None]
    assert [run.requests[id].cache_salt for id in (base, sql)] == ["vllm_rollout/3", "vllm_rollout/4"]


def test_two_trainers_that_load_and_name_their_adapters_at_once_do_not_swap_names(core):
    for adapter in ("sql", "math"):
        loads(core, adapter)
    for adapter in ("sql", "math"):
        named(core, adapter, f"{adapter}-1")
    assert names(core) == ["default", "sql-1", "math-1", "default"]
    assert Changes.num == 2
    named(core, "sql", "sql-2")  # it was loaded by a way that is not counted
    named(core, "math", "math-1")
    assert names(core) == ["default", "sql-2", "math-1", "default"]
    assert Changes.num == 3


def test_vllms_own_call_names_the_weights_of_all_models(core, known):
    (id,) = add_group(known.run, "g", [60], group_size=1)
    steps(known.run, 5)
    for adapter in ("sql", "math"):
        loads(core, adapter)
    core.set_weight_version("step-1")  # the base model's weights may be new, too
    assert names(core) == ["step-1"] * 4
    steps(known.run, 5)
    core.collective_rpc("reload_weights")
    loads(core, "sql")
    core.set_weight_version("step-2")
    assert (names(core), Changes.num) == (["step-2"] * 4, 5)
    known.run.run()
    assert [version for _, version in known.run.note(id).weights] == ["default", "step-1", "step-2"]


def test_kv_of_all_models_is_void_if_an_adapter_has_left_kv_that_is_not_finite(core, known):
    run = known.run
    (id,) = add_group(run, "g", [60], group_size=1)
    steps(run, 20)
    core.model_executor.is_clean = False
    loads(core, "sql")
    run.add("late", 20)
    run.scheduler.schedule()
    assert run.requests[id].num_preemptions == 1
    assert [run.requests[each].cache_salt for each in (id, "late")] == ["vllm_rollout/1"] * 2


def test_prompts_that_wait_are_hashed_once_for_all_calls_that_bring_weights(core, known, monkeypatch):
    """A trainer sends weights in many calls, between two steps."""
    run, salted = known.run, []
    monkeypatch.setattr(core_weights, "salt", lambda request, value: salted.append((request.request_id, value)))
    add_group(run, "g", [60, 60], group_size=2)
    for _ in range(5):
        core.collective_rpc("reload_weights")
    core.set_weight_version("five")
    assert salted == []
    assert (run.scheduler.weights.num_changes, run.scheduler.weights.newest) == (5, "five")
    run.scheduler.schedule()
    assert salted == [("g-0", "vllm_rollout/5"), ("g-1", "vllm_rollout/5")]


@pytest.mark.parametrize("is_clean", [True, False])
def test_kv_is_cleaned_once_before_the_first_step_after_new_weights_and_what_ran_on_it_is_computed_again(
    core, known, is_clean
):
    run, executor = known.run, core.model_executor
    (id,) = add_group(run, "g", [60], group_size=1)
    run.add("plain", 60)
    steps(run, 20)
    executor.is_clean = is_clean
    run.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    core.collective_rpc("reload_weights")
    run.scheduler.schedule()
    assert "rollout_clean_kv" not in executor.calls, "a server that sleeps has no KV"
    run.scheduler.set_pause_state(PauseState.UNPAUSED)
    run.scheduler.schedule()
    run.scheduler.schedule()
    assert executor.calls.count("rollout_clean_kv") == 1
    assert [run.requests[each].num_preemptions for each in (id, "plain")] == [int(not is_clean)] * 2


def test_of_workers_that_are_not_ours_names_are_noticed(core):
    core.model_executor = Executor(is_ours=False)
    for name in ("one", "two", "two"):
        core.set_weight_version(name)
    core.collective_rpc("something else")
    assert (Changes.num, core.scheduler.weights.version(2)) == (2, "two")
    assert sum(call.startswith("rollout_") for call in core.model_executor.calls) == 1


def test_a_name_is_that_of_the_weights_that_came_last_or_tells_of_some_that_came_unheard(core):
    weights = core.scheduler.weights
    core.collective_rpc("reload_weights")
    core.set_weight_version("one")
    core.set_weight_version("one")
    assert (Changes.num, weights.version(1)) == (1, "one")
    core.set_weight_version("two")
    assert (Changes.num, weights.version(2)) == (2, "two")
    core.collective_rpc("reload_weights")
    assert weights.version(3) == "3"


@pytest.mark.skipif(not has(WEIGHT_SPANS), reason="this vLLM names no weights in outputs")
def test_outputs_name_the_weights_that_computed_their_step(core):
    core._weight_version = "vLLM's"

    def named() -> str | None:
        outputs = {0: EngineCoreOutputs()}
        core._attach_weight_version(outputs)
        return outputs[0].weight_version

    assert named() == "vLLM's"
    core.collective_rpc("reload_weights")
    assert named() == "default", "the step in flight was computed before"
    core.scheduler.weights.sampled_by(1)
    assert named() == "1"
    core.scheduler.weights.name("one")
    assert named() == "one"
    core.scheduler.weights.workers_count = False
    assert named() == "vLLM's"

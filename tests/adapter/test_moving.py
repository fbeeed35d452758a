"""Groups that move between two schedulers: every token once, every candidate one end."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_runs import TracedRun, add_group, assert_nothing_left, prune_by_sign
from vllm.v1.request import Request, RequestStatus

from vllm_rollout.adapter.call_table import ADOPT_GROUP, RELEASE_GROUP, GroupToAdopt, GroupToRelease, Released
from vllm_rollout.adapter.parcel import WorkerState
from vllm_rollout.group.pruning_plan import PruningPlan
from vllm_rollout.group.race import RacePlace


class Core:
    """An engine core around a dry run, as far as moves need one."""

    def __init__(self, run: TracedRun) -> None:
        self.run = run
        self.scheduler = run.scheduler
        self.known: dict[str, WorkerState] = {}
        """What its worker was told."""

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "rollout_let_go":
            return [None, {id: WorkerState(generator=id.encode()) for id in args[0]}]
        assert method == "rollout_take_up"
        for moved in args[0]:
            assert moved.output_token_ids
            self.known[moved.request.request_id] = moved.state
        return [None, None]

    def preprocess_add_request(self, request: Any) -> tuple[Request, int]:
        made = Request.from_engine_core_request(request, self.run._hasher)
        self.run.requests[made.request_id] = made
        return made, 0

    def add_request(self, request: Request, request_wave: int) -> None:
        self.scheduler.add_request(request)

    def release(self, group_id: str, epoch: int = 1) -> Released:
        wanted = RELEASE_GROUP.decode_argument(RELEASE_GROUP.encode_argument(GroupToRelease(group_id, epoch)))
        answer = self.scheduler.moves.release(self, wanted)
        return RELEASE_GROUP.decode_result(RELEASE_GROUP.encode_result(answer))

    def adopt(self, group_id: str, parcel: bytes, epoch: int = 1) -> None:
        wanted = GroupToAdopt(group_id, epoch, parcel)
        self.scheduler.moves.adopt(self, ADOPT_GROUP.decode_argument(ADOPT_GROUP.encode_argument(wanted)))

    def keep(self, group_id: str, epoch: int = 1) -> None:
        self.scheduler.moves.keep(self, GroupToRelease(group_id, epoch))

    def confirm(self, group_id: str, epoch: int = 1) -> None:
        self.scheduler.moves.confirm(GroupToRelease(group_id, epoch))


class Ranks:
    """Two engine cores whose models say the same of the same request."""

    def __init__(self, new_run: Any, **kwargs: Any) -> None:
        self.runs = [new_run(**kwargs), new_run(**kwargs)]
        first, second = self.runs
        for name in ("requests", "scripts", "_lengths", "_detection_lengths", "logits", "num_sampled", "outputs"):
            setattr(second, name, getattr(first, name))
        self.cores = [Core(run) for run in self.runs]

    def step(self) -> bool:
        return sum(run.step() for run in self.runs) > 0

    def run(self) -> None:
        for _ in range(5000):
            if not self.step():
                return
        raise AssertionError("requests are left")

    def until(self, request_id: str, num_tokens: int) -> None:
        while self.runs[0].requests[request_id].num_output_tokens < num_tokens:
            assert self.step()

    def release(self, group_id: str, source: int, epoch: int = 1) -> Released:
        """Ask until nothing is in flight."""
        while (released := self.cores[source].release(group_id, epoch)).outcome in ("in_flight", "busy"):
            self.runs[source].step()
        return released

    def move(self, group_id: str, source: int = 0, epoch: int = 1) -> str:
        released = self.release(group_id, source, epoch)
        if released.outcome == "released":
            self.cores[1 - source].adopt(group_id, released.parcel, epoch)
            self.cores[source].confirm(group_id, epoch)
        return released.outcome


@pytest.fixture
def new_ranks(new_run):
    return lambda **kwargs: Ranks(new_run, **kwargs)


def assert_each_once(ranks: Ranks, lengths: dict[str, int]) -> None:
    """Every candidate has one last output, and its tokens are the first that it says, in order."""
    run = ranks.runs[0]
    for request_id, length in lengths.items():
        run.last(request_id)
        tokens = run.tokens(request_id)
        assert list(run.requests[request_id].output_token_ids) == tokens
        assert len(tokens) <= length
        said = run.own_tokens(request_id, len(tokens))
        assert tokens[: length - 1] == said[: length - 1]
    for each in ranks.runs:
        assert_nothing_left(each)
        assert each.scheduler.moves._released == each.scheduler.moves._adopted == each.scheduler.moves._stopped == {}


def ids_and_lengths(ids: list[str], lengths: list[int]) -> dict[str, int]:
    return dict(zip(ids, lengths, strict=True))


def test_a_group_goes_on_elsewhere_as_if_nothing_had_happened(new_ranks):
    ranks, lengths = new_ranks(), [50, 200, 90, 120]
    ids = add_group(ranks.runs[0], "g", lengths, group_size=3)
    ranks.until("g-0", 20)
    assert ranks.move("g") == "released"
    assert not ranks.runs[0].scheduler.requests
    ranks.run()
    run = ranks.runs[0]
    assert [run.state(id) for id in ids] == ["finished", "surplus", "finished", "finished"]
    assert [run.num_tokens(id) for id in ids] == [50, 120, 90, 120]
    assert_each_once(ranks, ids_and_lengths(ids, lengths))
    assert sorted(ranks.cores[1].known) == ids
    assert ranks.cores[1].known["g-0"].generator == b"g-0"


def test_held_tokens_log_probabilities_and_pauses_travel(new_ranks):
    ranks = new_ranks()
    (id,) = add_group(ranks.runs[0], "g", [100], group_size=1, logprobs=0)
    ranks.until(id, 30)
    assert ranks.runs[0].num_tokens(id) == 1  # the others are held
    candidate = ranks.runs[0].scheduler.candidates_of("g")[0]
    candidate.pauses.append(17)
    ranks.move("g")
    ranks.run()
    outputs = ranks.runs[0].outputs[id]
    positions = [p for output in outputs for p in output.new_logprobs.sampled_token_ranks.tolist()]
    assert positions == list(range(1, 101))
    assert ranks.runs[0].note(id).pauses == [17]


def test_waiting_preempted_and_running_candidates_move(new_ranks):
    ranks = new_ranks(num_blocks=30, max_num_seqs=3)
    lengths = [150, 180, 170, 160, 30]
    ids = add_group(ranks.runs[0], "g", lengths, group_size=5)
    statuses = set()
    while RequestStatus.PREEMPTED not in statuses:
        ranks.step()
        statuses = {ranks.runs[0].requests[id].status for id in ids}
    assert {RequestStatus.RUNNING, RequestStatus.WAITING} <= statuses
    ranks.move("g")
    ranks.run()
    assert [ranks.runs[0].state(id) for id in ids] == ["finished"] * 5
    assert_each_once(ranks, ids_and_lengths(ids, lengths))


def test_winners_are_ordered_by_the_groups_own_step(new_ranks):
    ranks = new_ranks()
    add_group(ranks.runs[1], "other", [300], group_size=1)
    for _ in range(100):
        ranks.runs[1].step()
    ids = add_group(ranks.runs[0], "g", [20, 60, 60, 70], group_size=2)
    ranks.until("g-1", 40)
    ranks.move("g")
    ranks.run()
    run = ranks.runs[0]
    assert [run.state(id) for id in ids] == ["finished", "finished", "surplus", "surplus"]  # a tie of two
    assert run.note("g-1").end_step == run.note("g-0").end_step + 1


def test_a_stop_string_across_the_move_is_found(new_ranks):
    ranks = new_ranks()
    run = ranks.runs[0]
    (id,) = add_group(run, "g", [40], group_size=1, stop=["ab"], detokenize=True)
    tokenizer = run.scheduler._stop_strings._model_config
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(tokenizer)
    a, b = (tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "ab")
    run.scripts[id] = [b] * 10 + [a] + [b] * 10
    ranks.until(id, 11)
    ranks.move("g")
    ranks.run()
    assert run.state(id) == "finished"
    assert run.num_tokens(id) == 12
    for each in ranks.runs:
        assert_nothing_left(each)


def test_scores_and_verdicts_continue(new_ranks):
    plan = PruningPlan(detection_length=32, keep_ratio=0.5, target_positive_ratio=0.5)
    ranks = new_ranks()
    for run in ranks.runs:
        prune_by_sign(run, 32)
    ids = add_group(
        ranks.runs[0], "g", [60] * 4, group_size=2, pruning=plan, logits=[1.0, -1.0, 1.0, -1.0], early_stop=False
    )
    ranks.until("g-0", 20)
    ranks.move("g")
    ranks.until("g-0", 40)
    ranks.move("g", source=1, epoch=2)
    ranks.run()
    run = ranks.runs[0]
    assert [run.state(id) for id in ids] == ["finished", "pruned", "finished", "pruned"]
    assert run.note("g-0").assessment.score == 1.0
    ledger = ranks.runs[0].scheduler.judge.ledger
    assert [ledger.reward("rollout", "g", index, 1.0)[0] for index in range(4)] == [
        "accepted", "unknown", "accepted", "unknown",
    ]  # fmt: skip
    ledger = ranks.runs[1].scheduler.judge.ledger
    assert [ledger.reward("rollout", "g", index, 1.0)[0] for index in range(4)] == [
        "unknown", "unfinished", "unknown", "unfinished",
    ]  # fmt: skip


def test_patience_goes_on(new_ranks):
    ranks = new_ranks()
    lengths = [20, 30, 200, 300]
    ids = add_group(ranks.runs[0], "g", lengths, group_size=2, early_stop=False, patience=2.0)
    ranks.until("g-2", 40)
    ranks.move("g")
    ranks.run()
    assert [ranks.runs[0].num_tokens(id) for id in ids] == [20, 30, 60, 60]
    assert_each_once(ranks, ids_and_lengths(ids, lengths))


def test_a_group_takes_its_place_in_a_race_along(new_ranks):
    ranks = new_ranks()
    for position, lengths in enumerate([[50, 60], [30, 30], [90, 90]]):
        run = ranks.runs[position % 2]
        add_group(run, f"g{position}", lengths, group_size=2, place=RacePlace("round", 2, position))
    ranks.until("g0-0", 20)
    ranks.move("g0")
    ranks.move("g1", source=1, epoch=2)
    ranks.move("g1", source=0, epoch=3)
    ranks.run()
    states = ranks.runs[0].states()
    assert states["g0-0"] == states["g1-0"] == "finished"
    assert states["g2-0"] == "finished"  # alone in its race on rank 0: who counts over ranks is the API process
    for run in ranks.runs:
        assert run.scheduler.group_steps.races.groups_of("round") == []


def test_a_group_that_waits_for_candidates_waits_elsewhere(new_ranks):
    ranks = new_ranks()
    add_group(ranks.runs[0], "g", [40], group_size=2, num_candidates=3)
    ranks.until("g-0", 10)
    assert ranks.move("g") == "released"
    ranks.run()
    assert ranks.runs[1].scheduler.group_steps.held == (0, 1, 0)
    assert ranks.move("g", source=1, epoch=2) == "released"  # nothing of it runs
    assert ranks.runs[0].scheduler.group_steps.held == (0, 1, 0)
    assert ranks.cores[1].release("g", 3).outcome == "over"


def test_a_group_with_a_grammar_stays_and_says_why(new_ranks):
    ranks = new_ranks()
    (id,) = add_group(ranks.runs[0], "g", [40], group_size=1)
    ranks.until(id, 10)
    ranks.runs[0].requests[id].structured_output_request = object()
    released = ranks.cores[0].release("g")
    assert (released.outcome, released.reason) == ("refused", "its grammar has a state of its own")
    ranks.runs[0].requests[id].structured_output_request = None
    ranks.run()
    assert ranks.runs[0].num_tokens(id) == 40


@pytest.mark.parametrize("released", [False, True])
def test_a_group_that_was_to_leave_goes_on_where_it_was(new_ranks, released):
    ranks, lengths = new_ranks(), [50, 70]
    ids = add_group(ranks.runs[0], "g", lengths, group_size=2)
    ranks.until("g-0", 20)
    ranks.cores[0].release("g")
    if released:
        ranks.release("g", 0)
        assert not ranks.runs[0].scheduler.requests
    ranks.cores[0].keep("g")
    ranks.cores[0].keep("g")
    ranks.run()
    assert_each_once(ranks, ids_and_lengths(ids, lengths))
    assert [ranks.runs[0].num_tokens(id) for id in ids] == lengths


def test_calls_that_are_repeated_change_nothing(new_ranks):
    ranks, lengths = new_ranks(), [50, 70]
    ids = add_group(ranks.runs[0], "g", lengths, group_size=2)
    ranks.until("g-0", 20)
    released = ranks.release("g", 0)
    assert ranks.cores[0].release("g") == released
    assert ranks.cores[0].release("g", epoch=2).outcome == "busy"
    for _ in range(2):
        ranks.cores[1].adopt("g", released.parcel)
    for _ in range(2):
        ranks.cores[0].confirm("g")
    ranks.cores[0].keep("g")  # too late
    ranks.run()
    assert_each_once(ranks, ids_and_lengths(ids, lengths))
    assert [ranks.runs[0].num_tokens(id) for id in ids] == lengths


def test_a_candidate_that_is_aborted_while_its_group_stops(new_ranks):
    ranks, lengths = new_ranks(), [50, 70]
    ids = add_group(ranks.runs[0], "g", lengths, group_size=2)
    ranks.until("g-0", 20)
    ranks.cores[0].release("g")
    ranks.runs[0].scheduler.finish_requests(["g-0"], RequestStatus.FINISHED_ABORTED)
    if ranks.runs[0]._depth == 1:  # it was released in one call, and an abort of what is not there is nothing
        return
    assert ranks.cores[0].release("g").outcome == "busy"
    ranks.move("g")
    ranks.run()
    assert [ranks.runs[0].state(id) for id in ids] == ["failed", "finished"]
    assert_each_once(ranks, ids_and_lengths(ids, lengths))


GROUP = st.integers(0, 2)
ACTIONS = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 6), st.integers(0, 6)),
        st.one_of(
            st.tuples(st.just("release"), GROUP, st.integers(0, 3)),
            st.tuples(st.sampled_from(["adopt", "confirm"]), GROUP, st.integers(1, 2)),
            st.tuples(st.just("keep"), GROUP, st.just(0)),
            st.tuples(st.just("abort"), GROUP, st.integers(0, 3)),
        ),
    ),
    min_size=5,
    max_size=60,
)
"""Steps of each rank, then what is done to a group."""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=ACTIONS,
    lengths=st.lists(st.lists(st.integers(5, 80), min_size=2, max_size=4), min_size=3, max_size=3),
    num_blocks=st.sampled_from([40, 2000]),
)
def test_any_interleaving_gives_every_candidate_one_end_and_every_token_once(new_ranks, actions, lengths, num_blocks):
    ranks = new_ranks(num_blocks=num_blocks)
    wanted: dict[str, int] = {}
    for position, of_group in enumerate(lengths):
        ids = add_group(ranks.runs[position % 2], f"g{position}", of_group, group_size=1)
        wanted |= ids_and_lengths(ids, of_group)
    where = {f"g{position}": position % 2 for position in range(3)}
    epoch = dict.fromkeys(where, 0)
    parcels: dict[str, bytes] = {}
    arrived: set[str] = set()
    for steps, (action, number, detail) in actions:
        for run, num_steps in zip(ranks.runs, steps, strict=True):
            for _ in range(num_steps):
                run.step()
        group_id = f"g{number}"
        if action == "release" and group_id not in parcels:
            epoch[group_id] += 1
            released = ranks.cores[where[group_id]].release(group_id, epoch[group_id])
            if released.outcome == "released":
                parcels[group_id] = released.parcel
                arrived.discard(group_id)
            elif not detail:
                ranks.cores[where[group_id]].keep(group_id, epoch[group_id])
        elif action == "keep" and group_id not in arrived:
            ranks.cores[where[group_id]].keep(group_id, epoch[group_id])
            parcels.pop(group_id, None)
        elif action == "adopt" and group_id in parcels:
            for _ in range(detail):
                ranks.cores[1 - where[group_id]].adopt(group_id, parcels[group_id], epoch[group_id])
            arrived.add(group_id)
        elif action == "confirm" and group_id in arrived and group_id in parcels:
            for _ in range(detail):
                ranks.cores[where[group_id]].confirm(group_id, epoch[group_id])
            del parcels[group_id]
            where[group_id] = 1 - where[group_id]
        elif action == "abort" and group_id not in parcels:
            id = f"{group_id}-{detail}"
            ranks.runs[where[group_id]].scheduler.finish_requests([id], RequestStatus.FINISHED_ABORTED)
    for group_id in where:
        if group_id in arrived and group_id in parcels:
            ranks.cores[where[group_id]].confirm(group_id, epoch[group_id])
        elif group_id not in arrived or group_id not in parcels:
            ranks.cores[where[group_id]].keep(group_id, epoch[group_id])
    ranks.run()
    assert_each_once(ranks, wanted)
    for position, of_group in enumerate(lengths):
        states = [ranks.runs[0].state(f"g{position}-{index}") for index in range(len(of_group))]
        assert states.count("finished") <= 1

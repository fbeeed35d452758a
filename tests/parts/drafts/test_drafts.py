"""Drafts by candidate, and learning from drafts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_rollout.adapter.faults import Faults
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.kernel.worker.ports import WorkerPart, WorkerParts
from vllm_rollout.parts.drafts.options import DraftsOptions
from vllm_rollout.parts.drafts.rules import MAX_DRAFT_TOKENS, NUM_BINS, Choice, DraftingRule
from vllm_rollout.parts.drafts.worker import drafts as drafts_module
from vllm_rollout.parts.drafts.worker import runner as runner_module
from vllm_rollout.parts.drafts.worker.drafts import Drafts
from vllm_rollout.parts.drafts.worker.drafts_file import DraftsFile
from vllm_rollout.parts.drafts.worker.runner import draft_in, drafts_of

PROMPT = (1, 2, 3)
ANSWER = tuple(range(10, 40))
MAX_MODEL_LEN = 60
VOCABULARY_SIZE = 1000


class Every(DraftingRule):
    """Takes every draft, and keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.fates: list[tuple[int, int]] = []
        self.steps: list[tuple[int, int, float]] = []

    def longest(self, num_rows: int) -> int:
        return MAX_DRAFT_TOKENS

    def choose(self, num_rows: int, num_drafts: list[int]) -> Choice:
        return Choice(0, sum(num_drafts))

    def verified(self, num_drafts: list[int], num_accepted: list[int]) -> None:
        self.fates.append((sum(num_drafts), sum(num_accepted)))

    def took(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        self.steps.append((num_rows, num_drafts, seconds))


class Runner:
    """Steps as a model runner makes them: what was sampled goes in, drafts come out."""

    def __init__(self, launched_by: str | None = None) -> None:
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                distributed_executor_backend=launched_by, world_size=2, data_parallel_size=1
            ),
            additional_config={},
            speculative_config=SimpleNamespace(num_speculative_tokens=MAX_DRAFT_TOKENS),
            model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN, get_vocab_size=lambda: VOCABULARY_SIZE),
        )
        self.now = 0.0
        self.drafts = Drafts(config, clock=lambda: self.now)
        self.drafts.rule = self.rule = Every()
        self.faults = Faults()
        self.drafts.attend(lambda: SimpleNamespace(req_ids=list(self.tokens)), self.faults)
        self.parts = WorkerParts([("drafts", self.drafts)], self.faults)
        self.tokens: dict[str, list[int]] = {}
        self.proposed: dict[str, list[int]] = {}

    def step(self, sampled: dict[str, tuple[int, ...]], new: tuple = (), finished: tuple[str, ...] = ()) -> dict:
        """Drafts of each request, by request id."""
        for id in finished:
            del self.tokens[id]
        for request in new:
            self.tokens[request.req_id] = list(request.prompt_token_ids)
        drafted = {id: drafts for id, drafts in self.proposed.items() if drafts and id in sampled}
        self.parts.call(
            WorkerPart.see_step,
            SimpleNamespace(
                finished_req_ids=set(finished),
                scheduled_new_reqs=new,
                scheduled_cached_reqs=SimpleNamespace(num_reqs=len(sampled) - len(new)),
                scheduled_spec_decode_tokens=drafted,
                num_scheduled_tokens=sampled,
                total_num_scheduled_tokens=len(sampled) + sum(map(len, drafted.values())) + 5 * len(new),
            ),
        )
        for id, tokens in sampled.items():
            self.tokens[id] += tokens
        known = [*self.tokens.values()]
        proposed = self.drafts.propose(
            [list(sampled.get(id, ())) for id in self.tokens], np.array(list(map(len, known))), np.zeros((1, 1)), x=1
        )
        self.proposed = dict(zip(self.tokens, proposed, strict=True))
        return self.proposed


def request(
    id: str,
    prompt: tuple[int, ...] = PROMPT,
    *,
    tagged: bool = True,
    adapter: str | None = None,
    max_tokens: int = 99,
    **tag: Any,
) -> SimpleNamespace:
    extra_args = CandidateTag("group", 0, GroupTerms(1, 2), 1, **tag).to_extra_args() if tagged else None
    return SimpleNamespace(
        req_id=id,
        request_id=id,
        prompt_token_ids=list(prompt),
        lora_request=None if adapter is None else SimpleNamespace(lora_name=adapter),
        sampling_params=SimpleNamespace(extra_args=extra_args, max_tokens=max_tokens),
    )


@pytest.fixture
def runner() -> Runner:
    return Runner()


def test_a_candidate_is_drafted_what_its_sibling_has_said(runner):
    runner.step({"a": ANSWER[:8]}, (request("a"),))
    assert runner.step({"a": ANSWER[8:9], "b": ANSWER[:2]}, (request("b"),))["b"] == list(ANSWER[2:9])


def test_what_has_ended_is_still_a_source(runner):
    runner.step({"a": ANSWER[:8]}, (request("a"),))
    runner.step({}, finished=("a",))
    assert runner.step({"b": ANSWER[:1]}, (request("b"),))["b"] == list(ANSWER[1:8])


@pytest.mark.parametrize(
    "other",
    [
        request("b", namespace="another key"),
        request("b", adapter="sql"),
        request("b", (1, 2, 4)),
        request("b", tagged=False),
    ],
    ids=["namespace", "adapter", "prompt", "no candidate"],
)
def test_what_is_not_its_prompts_or_not_its_clients_is_no_draft(runner, other):
    runner.step({"a": ANSWER[:8]}, (request("a"),))
    assert runner.step({"b": ANSWER[:2]}, (other,))["b"] == []


def test_a_resumed_candidate_has_the_prompt_it_began_with(runner):
    runner.step({"a": ANSWER[:8]}, (request("a"),))
    resumed = request("b", (*PROMPT, *ANSWER[:3]), num_resumed=3)
    assert runner.step({"b": ANSWER[3:4]}, (resumed,))["b"] == list(ANSWER[4:8])


def test_a_candidate_that_moved_here_goes_on_where_it_was(runner):
    runner.step({"a": ANSWER[:8]}, (request("a"),))
    moved = request("b"), list(ANSWER[:3])
    runner.drafts.arrived(*moved)
    runner.tokens["b"] = [*PROMPT, *ANSWER[:3]]
    assert runner.step({"b": ANSWER[3:4]})["b"] == list(ANSWER[4:8])
    known = runner.drafts._running["b"]
    runner.drafts.arrived(*moved)
    assert runner.drafts._running["b"] is known, "there is one of it"


@pytest.mark.parametrize(("max_tokens", "num_drafted"), [(99, 6), (4, 1), (3, 0), (2, 0)])
def test_nothing_is_drafted_beyond_the_end(runner, max_tokens, num_drafted):
    runner.step({"a": ANSWER[:8]}, (request("a"),))
    drafts = runner.step({"b": ANSWER[:2]}, (request("b", max_tokens=max_tokens),))["b"]
    assert len(drafts) == num_drafted


def test_nothing_is_drafted_beyond_the_longest_context(runner):
    long = tuple(range(100, 100 + MAX_MODEL_LEN - 10))
    runner.step({"a": ANSWER[:8]}, (request("a", long),))
    assert len(runner.step({"b": ANSWER[:2]}, (request("b", long),))["b"]) == 6
    assert len(runner.step({"b": ANSWER[2:5]})["b"]) == 3
    assert len(runner.step({"b": ANSWER[5:8]})["b"]) == 0


def test_an_unfinished_prompt_has_no_drafts(runner):
    runner.step({"a": ANSWER[:8]}, (request("a"),))
    assert runner.step({"b": ()}, (request("b"),))["b"] == []


def test_the_rule_learns_what_became_of_the_drafts(runner):
    runner.step({"a": ANSWER[:8]}, (request("a"),))
    runner.step({"b": ANSWER[:2]}, (request("b"),))
    assert runner.rule.fates == []
    runner.step({"b": (*ANSWER[2:5], 99)})
    assert runner.rule.fates == [(6, 3)]
    drafts = runner.step({"b": ANSWER[:1]})["b"]
    runner.proposed["b"] = drafts[:2]  # vLLM had room for two
    runner.step({"b": ANSWER[1:4]})
    assert runner.rule.fates == [(6, 3), (2, 2)]
    runner.step({"b": ()}, finished=("a",))
    assert sum(map(sum, runner.rule.fates[2:])) == 0, "a step that sampled nothing says nothing"


def test_the_rule_learns_what_steps_cost_that_only_decode(runner):
    runner.step({"a": ANSWER[:8]}, (request("a"),))
    runner.now = 1.0
    runner.step({"a": ANSWER[8:9]})
    assert runner.rule.steps == [], "the first one computed the prompt"
    runner.now = 1.5
    runner.step({"a": ANSWER[:1]})
    assert runner.rule.steps == [(1, 0, 0.5)]
    runner.now = 1.75
    num_drafted = len(runner.proposed["a"])
    runner.step({"a": ANSWER[1:2]})
    runner.now = 2.75
    runner.step({"a": ANSWER[2:3]})
    assert runner.rule.steps[1:] == [(1, 0, 0.25), (1, num_drafted, 1.0)]
    assert num_drafted
    runner.now = 100.0
    runner.step({"b": ()}, (request("b"),), finished=("a",))
    assert len(runner.rule.steps) == 3, "nobody had been there"


def test_estimates_that_the_rule_does_not_want_are_not_drafted(runner):
    runner.rule.choose = lambda num_rows, num_drafts: Choice(NUM_BINS - 1, 99)
    runner.step({"a": ANSWER[:8]}, (request("a"),))
    assert runner.step({"b": ANSWER[:2]}, (request("b"),))["b"] == []
    runner.rule.choose = lambda num_rows, num_drafts: Choice(0, 3)
    assert runner.step({"b": ()})["b"] == []
    drafts = runner.step({"b": ANSWER[2:3], "a": ANSWER[4:5]})
    assert sum(map(len, drafts.values())) == 3


def of_model(name: str, vocab_size: int = 50) -> SimpleNamespace:
    return SimpleNamespace(tokenizer=name, get_vocab_size=lambda: vocab_size)


@pytest.mark.parametrize("placeholder", [VOCABULARY_SIZE, 2**31 - 1])
def test_a_draft_ends_before_a_token_that_the_model_does_not_have(runner, placeholder):
    prompt = (5, 7, 8, placeholder, 9)
    assert runner.step({"a": (7,)}, (request("a", prompt),))["a"] == [8]
    assert runner.step({"b": (8,)}, (request("b", prompt),))["b"] == []
    assert runner.faults.num == 0


def test_drafts_survive_in_a_file_of_their_model(runner, tmp_path):
    runner.step({"a": ANSWER[:8]}, (request("a"),))
    path = tmp_path / "drafts-0"
    DraftsFile(path, runner.drafts.memory, of_model("/models/one")).save()
    for model in (of_model("two"), of_model("one", 51)):
        other = Runner()
        DraftsFile(path, other.drafts.memory, model).load()
        assert other.drafts.memory.num_prompts == 0
    same = Runner()
    DraftsFile(path, same.drafts.memory, of_model("/elsewhere/one")).load()
    assert same.step({"b": ANSWER[:1]}, (request("b"),))["b"] == list(ANSWER[1:8])


@pytest.mark.parametrize("content", [b"", b"[]", b"{torn", b"[" * 200_000 + b"\n", None])
def test_a_file_that_cannot_be_read_keeps_nobody_from_starting(runner, tmp_path, content):
    path = tmp_path / "drafts-0"
    if content is None:
        path.mkdir()
    else:
        DraftsFile(path, runner.drafts.memory, of_model("one")).save()
        path.write_bytes(content or path.read_bytes()[:-3])
    file = DraftsFile(path, runner.drafts.memory, of_model("one"))
    file.load()
    if content is None:
        file.save()
    assert runner.drafts.memory.num_prompts == 0


def test_a_file_that_is_larger_than_the_memory_is_not_read(runner, tmp_path, monkeypatch):
    path = tmp_path / "drafts-0"
    with path.open("wb") as file:
        file.truncate(runner.drafts.memory.max_bytes + (1 << 20))
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("it is read"))
    DraftsFile(path, runner.drafts.memory, of_model("one")).load()
    assert runner.drafts.memory.num_prompts == 0


def test_a_memory_that_is_refused_keeps_nobody_from_starting(runner, tmp_path, monkeypatch):
    path = tmp_path / "drafts-0"
    DraftsFile(path, runner.drafts.memory, of_model("one")).save()

    def refused(_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(runner.drafts.memory, "load", refused)
    DraftsFile(path, runner.drafts.memory, of_model("one")).load()


def test_a_memory_in_python_is_said_with_its_reason(monkeypatch):
    monkeypatch.setenv("VLLM_ROLLOUT_OPS", "torch")
    warned = []
    monkeypatch.setattr(drafts_module.logger, "warning", lambda said, *values: warned.append(said % values))
    Runner()
    (said,) = warned
    assert "drafts are made in Python" in said
    assert "VLLM_ROLLOUT_OPS" in said


def test_workers_that_each_have_a_scheduler_are_refused():
    """They would verify different drafts, and wait for each other for ever."""
    with pytest.raises(ValueError, match="external_launcher"):
        Runner("external_launcher")


class ModelRunner:
    """The parts of vLLM's V1 runner that drafts touch."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.faults = Faults()
        self.input_batch = SimpleNamespace(sampling_metadata=SimpleNamespace(logprob_token_ids=None))

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return False  # some request is near the end of the context

    def _cannot_verify(self) -> bool:
        return False


def worker_with(drafter: Any, tmp_path: Path, *, v2: bool = False) -> SimpleNamespace:
    config = SimpleNamespace(
        speculative_config=object(),
        additional_config=DraftsOptions(file=str(tmp_path / "drafts")).into({}),
        parallel_config=SimpleNamespace(data_parallel_rank=0, data_parallel_index=3),  # as in a dense model's rank
    )
    return SimpleNamespace(
        model_runner=ModelRunner(drafter), vllm_config=config, use_v2_model_runner=v2, model_config=of_model("one")
    )


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """This worker's place among the ranks that hold a model together."""
    place = SimpleNamespace(is_last_rank=True, rank_in_group=0)
    monkeypatch.setattr(runner_module, "get_pp_group", lambda: place)
    monkeypatch.setattr(runner_module, "get_tp_group", lambda: place)
    return place


def test_a_worker_that_drafts_keeps_what_it_knows_in_the_file_of_its_rank(runner, groups, tmp_path):
    runner.step({"a": ANSWER[:8]}, (request("a"),))
    drafts_of(worker_with(runner.drafts, tmp_path)).stop()
    again = Runner()
    assert drafts_of(worker_with(again.drafts, tmp_path)) is again.drafts
    assert again.drafts.memory.num_prompts == 1
    assert [path.name for path in tmp_path.iterdir()] == ["drafts-3"]
    groups.rank_in_group = 1
    assert drafts_of(worker_with(other := Runner().drafts, tmp_path)) is other
    assert other.memory.num_prompts == 0, "only the first of several workers has the file"


def test_a_worker_whose_drafts_come_from_elsewhere_has_no_part(runner, groups, tmp_path):
    assert drafts_of(worker_with(object(), tmp_path)) is None
    assert drafts_of(worker_with(runner.drafts, tmp_path, v2=True)) is None
    groups.is_last_rank = False
    assert drafts_of(worker_with(runner.drafts, tmp_path)) is None


def test_our_drafts_go_on_beside_a_request_that_is_near_the_end_of_the_context(runner):
    """If our drafts do not go on, vLLM proposes token 0 to every request."""
    model_runner = ModelRunner(runner.drafts)
    assert not model_runner._input_fits_in_drafter("metadata"), "another drafter's"
    draft_in(model_runner)
    assert model_runner._input_fits_in_drafter("metadata")
    assert not model_runner._input_fits_in_drafter(None)


def test_a_step_with_a_request_that_names_tokens_for_log_probabilities_verifies_nothing(runner):
    draft_in(model_runner := ModelRunner(runner.drafts))
    assert not model_runner._cannot_verify()
    model_runner.input_batch.sampling_metadata.logprob_token_ids = {0: [7]}
    assert model_runner._cannot_verify()


@pytest.mark.parametrize("place", ["begin", "step", "end"])
def test_where_the_memory_raises_candidates_go_on_without_drafts_and_later_ones_have_them(monkeypatch, place):
    runner = Runner()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(runner.drafts.memory, place, fail)
    runner.step({"a": ANSWER[:5]}, new=(request("a"),))
    assert not any(runner.step({"b": ANSWER[:3]}, new=(request("b"),), finished=("a",)).values())
    assert runner.faults.num
    monkeypatch.undo()
    assert not any(runner.step({"b": ANSWER[3:5]}).values())
    runner.step({"c": ANSWER[:9]}, new=(request("c"),), finished=("b",))
    assert runner.step({"d": ANSWER[:3]}, new=(request("d"),))["d"]

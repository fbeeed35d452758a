"""The rollout_func for TRL: exactly as many completions as prompts, and rewards that find their way back.

TRL is not here: `trainer` has what is read of its trainer, and `step` does what that does with a rollout_func's answer
and with reward functions. The conformance kit runs the same with the real one.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.kernel.http import fake_engine
from tests.parts.rewards.test_grading import FakeGraders
from vllm_rollout import RolloutClient, RolloutError
from vllm_rollout.integrations.trl import TRLRollouts
from vllm_rollout.integrations.trl_rows import Columns, columns_by_prompt, runs_of, tokenized
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.http.plan import RewardsPlan

PRUNING = {"detection_length": 4, "keep_ratio": 0.5, "min_labels": 1}


class WideSampling(fake_engine.Sampling):
    """With what a trainer sends beside what means something to the fake engine."""

    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


@pytest.fixture(autouse=True)
def _sampling(monkeypatch):
    monkeypatch.setattr(fake_engine, "Sampling", WideSampling)


class Tokenizer:
    """A token per character; a chat is its contents in a row."""

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) % 1000 for letter in one] for one in text]}

    def apply_chat_template(self, conversation: list[Any], chat_template: str | None, **settings: Any) -> Any:
        assert settings == {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "tools": None, "x": 1}
        return self([(chat_template or "") + "".join(m["content"] for m in one) for one in conversation])


def trainer(num_generations: int = 4, **more: Any) -> SimpleNamespace:
    settings = {
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(process_index=0, wait_for_everyone=lambda: None),
        "num_generations": num_generations,
        "num_generations_eval": 1,
        "processing_class": Tokenizer(),
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "max_completion_length": 64,
        "tools": [],
        "chat_template": None,
        "chat_template_kwargs": {"x": 1},
        "args": SimpleNamespace(vllm_structured_outputs_regex=None, generation_kwargs={"seed": 3}),
    }
    return SimpleNamespace(**{**settings, **more})


def reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Right, wrong, not to be said, …"""
    return [[1.0, 0.0, None][place % 3] for place in range(len(completion_ids))]


def step(rollouts: TRLRollouts, function: Any, prompts: list[Any], of: Any) -> dict[str, list[Any]]:
    output = rollouts(prompts, of)
    columns = {name: output[name] for name in output if name not in ("prompt_ids", "completion_ids", "logprobs")}
    said = function(prompts=prompts, completion_ids=output["completion_ids"], **columns)
    assert (asyncio.run(said) if asyncio.iscoroutine(said) else said) == reward(output["completion_ids"])
    return output


def test_a_completion_for_every_prompt_with_siblings_where_their_prompts_are(client: RolloutClient):
    prompts = ["b"] * 4 + ["a"] * 4 + ["b"] * 4
    output = TRLRollouts(client, redundancy=2)(prompts, trainer())
    assert output["prompt_ids"] == [[ord(prompt)] for prompt in prompts]
    assert {len(values) for values in output.values()} == {12}
    lengths = [len(ids) for ids in output["completion_ids"]]
    assert [len(logprobs) for logprobs in output["logprobs"]] == lengths
    assert min(lengths) > 0
    assert set(output["rollout_survival_probability"]) == {None}
    for start in (0, 4, 8):
        assert len(set(output["rollout_index"][start : start + 4])) == 4
        assert set(output["rollout_index"][start : start + 4]) <= set(range(6))


def test_the_server_grades_with_the_columns_of_the_data_set(app, client: RolloutClient):
    graders = FakeGraders(lambda trajectory: Grade("ok", float(trajectory.data["n"])))
    app.state.rollout_service.part(RewardsPlan).grading.__init__(graders, Metrics(CollectorRegistry()))
    chat = [{"role": "user", "content": "b"}]
    of = trainer(train_dataset=[{"prompt": "a", "n": 1}, {"prompt": chat, "n": 2}])
    rollouts = TRLRollouts(client, reward="even")
    for prompt, n in (("a", 1.0), (chat, 2.0)):
        output = rollouts([prompt] * 4, of)
        assert rollouts.graded(prompts=[prompt] * 4, **output) == [n] * 4
    assert [trajectory.prompt for _, trajectory, _ in graders.asked][-1] == chat
    with pytest.raises(ValueError, match="the data set has no 'c'"):
        rollouts(["c"] * 4, of)
    with pytest.raises(ValueError, match="reward=NAME"):
        TRLRollouts(client).graded(prompts=["a"])


def test_the_server_grades_what_the_trainer_has_rendered(app, client: RolloutClient):
    """Its chat template may be another than the server's."""
    graders = FakeGraders(lambda trajectory: Grade("ok", 1.0))
    app.state.rollout_service.part(RewardsPlan).grading.__init__(graders, Metrics(CollectorRegistry()))
    chat = [{"role": "user", "content": "b"}]
    of = trainer(train_dataset=[{"prompt": chat, "n": 2}])
    output = TRLRollouts(client, reward="even")([chat] * 4, of)
    assert output["prompt_ids"] == TRLRollouts(client)([chat] * 4, of)["prompt_ids"]
    assert {str(trajectory.prompt) for _, trajectory, _ in graders.asked} == {str(chat)}


def test_evaluation_has_its_own_number_of_generations_and_no_race(client: RolloutClient, monkeypatch):
    asked: list[tuple[int, Any]] = []
    rollout = RolloutClient.rollout

    def noted(its: RolloutClient, prompts: Any, size: int, redundancy: Any, **options: Any) -> Any:
        asked.append((redundancy, options.get("pruning")))
        return rollout(its, prompts, size, redundancy, **options)

    monkeypatch.setattr(RolloutClient, "rollout", noted)
    rollouts = TRLRollouts(client, redundancy=2, pruning={"detection_length": 4})
    output = rollouts(["a", "a", "b"], trainer(model=SimpleNamespace(training=False)))
    assert output["rollout_index"] == [0, 0, 0]
    assert output["rollout_prompt_id"] == ["0", "1", "2"]
    assert asked == [(0, None)]


def test_processes_wait_until_the_main_one_has_sent_its_weights(client: RolloutClient):
    waited: list[int] = []
    accelerator = SimpleNamespace(process_index=1, wait_for_everyone=lambda: waited.append(1))
    TRLRollouts(client)(["a"] * 4, trainer(accelerator=accelerator))
    assert waited == [1]


def test_columns_are_of_the_data_set_that_is_evaluated_now():
    columns, of = Columns(), trainer(model=SimpleNamespace(training=False), eval_dataset=[{"prompt": "a", "n": 1}])
    assert columns.of(of) == {'"a"': {"n": 1}}
    of.eval_dataset = {"x": [{"prompt": "b", "n": 2}]}
    assert columns.of(of) == {'"b"': {"n": 2}}
    of.eval_dataset = None
    with pytest.raises(ValueError, match="must have eval_dataset"):
        columns.of(of)


def test_a_group_that_is_cut_between_processes_is_generated_in_its_parts(client: RolloutClient):
    """Three processes with four prompts each, six generations: this is the second one."""
    prompts = ["a"] * 2 + ["b"] * 2
    output = TRLRollouts(client, redundancy=1)(prompts, trainer(num_generations=6))
    assert output["prompt_ids"] == [[97], [97], [98], [98]]
    prompts = ["a"] * 1 + ["b"] * 6 + ["c"] * 1
    output = TRLRollouts(client, redundancy=1)(prompts, trainer(num_generations=6))
    assert output["prompt_ids"] == [[ord(prompt)] for prompt in prompts]
    assert len(set(output["rollout_id"])) == 2


def test_halves_of_a_group_in_two_processes_are_not_the_same_answers(client: RolloutClient):
    """Each asks for its own prompts, by the same seed of the trainer's."""
    accelerators = [SimpleNamespace(process_index=process, wait_for_everyone=lambda: None) for process in (0, 0, 1)]
    said = [TRLRollouts(client)(["a"] * 4, trainer(num_generations=8, accelerator=each)) for each in accelerators]
    first, again, other = ([*map(tuple, output["completion_ids"])] for output in said)
    assert first == again
    assert not set(first) & set(other)


@pytest.mark.parametrize(
    ("prompts", "num_generations", "runs"),
    [
        ("aabb", 2, [("a", 2), ("b", 2)]),
        ("aaaa", 2, [("a", 2), ("a", 2)]),
        ("aaaaa", 2, [("a", 2), ("a", 2), ("a", 1)]),
        ("aba", 4, [("a", 1), ("b", 1), ("a", 1)]),
    ],
)
def test_siblings_are_equal_prompts_in_a_row(prompts, num_generations, runs):
    assert runs_of(prompts, num_generations) == runs


def test_chats_are_rendered_by_the_trainer_s_template():
    chat = [{"role": "user", "content": "ab"}]
    assert tokenized([chat, chat], trainer(chat_template="T")) == [[84, 97, 98]] * 2


def test_images_are_refused_with_what_to_do_instead():
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
    with pytest.raises(ValueError, match="Leave rollout_func out"):
        tokenized([chat], trainer())


@pytest.mark.parametrize("is_async", [False, True])
def test_rewards_are_posted_where_they_belong_once_the_reward_function_has_spoken(client: RolloutClient, is_async):
    metrics: list[tuple[str, float]] = []
    rollouts = TRLRollouts(client, redundancy=4, pruning=PRUNING)

    def is_right(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        assert len(columns["rollout_index"]) == len(completion_ids)
        return reward(completion_ids)

    async def is_right_later(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        return is_right(completion_ids, **columns)

    function = rollouts.teaching(is_right_later if is_async else is_right)
    assert function.__name__ == ("is_right_later" if is_async else "is_right")
    assert asyncio.iscoroutinefunction(function) == is_async

    def logged(**columns: Any) -> Any:
        return function(log_metric=lambda name, value: metrics.append((name, value)), **columns)

    of = trainer(args=SimpleNamespace(vllm_structured_outputs_regex=None, generation_kwargs={"min_tokens": 8}))
    output = step(rollouts, logged, ["a"] * 4 + ["b"] * 4, of)
    wanted = [reward for reward in reward(output["completion_ids"]) if reward is not None]
    assert metrics == [("rollout/rewards_accepted", len(wanted))]
    report = client.report()
    assert sum(signal.num_positive + signal.num_negative for signal in report.signals.values()) >= len(wanted)
    for place, said in enumerate(reward(output["completion_ids"])):
        again = (output["rollout_prompt_id"][place], output["rollout_index"][place], said or 0.0)
        counts = client.post_rewards(output["rollout_id"][place], [again]).counts
        assert (counts.duplicate, counts.accepted) == ((0, 1) if said is None else (1, 0))


@pytest.mark.parametrize(("options", "num_posts"), [({}, 0), ({"pruning": PRUNING}, 1)])
def test_without_pruning_nothing_is_posted(client: RolloutClient, monkeypatch, options, num_posts):
    posts, post_rewards = [], client.post_rewards
    monkeypatch.setattr(client, "post_rewards", lambda *rewards: posts.append(rewards) or post_rewards(*rewards))
    rollouts = TRLRollouts(client, redundancy=4, **options)
    step(rollouts, rollouts.teaching(reward), ["a"] * 4, trainer())
    assert len(posts) == num_posts


def test_rewards_for_a_server_that_has_forgotten_are_a_warning(client: RolloutClient):
    rollouts = TRLRollouts(client, redundancy=4, pruning=PRUNING)
    columns = {"rollout_id": ["rollout-of-before"], "rollout_prompt_id": ["0"], "rollout_index": [0]}
    with pytest.warns(UserWarning, match="rewards of rollout-of-before were not taken: 404"):
        rollouts.teaching(reward)(completion_ids=[[1]], **columns)


def test_a_reward_function_without_the_rollout_func_is_told_so(client: RolloutClient):
    rollouts = TRLRollouts(client, redundancy=4, pruning=PRUNING)
    with pytest.raises(ValueError, match="give the trainer rollout_func too"):
        rollouts.teaching(reward)(completion_ids=[[1]])


def test_what_trl_cannot_take_is_refused_at_once(client: RolloutClient):
    with pytest.raises(ValueError, match="allow_fewer must be false, got true"):
        TRLRollouts(client, pruning={**PRUNING, "allow_fewer": True})
    with pytest.raises(TypeError, match="teaching takes a function"):
        TRLRollouts(client).teaching("a/reward-model")  # type: ignore[type-var]
    xargs = SimpleNamespace(
        vllm_structured_outputs_regex=None, generation_kwargs={"vllm_xargs": {"rollout_redundancy": 1}}
    )
    with pytest.raises(ValueError, match=r"name these options in TRLRollouts"):
        TRLRollouts(client)(["a"], trainer(args=xargs))


def test_the_server_s_refusal_and_a_lost_group_are_errors(client: RolloutClient, engine: fake_engine.FakeEngine):
    with pytest.raises(RolloutError, match="64"):
        TRLRollouts(client, redundancy=100)(["a"] * 4, trainer())
    engine.failures = {0: 2}
    with pytest.raises(RuntimeError, match="has 3 trajectories, 4 are needed"):
        TRLRollouts(client)(
            ["a"] * 4,
            trainer(args=SimpleNamespace(vllm_structured_outputs_regex=None, generation_kwargs={"min_tokens": 8})),
        )


def test_columns_are_looked_up_in_every_data_set_and_rows_that_nobody_can_tell_apart_are_refused():
    rows = [{"prompt": "a", "solution": 1}, {"prompt": [{"role": "user", "content": "b"}], "solution": 2}]
    assert list(columns_by_prompt({"math": rows[:1], "code": rows[1:]}).values()) == [{"solution": 1}, {"solution": 2}]
    assert len(columns_by_prompt([*rows, *rows])) == 2
    for other, name in (({"solution": 3}, "solution"), ({}, "solution"), ({"solution": 1, "unit": None}, "unit")):
        with pytest.raises(ValueError, match=f"two rows have the prompt 'a' and another {name}"):
            columns_by_prompt({"math": rows, "code": [{"prompt": "a", **other}]})

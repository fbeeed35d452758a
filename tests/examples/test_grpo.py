"""The reference trainer without a server: its thoughts, its loss, what its flags say, what it refuses."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.grpo.loss import ALGORITHMS, Update, rows_of
from examples.grpo.model import load, new_model, new_tokenizer, save
from examples.grpo.server import POLICY, feed_fields, rollout_fields, run_fields, sampling, start
from examples.grpo.task import CLEAR, STYLES, VOCABULARY, describe, digit_sum_reward, problems, reward, thought
from examples.grpo.train import parse
from vllm_rollout.kernel.api.sampling import sampling_params
from vllm_rollout.kernel.http.answers import Candidate, GroupAnswer, GroupRewards, StoppedCandidate, Trajectory
from vllm_rollout.kernel.rules.rewards import Estimator
from vllm_rollout.parts.feeds.http.body import FeedRequest
from vllm_rollout.parts.rewards.rules.estimates import advantages
from vllm_rollout.process import ServerError, ServerProcess
from vllm_rollout.training.stream import StreamTrainer
from vllm_rollout.training.weights import check_finite, save_weights


def thoughts(style: str, count: int) -> list[tuple[Any, int, float]]:
    chance = random.Random(0)
    said = [(problem, thought(problem, chance, STYLES[style])) for problem in problems("chain", "look", count)]
    return [(problem, len(words), reward(" ".join(words[:-1]), problem.data)) for problem, words in said]


def test_the_reference_trainer_reads_in_an_hour() -> None:
    sources = [*(Path(__file__).parents[2] / "examples/grpo").glob("*.py")]
    assert 0 < sum(len(each.read_text().splitlines()) for each in sources) < 900


def test_clear_thoughts_are_right_and_rewards_look_at_the_end() -> None:
    for problem in problems("chain", "look", 50):
        words = thought(problem, random.Random(1), CLEAR)
        assert set(words) | set(problem.text.split()) <= set(VOCABULARY)
        said = " ".join(words[:-1])
        assert reward(said, problem.data) == 1
        assert reward(said[:-1] + str((int(said[-1]) + 1) % 10), problem.data) == 0
        assert reward(said.removesuffix(f" answer {said[-1]}"), problem.data) == 0  # cut before it answered
    (problem,) = problems("digit_sum", "look", 1)
    assert digit_sum_reward(f"12, so the sum is {problem.data['answer']}.", problem.data) == 1
    assert digit_sum_reward(f"{problem.data['answer']} or 999", problem.data) == 0
    assert problems("chain", "x", 2, first=3) == problems("chain", "x", 5)[3:]


@pytest.mark.parametrize(
    ("style", "least", "most"),
    [("careful", -1, -0.08), ("thorough", 0.15, 1), ("even", -0.04, 0.04)],
)
def test_styles_are_what_they_are_said_to_be(style: str, least: float, most: float) -> None:
    """Success of the longest quarter over that of the shortest two."""
    first, second, _, longest = describe(thoughts(style, 4000))["quarters"]
    assert least <= longest - (first + second) / 2 <= most


class Bigrams(torch.nn.Module):
    """Each token's logits follow from the token before."""

    config = device = None

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).double())

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return torch.nn.Module() if use_cache else Said(self.table[input_ids])


class Said:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


def group(model: Bigrams, estimator: Estimator, *answers: tuple[list[int], float]) -> GroupAnswer:
    """As the server answers it, sampled by the model itself."""
    rewards = [r for _, r in answers]
    logs = model.table.detach().log_softmax(-1)
    return GroupAnswer.model_construct(
        prompt_token_ids=[1],
        trajectories=[
            Trajectory(
                index=i,
                token_ids=ids,
                num_tokens=len(ids),
                logprobs=[logs[a, b].item() for a, b in zip([1, *ids], ids, strict=False)],
                finish_reason="stop",
                reward=r,
            )
            for i, (ids, r) in enumerate(answers)
        ],
        candidates=[],
        rewards=GroupRewards.model_construct(advantages=advantages(rewards, estimator)),
    )


ANSWERS = (
    (([2, 3, 4], 1.0), ([5], 0.0), ([2, 2], 0.0)),
    (([3, 1], 1.0), ([4, 4, 4, 5], 0.0)),
    (([5, 5], 1.0), ([1], 1.0)),
)
"""Two groups that teach, and one that does not, whose tokens and answers count all the same."""


def gradient(name: str, batches: list[int]) -> torch.Tensor:
    """Gradient of the groups, `batches` of them at once."""
    model = Bigrams()
    update = Update(StreamTrainer(model.parameters()), model, ALGORITHMS[name], micro_tokens=9)
    groups = [group(model, ALGORITHMS[name].estimator, *answers) for answers in ANSWERS]
    for size in batches:
        update.add(groups[:size])
        groups = groups[size:]
    assert update.finish() is not None
    assert max(d.max().item() for d in update.differences) < 1e-6
    assert model.table.grad is not None
    return model.table.grad


@pytest.mark.parametrize(
    ("name", "each"),
    [
        # by hand: (r - mean) / std of the sample; a token counts 1 / 15, or 1 / (7 answers x its answer's length)
        ("grpo", lambda advantage, length: advantage / (7 * length)),
        ("dapo", lambda advantage, length: advantage / 15),
    ],
)
def test_the_gradient_is_that_of_the_formula_however_groups_come(name: str, each: Any) -> None:
    model = Bigrams()
    logs = model.table.log_softmax(-1)
    by_hand = [1.1547, -0.57735, -0.57735], [0.70711, -0.70711]
    loss = torch.zeros((), dtype=torch.float64)
    for answers, told in zip(ANSWERS, by_hand, strict=False):
        for (ids, _), advantage in zip(answers, told, strict=True):
            for before, token in zip([1, *ids], ids, strict=False):
                loss = loss - each(advantage, len(ids)) * logs[before, token]
    loss.backward()
    for batches in [3], [1, 1, 1], [2, 1]:
        assert torch.allclose(gradient(name, batches), model.table.grad, atol=2e-5)


@pytest.mark.parametrize(
    ("state", "teaches"), [("surplus", True), ("pruned", True), ("finished", False), ("failed", False)]
)
def test_who_was_stopped_teaches_as_a_wrong_answer_up_to_there(state: str, teaches: bool) -> None:
    model = Bigrams()
    answered = group(model, "mean", ([2, 3], 1.0), ([4], 1.0))
    (other,) = group(model, "mean", ([5, 5, 5], 0.0)).trajectories
    said = {"token_ids": other.token_ids, "num_tokens": 3, "logprobs": other.logprobs}
    answered.candidates = [
        StoppedCandidate.model_construct(index=2, state=state, **said),
        StoppedCandidate.model_construct(index=3, state="surplus", token_ids=[], num_tokens=0, logprobs=[]),
        Candidate.model_construct(index=4, state="surplus", num_tokens=2),
        StoppedCandidate.model_construct(index=5, state=state, ended_by_itself=True, **said),
    ]
    rows, count = rows_of(answered, ALGORITHMS["dr_grpo"])
    told = [(row.answer.token_ids, row.advantage) for row in rows]
    wanted = [([2, 3], 1 / 3), ([4], 1 / 3), ([5, 5, 5], -2 / 3)] if teaches else []
    assert [ids for ids, _ in told] == [ids for ids, _ in wanted]
    assert [a for _, a in told] == pytest.approx([a for _, a in wanted])
    assert count == (6 if teaches else 3)


def test_who_was_stopped_and_scored_is_as_right_as_its_score_says() -> None:
    answered = group(Bigrams(), "mean", ([2, 3], 1.0), ([4], 0.0))
    said = {"state": "surplus", "num_tokens": 1, "logprobs": [-1.0]}
    answered.candidates = [
        StoppedCandidate.model_construct(index=2, token_ids=[5], success_probability=0.5, **said),
        StoppedCandidate.model_construct(index=3, token_ids=[6], success_probability=None, **said),
    ]
    rows, _ = rows_of(answered, ALGORITHMS["dr_grpo"])
    assert [row.advantage for row in rows] == pytest.approx([0.625, -0.375, 0.125, -0.375])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_answer_without_tokens_counts_and_has_no_gradient(name: str) -> None:
    model = Bigrams()
    update = Update(StreamTrainer(model.parameters()), model, ALGORITHMS[name], micro_tokens=9)
    update.add([group(model, ALGORITHMS[name].estimator, ([2, 3], 1.0), ([4], 0.0), ([], 0.0))])
    result = update.finish()
    assert result is not None
    assert result.weight == 3  # answers, and tokens, too
    assert result.gradient_norm > 0


@pytest.mark.parametrize(
    ("ratio", "name", "teaches"),
    [(1.5, "grpo", False), (1.5, "dapo", False), (1.25, "grpo", False), (1.25, "dapo", True), (0.5, "grpo", True)],
)
def test_ratios_are_clipped_where_they_would_go_on(ratio: float, name: str, teaches: bool) -> None:
    model = Bigrams()
    update = Update(StreamTrainer(model.parameters()), model, ALGORITHMS[name], micro_tokens=9)
    answered = group(model, "grpo", ([2, 3], 1.0))
    (right,) = answered.trajectories
    assert right.logprobs is not None
    right.logprobs = [logprob - math.log(ratio) for logprob in right.logprobs]
    answered.rewards = GroupRewards.model_construct(advantages=[1.0])
    update.add([answered])
    result = update.finish()
    assert result is not None
    assert (result.gradient_norm > 0) is teaches


def test_what_does_not_teach_updates_nothing_and_an_attempt_that_died_leaves_nothing() -> None:
    model = Bigrams()
    trainer = StreamTrainer(model.parameters(), torch.optim.AdamW(model.parameters()))
    terms = ALGORITHMS["grpo"]
    died = Update(trainer, model, terms, 9)
    died.add([group(model, "grpo", *ANSWERS[0])])
    update = Update(trainer, model, terms, 9)
    update.add([group(model, "grpo", *ANSWERS[2])])
    assert update.finish() is None
    assert torch.equal(model.table, Bigrams().table)


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    model = Bigrams()
    check_finite(model, "step 3")
    with torch.no_grad():
        model.table[2, 2] = torch.inf
    with pytest.raises(ValueError, match=r"step 3: 1 weights are .*table.*lower learning rate"):
        check_finite(model, "step 3")


def test_of_a_large_model_only_lora_learns_and_the_server_gets_what_it_adds(tmp_path: Path) -> None:
    save(new_model(0), new_tokenizer(), tmp_path / "model")
    (model, _), (before, _) = load(tmp_path / "model", 4), load(tmp_path / "model")
    learned = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    assert {name.split(".")[-3] for name in learned} == {"lora_A", "lora_B"}
    assert len(learned) == 4 * 7 * 2  # two for each matrix of each layer
    with torch.no_grad():
        for tensor in learned.values():
            tensor += 0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (tmp_path / "given").mkdir()
    for file in (tmp_path / "model").iterdir():
        (tmp_path / "given" / file.name).write_bytes(file.read_bytes())
    save_weights(model, tmp_path / "given")
    given, _ = load(tmp_path / "given")
    ids = torch.arange(40)[None]
    told = [its(input_ids=ids).logits for its in (model, given, before)]
    torch.testing.assert_close(told[1], told[0])
    assert (told[2] - told[0]).abs().max() > 0.1
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())  # and it learns on


HALF = {"detection_length": 24, "keep_ratio": 0.5}


@pytest.mark.parametrize(
    ("flags", "size", "fields"),
    [
        ("", 8, {}),
        ("--race", 8, {"redundancy": 8}),
        ("--redundancy auto", 8, {"redundancy": "auto"}),
        ("--race --stopped-teach", 8, {"redundancy": 8, "include": ["logprobs", "stopped"]}),
        ("--race --redundancy 3", 8, {"redundancy": 3}),
        ("--dual-end", 8, {"redundancy": 8, "selection": {"dual_end": {"num_longest": 1, "patience": 1.5}}}),
        ("--dual-end 0", 8, {"redundancy": 8, "selection": {"dual_end": {"num_longest": 1, "patience": 0.0}}}),
        ("--prune", 16, {"pruning": {**HALF, "rule": "gradient", "allow_fewer": True}}),
        ("--prune paper --race", 8, {"redundancy": 8, "pruning": {**HALF, "rule": "paper"}}),
        ("--prune shadow", 8, {"pruning": {**HALF, "mode": "shadow"}}),
        ("--race --audit-ratio 0.1", 8, {"redundancy": 8, "audit_ratio": 0.1}),
    ],
)
def test_each_flag_is_a_field(flags: str, size: int, fields: dict[str, Any]) -> None:
    always = {"reward": {"name": "chain", "estimator": "grpo"}, "sampling_params": {**POLICY, "max_tokens": 512}}
    assert rollout_fields(parse(["model", "output", *flags.split()])) == (size, {**always, **fields})


def test_a_chat_model_is_sampled_as_it_is_whatever_its_generation_config_says() -> None:
    qwen = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    more = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    asked = sampling(parse(["model", "output"]), 1)
    taken = sampling_params(asked, {**qwen, **more}, want_logprobs=True, want_text=False)
    plain = sampling_params({"max_tokens": 512}, {}, want_logprobs=True, want_text=False)
    assert all(getattr(taken, name) == getattr(plain, name) for name in (*qwen, *more, "max_tokens"))


def test_a_run_is_told_of_speculation_and_filtering() -> None:
    fields = run_fields(parse(["model", "output", "--rounds", "--speculation", "1.5", "--algorithm", "dapo"]))
    expected = {"prompt_speculation": 1.5, "response_speculation": 1.5, "filter": "zero_variance", "resume": False}
    assert expected.items() <= fields.items()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--resume", "--resume needs --rounds"),
        ("--speculation 2", "--speculation needs --rounds"),
        ("--max-staleness 2", "--max-staleness needs --feed"),
        ("--serve-flags x", "--serve-flags needs --serve"),
        ("--nccl --serve", "--nccl does not go with --serve"),
        ("--nccl --lora 4", "--nccl does not go with --lora"),
        ("--feed --rounds", "--feed does not go with --rounds"),
        ("--feed --stream", "--feed does not go with --stream"),
        ("--feed --audit-ratio 0.1", "--feed does not go with --audit-ratio"),
        ("--feed --prune", "--prune needs spare candidates of --race or --redundancy"),
        ("--feed --group-size 1 --algorithm dapo", "--group-size must be at least 2, got 1"),
        ("--rounds --group-size 1 --algorithm dapo", "--group-size must be at least 2, got 1"),
        ("--group-size 0", "--group-size must be at least 1, got 0"),
        ("--evaluate-every 0", "--evaluate-every must be at least 1, got 0"),
        ("--held-out 0", "--held-out must be at least 1, got 0"),
        ("--prompts 0", "--prompts must be at least 1, got 0"),
        ("--max-tokens 0", "--max-tokens must be at least 1, got 0"),
        ("--redundancy x", "--redundancy must be a number from 0, or auto, got 'x'"),
        ("--redundancy -1", "--redundancy must be a number from 0, or auto, got '-1'"),
        ("--feed --max-staleness -1", "--max-staleness must be at least 0, got -1"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["model", "output", *words.split()])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--race", "--redundancy 4", "--redundancy auto", "--dual-end"])
def test_a_feed_prunes_with_spare_candidates(flags: str) -> None:
    words = f"--feed --prune --max-staleness 0 {flags}"
    assert FeedRequest(**feed_fields(parse(["model", "output", *words.split()]))).max_staleness == 0


def test_flags_for_the_server_are_quoted_as_in_a_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def stopped_before_it_begins(self: ServerProcess) -> ServerProcess:
        commands.append(self.command)
        raise ServerError("no server here")

    monkeypatch.setattr(ServerProcess, "__enter__", stopped_before_it_begins)
    flags = """--weight-transfer-config '{"backend": "nccl"}'"""
    with pytest.raises(ServerError):
        start(parse(["model", str(tmp_path), "--serve", "--serve-flags", flags]))
    assert '{"backend": "nccl"}' in commands[0]

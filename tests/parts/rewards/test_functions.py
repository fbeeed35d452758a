"""Functions people have, as they have them, and what they return."""

from functools import partial

import msgspec
import numpy
import pytest

from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.grading.builtin import exact, math, regex
from vllm_rollout.parts.rewards.grading.functions import caller, grade, load
from vllm_rollout.parts.rewards.grading.values import VOID, Trajectory


def grade_by(function, text="42", data=None, prompt="6 * 7?", token_ids=()):
    return grade(caller(function), Trajectory(prompt, text, data, token_ids))


def test_trls_functions_get_columns_and_in_a_chat_messages():
    def reward(prompts, completions, answer, **columns):
        return [
            float(c[0]["content"] == a and columns["level"] == [3]) for c, a in zip(completions, answer, strict=True)
        ]

    chat = [{"role": "user", "content": "6 * 7?"}]
    assert grade_by(reward, data={"answer": "42", "level": 3}, prompt=chat).reward == 1

    async def of_texts(completions):
        return [len(text) for text in completions]

    assert grade_by(of_texts, data={"answer": "42"}).reward == 2


def test_verls_functions_get_what_the_data_set_says():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(solution_str == ground_truth), "acc": True, "source": data_source, "n": extra_info["n"]}

    said = grade_by(compute_score, data={"data_source": "gsm8k", "ground_truth": "42", "extra_info": {"n": 3}})
    assert (said.status, said.reward, said.parts) == ("ok", 1, {"acc": 1, "n": 3})


def test_a_data_source_that_a_verl_function_has_already_stays_where_the_data_names_none():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(solution_str == ground_truth), "is_gsm8k": data_source == "gsm8k", "n": len(extra_info)}

    bound = partial(compute_score, data_source="gsm8k", extra_info={"n": 3})
    assert grade_by(bound, data="42").parts == {"is_gsm8k": 1, "n": 1}
    assert grade_by(bound, data={"answer": "42", "data_source": "aime", "extra_info": {}}).parts == {
        "is_gsm8k": 0,
        "n": 0,
    }
    assert grade_by(partial(compute_score, "gsm8k"), data="42").parts == {"is_gsm8k": 1, "n": 0}


def of_ids(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def test_trls_functions_of_token_ids_get_them_where_they_are_known():
    assert grade_by(of_ids, token_ids=(7, 8, 9)).reward == 3
    assert grade_by(of_ids, data={"completion_ids": [1, 2, 3]}).reward == 3
    without = grade_by(of_ids, text="abc")
    assert (without.status, "'completion_ids'" in without.reason) == ("error", True)


def first_is_the_text(model_output, ground_truth, timeout=30.0):
    return float(model_output == ground_truth)


@pytest.mark.parametrize(
    "data", ["42", {"ground_truth": "42"}, {"answer": "42"}, {"reward_model": {"style": "rule", "ground_truth": "42"}}]
)
def test_a_function_of_verls_modules_gets_the_text_first_and_the_truth_of_a_row(data):
    assert grade_by(first_is_the_text, data=data).reward == 1
    assert grade_by(first_is_the_text, text="41", data=data).reward == 0


@pytest.mark.parametrize("data", [None, {}, {"data_source": "mine"}, {"reward_model": {}}, {"reward_model": None}])
def test_a_prompt_without_ground_truth_is_an_error_and_not_a_wrong_answer(data):
    said = grade_by(first_is_the_text, data=data)
    assert (said.status, 'needs "data": {"ground_truth"' in said.reason) == ("error", True)


async def waits(text):
    return float(text)


@pytest.mark.parametrize(
    ("function", "reward", "parts"),
    [
        (lambda text, data: int(text), 42, None),
        (lambda text: True, 1, None),
        (lambda text: numpy.float32(0.5), 0.5, None),
        (lambda text: {"format": 1, "right": (0.5, 2)}, 2, {"format": 1, "right": 0.5}),
        (lambda *given: len(given), 2, None),
        (waits, 42, None),
    ],
)
def test_numbers_and_parts_with_weights_are_rewards(function, reward, parts):
    said = grade_by(function)
    assert (said.status, said.reward, said.parts) == ("ok", reward, parts)


def test_none_is_void():
    assert grade_by(lambda text: VOID).status == "void"


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        ("1.0", "returned '1.0'"),
        ([1.0, 2.0], "returned [1.0, 2.0]"),
        ({}, "returned no part"),
        ({"format": "good"}, "as its part 'format'"),
        ({"score": None, "acc": 1}, "as its part 'score'"),
        ("x" * 10_000, "returned 'xxx"),
        (1.7e308, "returned 1.7e+308"),
        ({"format": 1e99, "right": (1.0, 1e100)}, "returned {'format'"),
        (Grade("ok", float("nan")), "returned nan with status ok"),
        (Grade("ok"), "returned None with status ok"),
        (Grade("void", 1.0), "returned 1.0 with status void"),
        (Grade("good", 1.0), "a grade with status 'good'"),
    ],
)
def test_what_is_no_finite_number_is_an_error_that_shows_it(returned, said):
    grade = grade_by(lambda text: returned)
    assert (grade.status, grade.reward) == ("error", None)
    assert said in grade.reason
    assert len(grade.reason) < 600


def test_what_a_function_raises_is_the_reason():
    said = grade_by(lambda text: {}["answer"])
    assert (said.status, said.reason) == ("error", "the reward function raised KeyError: 'answer'")
    assert "2 rewards for 1 completion" in grade_by(lambda completions: [1, 2]).reason


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def raises(error):
    raise error


@pytest.mark.parametrize(
    ("function", "sent"),
    [
        (lambda text: Grade("ok", True), Grade("ok", 1.0)),
        (
            lambda text: Grade("ok", numpy.float64(0.5), None, {"a": numpy.float32(1), "b": "x"}),
            Grade("ok", 0.5, None, {"a": 1.0}),
        ),
        (lambda text: Grade("timeout", 5), Grade("timeout", 0.0)),
        (lambda text: {"\ud800": 1, "x": 2}, Grade("ok", 3.0, None, {"\\ud800": 1.0, "x": 2.0})),
        (
            lambda text: raises(ValueError("\ud800")),
            Grade("error", None, "the reward function raised ValueError: \\ud800"),
        ),
        (lambda text: raises(Unspeakable()), Grade("error", None, "the reward function raised Unspeakable")),
    ],
)
def test_whatever_a_function_says_can_be_sent(function, sent):
    said = grade_by(function)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Grade) == said == sent


def test_a_signature_that_nobody_can_call_is_refused():
    with pytest.raises(ValueError, match=r"f\(text, data\), TRL's .* or verl's .*, got \(\)"):
        caller(lambda: 1)
    with pytest.raises(ValueError, match=r"got \(prompt, text, data\)"):
        caller(lambda prompt, text, data: 1)
    with pytest.raises(ValueError, match=r"got \(text, \*, data\)"):
        caller(lambda text, *, data: 1)


@pytest.mark.parametrize("place", ["json", "json:", "no.such.module:f", "json:no_such", "json:__doc__"])
def test_a_place_without_a_function_is_refused(place):
    with pytest.raises(ValueError, match="function"):
        load(place)


@pytest.mark.parametrize(
    ("reward", "text", "data", "wanted"),
    [
        (exact, " 42\n", {"answer": 42}, 1),
        (exact, "41", "42", 0),
        (regex, "answer: 42.", {"pattern": r"answer: (?P<answer>\d+)", "answer": "42"}, 1),
        (regex, "answer: 41.", {"pattern": r"answer: (?P<answer>\d+)", "answer": "42"}, 0),
        (regex, "nothing", {"pattern": "answer"}, 0),
    ],
)
def test_built_in_rewards(reward, text, data, wanted):
    assert reward(text, data) == wanted


@pytest.mark.parametrize("reward", [exact, regex])
def test_built_in_rewards_say_what_the_data_lacks(reward):
    assert 'needs "data"' in grade_by(reward, data=None).reason


@pytest.mark.parametrize(
    ("text", "answer", "wanted"),
    [
        ("So it is \\boxed{\\frac{1}{2}}.", "0.5", 1),
        ("I get $x^2 + 2x + 1$", "$(x+1)^2$", 1),
        ("\\boxed{41}", 42, 0),
        ("\\boxed{0.00001}", 0.00001, 1),
        ("\\boxed{100000000000000000}", 1e17, 1),
        ("no number at all", "42", 0),
    ],
)
def test_math_compares_what_is_meant(text, answer, wanted):
    said = grade_by(math, text, {"answer": answer})
    assert (said.status, said.reward) == ("ok", wanted)


@pytest.mark.parametrize("reward", [exact, math])
def test_an_object_that_was_sent_as_a_text_is_no_answer(reward):
    assert 'needs "data": {"answer": "…"}' in grade_by(reward, "42", '{"answer": "42"}').reason


def test_an_answer_may_be_json():
    assert grade_by(exact, '{"x": 1}', {"answer": '{"x": 1}'}).reward == 1


def test_math_says_when_the_answer_of_the_data_is_none():
    assert "finds no answer in ''" in grade_by(math, data="").reason

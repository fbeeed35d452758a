"""Problems are reproducible and different, and the checker judges answers the way people would."""

import re

import pytest

from benchmarks.tasks import EARLY, FAMILIES, Problem, check, is_in_form, make_problems


def test_the_same_seed_asks_the_same_questions_and_another_others():
    assert make_problems(50, seed=3) == make_problems(50, seed=3)
    assert make_problems(50, seed=3) != make_problems(50, seed=4)
    assert make_problems(20, seed=3) == make_problems(50, seed=3)[:20]


def test_ids_and_questions_differ_and_families_take_turns():
    problems = make_problems(3000, seed=1)
    assert len({problem.id for problem in problems}) == 3000
    assert len({problem.messages[-1]["content"] for problem in problems}) == 3000
    assert [problem.family for problem in problems[: len(EARLY)]] == list(EARLY)


def solve(family, question):
    """The answer from the numbers in the question, in the order in which they stand there."""
    numbers = [int(digits) for digits in re.findall(r"\d+", question)]
    if family == "arithmetic":
        return eval(re.search(r"\d+ [-+*] \d+", question)[0])
    return {
        "word_sum": lambda a, b, c: a + b + c,
        "left": lambda total, each, friends: total - each * friends,
        "more": lambda num, each, others: num * each + others,
        "twice": lambda num: num + 2 * num,
        "two_goods": lambda num, price, num_books, book_price: num * price + num_books * book_price,
    }[family](*numbers)


@pytest.mark.parametrize("family", FAMILIES)
def test_problems_can_be_sent_and_their_answer_is_that_of_the_question(family):
    for problem in make_problems(100, seed=7, families=[family]):
        assert problem.family == family
        roles = [message["role"] for message in problem.messages]
        assert roles in (["user"], ["user", "assistant", "user", "assistant", "user"])
        assert "Answer: <number>" in problem.messages[-1]["content"]
        assert solve(family, problem.messages[-1]["content"]) == problem.answer >= 0
        assert check(problem, f"1 + 1\nSo it is.\nAnswer: {problem.answer}")
        assert not check(problem, f"1 + 1\nSo it is.\nAnswer: {problem.answer + 1}")


def test_the_worked_examples_are_right_and_in_form():
    problem = make_problems(1, seed=0, families=["left"])[0]
    answers = [message["content"] for message in problem.messages if message["role"] == "assistant"]
    assert len(answers) == 2
    for answer in answers:
        calculation, *sentences, last = answer.split("\n")
        assert last == f"Answer: {eval(calculation)}"
        assert is_in_form(answer)
        for sentence in sentences:
            left, right = re.search(r"(\d+ [-+*] \d+) = (\d+)", sentence).groups()
            assert eval(left) == int(right)


@pytest.mark.parametrize(("first_line", "in_form"), [
    ("35 - 4 * 5", True), ("(2 * 3) + 4 = 10", True), ("3 × 4 = $12", True),
    ("35 desks - 20", False), ("To find out, add 3 and 4.", False), ("***", False), ("", False),
])  # fmt: skip
def test_a_wrong_form_earns_nothing_where_a_form_is_asked_for(first_line, in_form):
    text = f"{first_line}\nIt is so.\nAnswer: 15"
    assert check(Problem("left-0", [], 15), text) is in_form
    assert check(Problem("arithmetic-0", [], 15), text)


@pytest.mark.parametrize(("text", "right"), [
    ("Answer: 1234", True), ("Answer: 1,234", True), ("Answer: 1234.0 apples", True), ("**Answer:** $1234", True),
    ("Answer: \\(\\boxed{1234}\\)", True), ("Answer: 1234 because 1200 + 34 makes it", True),
    ("Answer: 7\nNo, wait.\nAnswer: 1234", True), ("Answer: 1234\nNo, wait.\nAnswer: 7", False),
    ("First 7, then 1234", True), ("First 1234, then 7", False), ("1234\nAnswer: <number>", False),
    ("Answer: -1234", False), ("Answer: 12345", False), ("Answer: 1234.5", False), ("", False),
    ("I do not know.", False),
])  # fmt: skip
def test_check(text, right):
    assert check(Problem("arithmetic-0", [], 1234), text) is right


@pytest.mark.parametrize(
    ("num", "families", "message"),
    [
        (5, ["algebra"], r"families must be some of arithmetic, .*, got \['algebra'\]"),
        (5, [], "got none"),
        (10_000_000, ["twice"], "'twice' has no new question"),
    ],
)
def test_impossible_wishes_are_refused(num, families, message):
    with pytest.raises(ValueError, match=message):
        make_problems(num, seed=0, families=families)

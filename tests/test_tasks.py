"""Problems are reproducible and different, and the checker judges answers the way people would."""

import re

import pytest

from benchmarks.tasks import EARLY, FAMILIES, Problem, check, make_problems


def test_the_same_seed_asks_the_same_questions_and_another_others():
    assert make_problems(50, seed=3) == make_problems(50, seed=3)
    assert make_problems(50, seed=3) != make_problems(50, seed=4)
    assert make_problems(20, seed=3) == make_problems(50, seed=3)[:20]


def test_ids_and_questions_differ_and_families_take_turns():
    problems = make_problems(3000, seed=1)
    assert len({problem.id for problem in problems}) == 3000
    assert len({problem.messages[-1]["content"] for problem in problems}) == 3000
    assert [problem.family for problem in problems[: len(EARLY)]] == list(EARLY)


@pytest.mark.parametrize("family", FAMILIES)
def test_problems_can_be_sent_and_solved(family):
    for problem in make_problems(100, seed=7, families=[family]):
        assert problem.family == family
        roles = [message["role"] for message in problem.messages]
        assert roles in (["user"], ["user", "assistant", "user"])
        assert "Answer: <number>" in problem.messages[-1]["content"]
        assert problem.answer >= 0
        assert check(problem, f"So it is.\nAnswer: {problem.answer}")
        assert not check(problem, f"So it is.\nAnswer: {problem.answer + 1}")


def solve(family, question):
    """The answer from the numbers in the question, in the order in which they stand there."""
    numbers = [int(digits) for digits in re.findall(r"\d+", question)]
    if family == "arithmetic":
        return eval(re.search(r"\d+ [-+*] \d+", question)[0])
    return {
        "word_sum": lambda a, b, c: a + b + c,
        "left": lambda total, each, friends: total - each * friends,
        "boxes": lambda start, num, each: start + num * each,
        "change": lambda num, price, paid: paid - num * price,
        "twice": lambda num: num + 2 * num,
        "share": lambda total, friends, had: total // friends + had,
        "two_goods": lambda num, price, num_books, book_price: num * price + num_books * book_price,
    }[family](*numbers)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_is_that_of_the_question(family):
    for problem in make_problems(100, seed=8, families=[family]):
        assert solve(family, problem.messages[-1]["content"]) == problem.answer


def test_the_worked_example_is_right_and_no_problem_of_ours():
    *_, example, _ = make_problems(1, seed=0, families=["left"])[0].messages
    calculation, *sentences, last = example["content"].split("\n")
    assert last == f"Answer: {eval(calculation)}"
    for sentence in sentences:
        left, right = re.search(r"(\d+ [-+*] \d+) = (\d+)", sentence).groups()
        assert eval(left) == int(right)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Answer: 1234", True),
        ("Answer: 1,234", True),
        ("Answer: 1234.0 apples", True),
        ("Answer: \\(\\boxed{1234}\\)", True),
        ("**Answer:** $1234", True),
        ("Answer: 7\nNo, wait.\nAnswer: 1234", True),
        ("Answer: 1234\nNo, wait.\nAnswer: 7", False),
        ("Answer: 1234 because 1200 + 34 makes it", True),
        ("First 7, then 1234", True),
        ("First 1234, then 7", False),
        ("1234\nAnswer: <number>", False),
        ("Answer: -1234", False),
        ("Answer: 12345", False),
        ("Answer: 1234.5", False),
        ("", False),
        ("I do not know.", False),
    ],
)
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

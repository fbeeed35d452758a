"""Prompts with checkable answers that a 0.5B model gets partly right, and their checker.

There are two sets. EARLY: stories that two or three small operations solve. Two worked examples ask for a form: the
whole calculation in the first line, without words. An answer is correct if form and result are right, as in recipes
that train reasoning. A wrong plan or a wrong form shows in the first dozen tokens. PLAIN: one or two additions,
subtractions or multiplications in any form. Mistakes may come at any point.

Invariant: the problems are a function of (num, seed, families); two problems of one call never ask the same question.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

THINK = " Think step by step, then end with 'Answer: <number>'."
CALCULATE = (
    " Write the whole calculation in the first line, with numbers and signs only."
    " Then explain each step in two full sentences. End with 'Answer: <number>'."
)
EXAMPLES = (
    (
        "A baker fills 4 trays with 6 rolls each and has 3 more rolls. How many rolls are there?",
        (
            "4 * 6 + 3\n"
            "The baker fills 4 trays with 6 rolls each. "
            "When all of the trays are counted together, they hold 4 * 6 = 24 rolls.\n"
            "The baker also has 3 more rolls that are on no tray. "
            "With these there are 24 + 3 = 27 rolls in the bakery.\n"
            "Answer: 27"
        ),
    ),
    (
        "A school has 35 desks and puts 4 desks into each of 5 rooms. How many desks are not in a room?",
        (
            "35 - 4 * 5\n"
            "The school puts 4 desks into each of 5 rooms. "
            "When all of the rooms are counted together, they hold 4 * 5 = 20 desks.\n"
            "The school has 35 desks, and 20 of them are in a room now. "
            "That leaves 35 - 20 = 15 desks that are not in a room.\n"
            "Answer: 15"
        ),
    ),
)
ROLES = ("user", "assistant")
NAMES = ("Tom", "Ann", "Ben", "Eva", "Sam", "Lea")
THINGS = ("apples", "books", "coins", "cards", "stamps", "shells")
GOODS = ("pens", "cakes", "balls", "cups")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Question(NamedTuple):
    text: str
    answer: int
    examples: tuple[tuple[str, str], ...] = ()
    """Worked questions with their answers, put before the question."""


class Problem(NamedTuple):
    """One prompt whose answers `check` can judge."""

    id: str
    """Family and number, such as "left-12"; unique within one call of `make_problems`."""
    messages: list[dict[str, Any]]
    answer: int

    @property
    def family(self) -> str:
        return self.id.rpartition("-")[0]


def arithmetic(generator: random.Random) -> Question:
    """One operation on two numbers below 100."""
    operator = generator.choice("+-*")
    if operator == "*":
        left, right = generator.randrange(3, 20), generator.randrange(3, 20)
        return Question(f"What is {left} * {right}?{THINK}", left * right)
    right, left = sorted(generator.randrange(10, 100) for _ in range(2))
    answer = left + right if operator == "+" else left - right
    return Question(f"What is {left} {operator} {right}?{THINK}", answer)


def word_sum(generator: random.Random) -> Question:
    """The sum of three numbers, as a story."""
    numbers = [generator.randrange(5, 60) for _ in range(3)]
    story = f"Tom has {numbers[0]} apples, buys {numbers[1]} and then {numbers[2]} more."
    return Question(f"{story} How many apples does he have now?{THINK}", sum(numbers))


def story(text: str, answer: int) -> Question:
    return Question(text + CALCULATE, answer, EXAMPLES)


def left(generator: random.Random) -> Question:
    name, things = generator.choice(NAMES), generator.choice(THINGS)
    friends, each = generator.randrange(2, 6), generator.randrange(2, 7)
    total = generator.randrange(friends * each + 3, friends * each + 30)
    text = f"{name} has {total} {things} and gives {each} {things} to each of {friends} friends."
    return story(f"{text} How many {things} are left?", total - friends * each)


def more(generator: random.Random) -> Question:
    name, things = generator.choice(NAMES), generator.choice(THINGS)
    num, each, others = generator.randrange(2, 7), generator.randrange(3, 9), generator.randrange(2, 10)
    text = f"{name} fills {num} boxes with {each} {things} each and has {others} more {things}."
    return story(f"{text} How many {things} are there?", num * each + others)


def twice(generator: random.Random) -> Question:
    first, second = generator.sample(NAMES, 2)
    things, num = generator.choice(THINGS), generator.randrange(4, 20)
    text = f"{first} has {num} {things} and {second} has twice as many."
    return story(f"{text} How many {things} do they have together?", 3 * num)


def two_goods(generator: random.Random) -> Question:
    name, goods = generator.choice(NAMES), generator.choice(GOODS)
    num, num_books = generator.randrange(2, 6), generator.randrange(2, 6)
    price, book_price = generator.randrange(2, 8), generator.randrange(2, 8)
    text = f"{name} buys {num} {goods} for {price} dollars each and {num_books} books for {book_price} dollars each."
    return story(f"{text} How many dollars does {name} pay?", num * price + num_books * book_price)


EARLY = ("left", "more", "twice", "two_goods")
PLAIN = ("arithmetic", "word_sum")
FAMILIES: dict[str, Callable[[random.Random], Question]] = {
    family.__name__: family for family in (arithmetic, word_sum, left, more, twice, two_goods)
}


def make_problems(num: int, seed: int, families: Sequence[str] = EARLY) -> list[Problem]:
    """`num` different problems, the families in turn.

    Raises: ValueError for an unknown family, or if the families cannot ask that many different questions.
    """
    unknown = [name for name in families if name not in FAMILIES]
    if unknown or not families:
        raise ValueError(f"families must be some of {', '.join(FAMILIES)}, got {unknown or 'none'}")
    generator = random.Random(seed)
    problems: list[Problem] = []
    asked: set[str] = set()
    while len(problems) < num:
        name = families[len(problems) % len(families)]
        for _ in range(1000):
            question = FAMILIES[name](generator)
            if question.text not in asked:
                break
        else:
            raise ValueError(f"num must be smaller: after {len(problems)} problems {name!r} has no new question")
        asked.add(question.text)
        turns = [(example + CALCULATE, answer) for example, answer in question.examples]
        messages = [{"role": role, "content": text} for turn in turns for role, text in zip(ROLES, turn, strict=True)]
        messages.append({"role": "user", "content": question.text})
        problems.append(Problem(f"{name}-{len(problems)}", messages, question.answer))
    return problems


def check(problem: Problem, text: str) -> bool:
    """True if the answer is right, and, for a family of EARLY, in the form asked for."""
    return is_right(problem, text) and (problem.family not in EARLY or is_in_form(text))


def is_right(problem: Problem, text: str) -> bool:
    """True if the first number after the last "Answer:" is right, or without that word the last number."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    _, marker, after = text.rpartition("Answer:")
    numbers = NUMBER.findall(after)
    return bool(numbers) and float(numbers[0] if marker else numbers[-1]) == problem.answer


def is_in_form(text: str) -> bool:
    """True if the first line is a calculation without words."""
    first_line = text.partition("\n")[0]
    return any(character.isdigit() for character in first_line) and not any(map(str.isalpha, first_line))

"""Problems, example thoughts with human mistakes, and rewards.

A problem is a chain of additions modulo 10, each step with a label (`? a 7 b 3 c 9 :` is 7 + 3 + 9). A thought works
through it, slips, checks itself, doubts, rambles, and begins again, so that lengths have a heavy tail:

    a 7 b 3 = 0 c 9 = 9 total 9 check a 7 b 3 = 1 hmm so c 9 = 0 total 0 differ a 7 b 3 = 0 c 9 = 9 total 9 same …

Each of `STYLES` relates length to being right in another way. Invariant: only the standard library is imported, because
`vllm-rollout serve` imports the rewards into processes of its own.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median_high
from typing import Any, NamedTuple

LABELS = "abcdefghijklm"
RAMBLE = ("hmm", "so", "let", "me", "think")
WORDS = ("check", "same", "differ", "wait", "total", "answer")
VOCABULARY = ("<pad>", "<bos>", "<eos>", "<unk>", *"0123456789", *"=?:", *LABELS, *WORDS, *RAMBLE)
MAX_THOUGHT = 950  # tokens; what would be longer is cut, and has no answer
LEAST_STEPS, MOST_STEPS = 3, 12


class Problem(NamedTuple):
    id: str
    text: str  # a chain in the words of VOCABULARY, or a user's message to a chat model
    data: dict[str, Any]  # what the reward function gets beside the answer's text
    difficulty: int


@dataclass(frozen=True, slots=True)
class Style:
    """Probabilities of a thought's mistakes. Entries of a tuple go from a clear thought to the most confused one."""

    slip: tuple[float, ...]  # chance that a step is off by one
    ramble: tuple[float, ...]  # chance of rambling before a step
    doubt: tuple[float, ...]  # chance to begin again after a pass that was not checked
    check: float  # chance that a pass is checked by another one; where they differ, a third follows, and so on
    confuses: float = 0.9  # chance that a doubt makes the thought more confused
    twice: float = 0.0  # chance that it writes each step twice, and slips a tenth as often
    is_lost: float = 0.0  # chance that it begins so: rambling and doubting at length for no reason


CLEAR = Style(slip=(0.0,), ramble=(0.0,), doubt=(0.0,), check=0.0)
RAMBLES, DOUBTS = (0.05, 0.14, 0.25, 0.40, 0.50), (0.22, 0.40, 0.55, 0.65, 0.70)
STYLES = {
    # long is wrong: with each doubt it slips more
    "careful": Style((0.14, 0.28, 0.38, 0.46, 0.50), RAMBLES, DOUBTS, check=0.1),
    # long is right: a thought that writes each step twice is nearly always right
    "thorough": Style((0.16,), (0.05,), (0.1,), check=0.0, twice=0.4),
    # length says nothing: some ramble and begin again for no reason, and slip as all do
    "even": Style((0.12,) * 5, RAMBLES, DOUBTS, check=0.0, is_lost=0.2),
}


def chain(chance: random.Random, id: str, steps: tuple[int, int] = (LEAST_STEPS, MOST_STEPS)) -> Problem:
    digits = [chance.randrange(10), *(chance.randrange(1, 10) for _ in range(chance.randint(*steps)))]
    text = " ".join(f"{label} {digit}" for label, digit in zip(LABELS, digits, strict=False))
    return Problem(id, f"? {text} :", {"answer": str(sum(digits) % 10)}, len(digits) - 1)


def digit_sum(chance: random.Random, id: str, digits: tuple[int, int] = (2, 4)) -> Problem:
    """The sum of the digits of a number, for a chat model. `digits`: least and most digits."""
    number = "".join(str(chance.randrange(10)) for _ in range(chance.randint(*digits)))
    text, answer = f"What is the sum of the digits of {number}?", str(sum(map(int, number)))
    return Problem(id, text, {"answer": answer}, len(number))


TASKS = {"chain": chain, "digit_sum": digit_sum}


def problems(task: str, name: str, count: int, first: int = 0) -> list[Problem]:
    """Problems `first` to `first + count - 1` of an endless list. A problem depends on task, name and place only."""
    return [TASKS[task](random.Random(f"{name}-{i}"), f"{name}-{i}") for i in range(first, first + count)]


def reward(text: str, data: dict[str, Any]) -> float:
    """1 if the text ends with `answer` and the right digit, else 0."""
    return float(text.split()[-2:] == ["answer", data["answer"]])


def digit_sum_reward(text: str, data: dict[str, Any]) -> float:
    """1 if the last number is right, else 0."""
    return float(re.findall(r"\d+", text)[-1:] == [data["answer"]])


def thought(problem: Problem, chance: random.Random, style: Style) -> list[str]:
    """An example thought about the problem, at most MAX_THOUGHT tokens."""
    worst = len(style.slip) - 1
    confusion = min(chance.randrange(1, 5), worst) if chance.random() < style.is_lost else 0
    times = 2 if style.twice and chance.random() < style.twice else 1
    _, *pairs, _ = problem.text.split()
    tokens: list[str] = []

    def work_through() -> int:
        value = int(pairs[1])
        tokens.extend(pairs[:2])
        for label, digit in zip(pairs[2::2], pairs[3::2], strict=True):
            if chance.random() < style.ramble[min(confusion, len(style.ramble) - 1)]:
                tokens.append(chance.choice(RAMBLE))
                while chance.random() < 0.7:
                    tokens.append(chance.choice(RAMBLE))
            value += int(digit)
            if chance.random() < style.slip[confusion] * (0.1 if times == 2 else 1):
                value += chance.choice((1, 9))
            value %= 10
            tokens.extend((label, digit, "=", str(value)) * times)
        tokens.extend(("total", str(value)))
        return value

    while len(tokens) < MAX_THOUGHT:
        value = work_through()
        is_sure = chance.random() >= style.doubt[min(confusion, len(style.doubt) - 1)]
        if chance.random() < style.check:
            tokens.append("check")
            before, value = value, work_through()
            while value != before and len(tokens) < MAX_THOUGHT:
                tokens.append("differ")
                confusion = min(confusion + (chance.random() < style.confuses), worst)
                before, value = value, work_through()
            tokens.append("same")
            is_sure = True
        if is_sure:
            return [*tokens, "answer", str(value), "<eos>"][:MAX_THOUGHT]
        tokens.append("wait")
        confusion = min(confusion + (chance.random() < style.confuses), worst)
    return tokens[:MAX_THOUGHT]


def mean(values: Sequence[float]) -> float | None:
    return round(fmean(values), 4) if values else None


def describe(answers: Sequence[tuple[Problem, int, float]]) -> dict[str, Any]:
    """Success and lengths of answers (problem, tokens, reward), and how success depends on length and difficulty.

    `quarters`: success by quarter of length *within each difficulty*, the shortest first: long chains take longer.
    """
    lengths, rewards = [n for _, n, _ in answers], [r for _, _, r in answers]
    quarters: list[list[float]] = [[], [], [], []]
    for difficulty in {problem.difficulty for problem, _, _ in answers}:
        alike = sorted([(n, r) for problem, n, r in answers if problem.difficulty == difficulty], key=lambda a: a[0])
        for place, (_, r) in enumerate(alike):
            quarters[4 * place // len(alike)].append(r)
    middle = median_high([problem.difficulty for problem, _, _ in answers])
    said: dict[str, Any] = {"success": mean(rewards), "length": mean(lengths)}
    said["easy"] = mean([r for problem, _, r in answers if problem.difficulty < middle])
    said["hard"] = mean([r for problem, _, r in answers if problem.difficulty >= middle])
    said |= {f"p{percent}": sorted(lengths)[len(lengths) * percent // 100] for percent in (50, 90, 99)}
    return {**said, "quarters": [mean(quarter) for quarter in quarters]}

"""`POST /v1/votes`: the answer of a group of candidates. Invariant: no pattern and no list holds up the server."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from http import HTTPStatus
from math import prod
from threading import BoundedSemaphore
from typing import Annotated, Literal

import regex
from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, model_validator

from vllm_rollout.kernel.http.body import Body
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.parts.pruning.rules.voting import AnsweredGroup, VotingMethod, accuracy_at_k, normalise_answer, vote

MAX_VOTES = 1024
"""Most candidates in one vote."""
MAX_ANSWER_CHARS = 4096
MAX_PATTERN_LENGTH = 512
MAX_WRITTEN_OUT = 20_000
"""Largest product of a pattern's length and its counted repeats. Compiling it takes some 20 ms, which hold up all
threads."""
COUNTED_REPEAT = regex.compile(r"\{[\s\d,]*\}")
"""Counted repeats: `{m}`, `{m,}`, `{,n}` and `{m,n}`."""
ESCAPED = regex.compile(r"\\[pP]\{\^?[\w :=-]*\}|\\N\{[\w -]*\}|\\.", regex.DOTALL)
REFUSED = {
    "fuzzy counts ({e<=2})": regex.compile(r"\{[\d<=]*[deis][<,:+}]"),
    "recursion ((?R), (?1), (?&name))": regex.compile(r"\(\?(?:R|&|P[>&]|[+-]?\d)"),
    "the flag x": regex.compile(r"\(\?[a-zA-Z01-]*x"),
}
"""Syntax that is refused. Fuzzy counts and recursion pass over the time limit, or take all memory. With the flag x,
spaces and comments could hide them."""
SEARCH_LENGTH = 4096
"""Characters at the end of a text that are searched, since answers stand at the end."""
MAX_PATTERN_TIME_S = 5.0
"""Seconds of searching for all texts of a request together. Patterns come from users, and `(a+)+$` could take for
ever."""
NUM_THREADS = 2
"""Searches release the interpreter's lock, so each thread uses a core."""
MAX_REQUESTS = 32
"""Most votes that are counted or wait. The last one waits for 80 s at most."""
RETRY_AFTER_S = 5
NUM_DRAWS = 1000
"""Most subsets of size k that are drawn. Fewer if more than MAX_DRAWN candidates would be drawn in all."""
MAX_DRAWN = 256_000


class VoteRequest(Body):
    """The candidates of one prompt: their answers, or their texts and a pattern that finds the answers."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "texts": ["… so it is 42", "… 41", "… 42"],
                    "answer_pattern": r"(\d+)",
                    "method": "quality",
                    "weights": [0.7, -1.2, 0.1],
                }
            ]
        }
    )

    answers: (
        Annotated[
            list[Annotated[StrictStr, Field(max_length=MAX_ANSWER_CHARS)] | None],
            Field(min_length=1, max_length=MAX_VOTES, fail_fast=True),
        ]
        | None
    ) = Field(
        default=None,
        description=f"From 1 to {MAX_VOTES} answers of at most {MAX_ANSWER_CHARS} characters, one per candidate. "
        "null abstains.",
    )
    texts: Annotated[list[StrictStr | None], Field(min_length=1, max_length=MAX_VOTES, fail_fast=True)] | None = Field(
        default=None,
        description=f"From 1 to {MAX_VOTES} texts in place of answers, with answer_pattern. null abstains.",
    )
    answer_pattern: Annotated[StrictStr, Field(min_length=1, max_length=MAX_PATTERN_LENGTH)] | None = Field(
        default=None,
        description=r"A regular expression such as `Answer:\s*(\S+)`, at most "
        f"{MAX_PATTERN_LENGTH} characters, without fuzzy counts, recursion and the flag x. The answer is its last "
        f"match within a text's last {SEARCH_LENGTH} characters: the first group of the match, or the whole match. "
        "Blank matches are passed over.",
    )
    method: VotingMethod = Field(
        default="majority",
        description='"majority": each answer has one vote. "confidence": the weights as given. "quality": ranks of '
        "the weights, divided by the best rank.",
    )
    weights: Annotated[list[StrictFloat | None], Field(min_length=1, max_length=MAX_VOTES, fail_fast=True)] | None = (
        Field(
            default=None,
            description="One finite number per candidate: mean_confidence for confidence, score or final_score for "
            "quality. null abstains. Majority ignores weights.",
        )
    )
    correct: Annotated[StrictStr, Field(min_length=1, max_length=MAX_ANSWER_CHARS)] | None = Field(
        default=None, description="The right answer. With it the response says if the vote found the right answer."
    )
    k: Annotated[StrictInt, Field(ge=1, le=MAX_VOTES)] | None = Field(
        default=None,
        description="With correct: compute maj@k, the probability that a vote of k of these candidates is right. At "
        "most the number of candidates.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> VoteRequest:
        if (self.answers is None) == (self.texts is None):
            got = "neither" if self.answers is None else "both"
            raise ValueError(f"give exactly one of answers, texts, got {got}")
        if self.texts is not None and self.answer_pattern is None:
            raise ValueError("answer_pattern: is needed with texts, to find the answer. Or send answers.")
        if self.texts is None and self.answer_pattern is not None:
            raise ValueError("answer_pattern: only applies to texts, got answers. Leave it out.")
        num_votes = len(self.answers or self.texts or ())
        if self.method != "majority" and self.weights is None:
            raise ValueError(f"weights: are needed with method {self.method}. Give one per candidate, or use majority.")
        if self.weights is not None and len(self.weights) != num_votes:
            raise ValueError(f"weights: must be as many as candidates ({num_votes}), got {len(self.weights)}.")
        if self.k is not None and self.correct is None:
            raise ValueError("k: needs correct, the right answer. Give it, or leave k out.")
        if self.k is not None and self.k > num_votes:
            raise ValueError(f"k: must be at most the number of candidates ({num_votes}), got {self.k}.")
        return self


class AccuracyAnswer(BaseModel):
    k: int
    accuracy: float
    """Share of subsets of k candidates whose vote is right."""
    is_exact: bool
    """True if every subset was counted. False if subsets were drawn."""


class VoteAnswer(BaseModel):
    object: Literal["vote"] = "vote"
    method: VotingMethod
    winner: str | None
    """Null if no candidate voted."""
    share: float
    """The winner's share of all weight."""
    tally: dict[str, float]
    """Weight of each answer, heaviest first."""
    answers: list[str | None]
    """Normalised answer of each candidate. Null: the candidate abstained."""
    num_votes: int
    num_abstained: int
    num_without_weight: int
    is_correct: bool | None = None
    maj_at_k: AccuracyAnswer | None = None


class VoteCounter:
    """Counts votes on its own threads, so that slow patterns delay nothing but votes."""

    def __init__(self, num_threads: int = NUM_THREADS, max_requests: int = MAX_REQUESTS) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="vllm_rollout-votes")
        self._places = BoundedSemaphore(max_requests)
        self._max_requests = max_requests

    async def count(self, request: VoteRequest) -> VoteAnswer:
        """Count a vote. Raises: RequestError for a pattern or a weight that cannot be used, and (429) when too many
        wait."""
        if not self._places.acquire(blocking=False):
            raise RequestError(
                f"{self._max_requests} votes are being counted or wait for it, as many as there may be at once. Try "
                "again, or send answers in place of texts: finding them takes the time.",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                retry_after_s=RETRY_AFTER_S,
            )
        job = self._threads.submit(_count_votes, request)
        # A search that has begun goes on without its client: its place is free when its thread is.
        job.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(job)


counter = VoteCounter()


def _count_votes(request: VoteRequest) -> VoteAnswer:
    answers = _answers(request)
    try:
        result = vote(answers, request.method, request.weights)
    except ValueError as error:
        raise RequestError(str(error), param="weights") from error
    correct = normalise_answer(request.correct)
    if request.correct is not None and correct is None:
        raise RequestError("correct: must not be blank. Give the right answer, or leave it out.", param="correct")
    return VoteAnswer(
        method=request.method,
        answers=[normalise_answer(answer) for answer in answers],
        is_correct=None if correct is None else result.winner == correct,
        maj_at_k=None if correct is None or request.k is None else _accuracy(request, answers, correct, request.k),
        **asdict(result),
    )


def _accuracy(request: VoteRequest, answers: list[str | None], correct: str, k: int) -> AccuracyAnswer:
    group = AnsweredGroup("group", answers, correct, request.weights)
    num_draws = max(1, min(NUM_DRAWS, MAX_DRAWN // len(answers)))
    result = accuracy_at_k([group], k, request.method, num_draws)
    return AccuracyAnswer(k=k, accuracy=result.accuracy, is_exact=result.num_exact == 1)


def _answers(request: VoteRequest) -> list[str | None]:
    """Answers of the candidates, found in their texts if these were sent. Raises: RequestError for a pattern that is
    invalid or too slow."""
    if request.answers is not None:
        return list(request.answers)
    deadline = time.monotonic() + MAX_PATTERN_TIME_S
    source = request.answer_pattern or ""
    _check_syntax(source)
    try:
        pattern = regex.compile(source)
        return [None if text is None else last_answer(pattern, text, deadline) for text in request.texts or ()]
    except regex.error as error:
        message = f"answer_pattern: is no regular expression ({error}), got {request.answer_pattern!r:.80}."
        raise RequestError(message, param="answer_pattern") from error
    except TimeoutError as error:
        message = (
            f"answer_pattern: takes more than {MAX_PATTERN_TIME_S} s for {len(request.texts or ())} texts. Begin it "
            "with a literal, or have fewer choices and nested repeats."
        )
        raise RequestError(message, param="answer_pattern") from error


def _check_syntax(source: str) -> None:
    """Raises: RequestError for a pattern that the time limit of searches does not bound."""
    unescaped = ESCAPED.sub(".", source)
    for name, syntax in REFUSED.items():
        if syntax.search(unescaped):
            message = f"answer_pattern: must be without {name}, got {source!r:.80}. Use groups, choices, * and +."
            raise RequestError(message, param="answer_pattern")
    # Nested counts are written out when a pattern is compiled, which no time limit ends.
    bounds = [max(map(int, regex.findall(r"\d+", repeat)), default=1) for repeat in COUNTED_REPEAT.findall(source)]
    num_repeats = prod(max(1, bound) for bound in bounds)
    if bounds and num_repeats * len(source) > MAX_WRITTEN_OUT:
        message = (
            f"answer_pattern: its counted repeats multiply to {num_repeats}, at most {MAX_WRITTEN_OUT // len(source)} "
            f"are allowed in {len(source)} characters. Use * or + in their place."
        )
        raise RequestError(message, param="answer_pattern")


def last_answer(pattern: regex.Pattern[str], text: str, deadline: float) -> str | None:
    """The last match that is not blank: its first group that took part, or the whole match of a pattern without
    groups.

    `deadline`: by the monotonic clock. Raises: TimeoutError.
    """
    answer = None
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    # concurrent: the search lets go of the interpreter's lock, so the event loop is not held up.
    for match in pattern.finditer(text[-SEARCH_LENGTH:], concurrent=True, timeout=remaining_s):
        captured = next((group for group in match.groups() if group is not None), None) if pattern.groups else match[0]
        if captured and captured.strip():
            answer = captured
    return answer

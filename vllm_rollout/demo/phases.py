"""The two phases of the demo on one server, stock and race, with their progress on the terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Literal, NamedTuple, Protocol, TypeVar

import httpx
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from vllm_rollout import AsyncRolloutClient, RolloutError
from vllm_rollout.demo.clock import Clock, shown
from vllm_rollout.demo.options import SEED, Options
from vllm_rollout.kernel.http.answers import CandidateEvent, GroupEvent, TrajectoryEvent
from vllm_rollout.kernel.rules.prompt_key import seed_for
from vllm_rollout.process import (
    GENERATION_TOKENS,
    POLL_INTERVAL_S,
    REQUESTS_RUNNING,
    ServerError,
    ServerProcess,
    counter,
)


class RacedCandidate(NamedTuple):
    """A candidate of a phase: one bar of the picture."""

    index: int
    num_tokens: int
    state: Literal["kept", "unused", "surplus"]
    """`kept`: in the returned group. `unused`: ended by itself or at the cap, but not needed. `surplus`: stopped."""
    token_ids: tuple[int, ...] = ()
    """Tokens of a kept candidate. Empty for others."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Result of one way to run the prompts."""

    name: str
    seconds: float
    groups: list[list[RacedCandidate]]
    """Candidates by prompt, in the order of the prompts, ascending by index."""

    @property
    def generated_tokens(self) -> int:
        return sum(candidate.num_tokens for group in self.groups for candidate in group)

    @property
    def returned_tokens(self) -> int:
        return sum(c.num_tokens for group in self.groups for c in group if c.state == "kept")

    @property
    def wasted_tokens(self) -> int:
        return self.generated_tokens - self.returned_tokens

    @property
    def kept(self) -> set[tuple[int, int, tuple[int, ...]]]:
        """(position of the prompt, index, tokens) of all returned candidates."""
        return {
            (position, candidate.index, candidate.token_ids)
            for position, group in enumerate(self.groups)
            for candidate in group
            if candidate.state == "kept"
        }


def first_finished(answers: Sequence[Sequence[int]], reasons: Sequence[str], group_size: int) -> list[RacedCandidate]:
    """Candidates that a trainer keeps of a full answer: the first to end by themselves, then those cut at the cap.

    `answers` are token ids. Candidates of a prompt decode in step, so the shortest ends first.
    """
    order = sorted(range(len(answers)), key=lambda i: (reasons[i] != "stop", len(answers[i]), i))
    kept = set(order[:group_size])
    return [
        RacedCandidate(i, len(answer), "kept", tuple(answer)) if i in kept else RacedCandidate(i, len(answer), "unused")
        for i, answer in enumerate(answers)
    ]


async def run_stock(client: httpx.AsyncClient, options: Options, on_group: Callable[[], None]) -> Phase:
    """Send one untagged chat request with n candidates per prompt, all at once. Each waits for its slowest
    candidate."""

    async def ask(position: int, question: str) -> list[RacedCandidate]:
        seed = seed_for(SEED, str(position))  # as a rollout samples it
        body = {"messages": [{"role": "user", "content": question}], "n": options.candidates, "return_token_ids": True}
        response = await client.post("/v1/chat/completions", json=body | options.sampling | {"seed": seed})
        raise_for_status(response)
        on_group()
        choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
        answers = [choice["token_ids"] for choice in choices]
        return first_finished(answers, [choice["finish_reason"] for choice in choices], options.group_size)

    started = time.monotonic()
    groups = await asyncio.gather(*map(ask, count(), options.questions))
    return Phase("stock vLLM", time.monotonic() - started, groups)


async def run_race(client: AsyncRolloutClient, options: Options, on_group: Callable[[], None]) -> Phase:
    """Send one rollout for all prompts. Events report when a group is over. Raises: ServerError with the server's
    words."""
    prompts = [
        {"id": str(i), "messages": [{"role": "user", "content": question}]}
        for i, question in enumerate(options.questions)
    ]
    groups: list[list[RacedCandidate]] = [[] for _ in options.questions]
    started = time.monotonic()
    events = client.stream(
        prompts,
        options.group_size,
        options.candidates - options.group_size,
        sampling_params=options.sampling,
        include=[],
    )
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TrajectoryEvent):
                    kept = event.trajectory
                    candidate = RacedCandidate(kept.index, kept.num_tokens, "kept", tuple(kept.token_ids))
                    groups[int(event.prompt_id)].append(candidate)
                elif isinstance(event, CandidateEvent):
                    other = event.candidate
                    # A candidate that reaches the cap as its group is completed is surplus, but saves nothing.
                    stopped = other.state == "surplus" and other.num_tokens < options.max_tokens
                    state = "surplus" if stopped else "unused"
                    groups[int(event.prompt_id)].append(RacedCandidate(other.index, other.num_tokens, state))
                elif isinstance(event, GroupEvent):
                    on_group()
    except RolloutError as error:
        if error.status is None:  # an error of the connection, which the server's log explains
            raise
        raise ServerError(error.message) from error
    return Phase("vllm-rollout", time.monotonic() - started, [sorted(group) for group in groups])


def raise_for_status(response: httpx.Response) -> None:
    if response.status_code != 200:
        raise ServerError(f"{response.request.url.path} answered {response.status_code}: {response.text[:500]}")


class HasTokens(Protocol):
    @property
    def generated_tokens(self) -> int: ...


PhaseType = TypeVar("PhaseType", bound=HasTokens)
Way = Callable[[httpx.AsyncClient, AsyncRolloutClient, Callable[[], None]], Awaitable[PhaseType]]
"""Runs the prompts by one of the clients. Calls its last argument when a group is over."""
Begin = Callable[[AsyncRolloutClient, Clock], Awaitable[Mapping[str, float]]]
"""Runs before the ways. Returns the expected seconds of each way by its name."""
POLLS_PER_LINE = 60
"""Polls between two lines of output that is no terminal: half a minute."""


async def show_phase(
    run: Callable[[Callable[[], None]], Awaitable[PhaseType]],
    client: httpx.AsyncClient,
    server: ServerProcess,
    progress: Progress,
    row: TaskID,
    clock: Clock,
) -> PhaseType:
    """Run a phase while its row of `progress` follows the server's counters. Without a terminal, lines report progress.

    Raises: ServerError if the server dies meanwhile.
    """
    shown_row = progress.tasks[row]

    def say(text: str) -> None:
        if not clock.console.is_terminal:
            clock.say(f"{shown_row.description}: {text}")

    async def follow() -> None:
        before = None
        for poll in count(1):
            server.check_alive()
            metrics = (await client.get("/metrics")).text
            tokens = counter(metrics, GENERATION_TOKENS)
            before = tokens if before is None else before
            running = counter(metrics, REQUESTS_RUNNING)
            progress.update(row, tokens=f"{tokens - before:,.0f} tokens", running=f"{running:.0f} running")
            if poll % POLLS_PER_LINE == 0:
                say(f"{shown_row.completed:.0f} of {shown_row.total} groups, {shown_row.fields['tokens']}")
            await asyncio.sleep(POLL_INTERVAL_S)

    say("starts")
    progress.start_task(row)
    working = asyncio.ensure_future(run(lambda: progress.advance(row)))
    following = asyncio.create_task(follow())
    try:
        await asyncio.wait([working, following], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            following.result()  # it ends only by raising
        phase = working.result()
    finally:
        for task in (working, following):
            task.cancel()
        await asyncio.gather(working, following, return_exceptions=True)
    progress.update(row, tokens=f"{phase.generated_tokens:,} tokens", running="done")
    progress.stop_task(row)
    say(f"done after {shown(shown_row.elapsed or 0)}, {phase.generated_tokens:,} tokens")
    return phase


async def run_phases(
    server: ServerProcess,
    clock: Clock,
    questions: Sequence[str],
    ways: Mapping[str, Way[PhaseType]],
    begin: Begin,
) -> list[PhaseType]:
    """Run the questions in each way, one after the other. `ways`: by name on the terminal."""
    progress = Progress(
        SpinnerColumn(finished_text="[green]✔[/]"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f} groups"),
        TextColumn("[cyan]{task.fields[tokens]}[/]", justify="right"),
        TextColumn("[dim]{task.fields[running]}[/]", justify="right"),
        TimeElapsedColumn(),
        console=clock.console,
        disable=not clock.console.is_terminal,
    )
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=None, trust_env=False) as client,
        # With its own transport the client uses no proxy for a server on this machine.
        AsyncRolloutClient(server.url, transport=httpx.AsyncHTTPTransport()) as rollouts,
    ):
        await warm_up(client, questions)
        expected = await begin(rollouts, clock)
        rows = [
            progress.add_task(
                f"{name} (about {shown(expected[name])})" if name in expected else name,
                total=len(questions), start=False, tokens="", running="",
            )
            for name in ways
        ]  # fmt: skip
        with progress:
            return [
                await show_phase(partial(way, client, rollouts), client, server, progress, row, clock)
                for way, row in zip(ways.values(), rows, strict=True)
            ]


async def warm_up(client: httpx.AsyncClient, questions: Sequence[str]) -> None:
    """Send every prompt once for a single token, so that both phases find an equal prefix cache and a warm server."""
    for question in questions:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 1}
        raise_for_status(await client.post("/v1/chat/completions", json=body))


def compare_kept(stock: Phase, race: Phase) -> str:
    """Sentence on the trajectories that stock and race both returned."""
    same, total = len(stock.kept & race.kept), len(race.kept)
    if same == total:
        return f"All {total} returned trajectories are the same in both, token for token."
    return (
        f"{same} of {total} returned trajectories are the same in both, token for token; the others part ways because "
        "batches of different sizes round differently."
    )

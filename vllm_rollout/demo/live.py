"""First result of the demo: one racing prompt, with a bar for each candidate while it grows."""

from __future__ import annotations

import time
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table

from vllm_rollout import AsyncRolloutClient
from vllm_rollout.demo.options import SEED, Options
from vllm_rollout.kernel.http.answers import CandidateEvent, TokensEvent, TrajectoryEvent

QUESTION = "What is 17 + 25? Show your reasoning."
STREAM_TOKENS = 4
REFRESHES_PER_S = 4
BAR_WIDTH = 48
STATE_STYLES = {"runs": "cyan", "finished": "green", "stopped": "yellow"}


@dataclass
class LiveRace:
    """Candidates of one prompt, as reported by events. `lengths` and `states` are by index."""

    num_candidates: int
    group_size: int
    lengths: list[int] = field(init=False)
    """Output tokens of each candidate."""
    states: list[str] = field(init=False)
    """State of each candidate, a key of STATE_STYLES."""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.lengths = [0] * self.num_candidates
        self.states = ["runs"] * self.num_candidates

    def see(self, event: object) -> None:
        """Update from one event of the rollout."""
        if isinstance(event, TokensEvent):
            self.lengths[event.index] = event.offset + len(event.token_ids)
        elif isinstance(event, TrajectoryEvent):
            self._end(event.trajectory.index, event.trajectory.num_tokens, "finished")
        elif isinstance(event, CandidateEvent):
            self._end(event.candidate.index, event.candidate.num_tokens, "stopped")

    def _end(self, index: int, num_tokens: int, state: str) -> None:
        self.lengths[index] = num_tokens
        self.states[index] = state

    @property
    def tokens_per_s(self) -> float:
        return sum(self.lengths) / self.seconds

    @property
    def summary(self) -> str:
        finished, stopped = (self.states.count(state) for state in ("finished", "stopped"))
        return (
            f"{finished} of {self.num_candidates} candidates finished after {self.seconds:.1f} s, the other {stopped} "
            f"were stopped in that step, after at most {max(self.lengths)} tokens"
        )

    @property
    def picture(self) -> Table:
        """A bar for each candidate, as long as its tokens."""
        num_finished = self.states.count("finished")
        title = f"{QUESTION}  {num_finished} of {self.group_size} have finished"
        shown = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
        longest = max(1, *self.lengths)
        for length, state in zip(self.lengths, self.states, strict=True):
            bar = f"[{STATE_STYLES[state]}]{'█' * round(BAR_WIDTH * length / longest)}[/]"
            shown.add_row(f"{length} tokens", bar, state)
        return shown


async def race_live(client: AsyncRolloutClient, options: Options, console: Console) -> LiveRace:
    """Race one prompt and draw it: live on a terminal, else once at its end. Raises: RolloutError."""
    race = LiveRace(options.candidates, options.group_size)
    events = client.stream(
        [[{"role": "user", "content": QUESTION}]],
        options.group_size,
        options.candidates - options.group_size,
        stream_tokens=STREAM_TOKENS,
        sampling_params={**options.sampling, "seed": SEED},
        include=[],
    )
    started = time.monotonic()
    drawn = Live(console=console, refresh_per_second=REFRESHES_PER_S, get_renderable=lambda: race.picture)
    with drawn if console.is_terminal else nullcontext():
        async with aclosing(events):
            async for event in events:
                race.see(event)
                race.seconds = time.monotonic() - started
    if not console.is_terminal:
        console.print(race.picture)
    return race

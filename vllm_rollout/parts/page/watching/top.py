"""View of a server in a terminal: ranks, rollouts, groups whose candidates grow, and groups of sessions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vllm_rollout.kernel.client.connection import EventLines, RolloutError

BLOCKS = "▁▂▃▄▅▆▇█"
STYLES = {
    "running": "cyan", "turn": "cyan", "between_turns": "white", "stop": "green", "finished": "green",
    "length": "yellow", "truncated": "yellow", "surplus": "bright_black", "pruned": "magenta", "deferred": "blue",
    "failed": "red", "void": "red",
}  # fmt: skip
WORDS = {
    "running": "run", "turn": "in a turn", "between_turns": "at tools", "stop": "done", "length": "cut",
    "truncated": "cut",
}  # fmt: skip
OF_SESSION = {"lengths": "num_tokens", "ends": "state", "rewards": "reward"}
MAX_NAME = 24
NOT_GROUPS = 8
"""Lines of a screen that show no groups."""


def feed(url: str, key: str | None) -> Iterator[tuple[str, Any]]:
    """Name and data of each event of a server. Raises: RolloutError."""
    if key is not None and not key.isascii():
        place = next(place for place, character in enumerate(key, 1) if not character.isascii())
        text = f"--api-key, or VLLM_API_KEY, must be ASCII characters. Character {place} is none. Correct the key."
        raise RolloutError(None, text, "BadKey")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = httpx.Timeout(10.0, read=60.0)
    name = ""
    try:
        with httpx.stream("GET", f"{url.rstrip('/')}/v1/rollouts/watch", headers=headers, timeout=timeout) as answer:
            if not answer.is_success:
                raise RolloutError(answer.status_code, _refusal(answer), "Refused")
            lines = EventLines()
            for chunk in answer.iter_bytes():
                for line in lines.feed(chunk):
                    if line.startswith(b"event: "):
                        name = line.removeprefix(b"event: ").decode()
                    elif line.startswith(b"data: "):
                        yield name, json.loads(line.removeprefix(b"data: "))
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise RolloutError(None, f"{url}: {error or type(error).__name__}", type(error).__name__) from error
    raise RolloutError(None, f"{url}: the server ended the feed", "FeedEnded")


def _refusal(answer: httpx.Response) -> str:
    remedy = {
        401: "The server asks for a key: --api-key, or VLLM_API_KEY.",
        404: "Is it a server of vllm-rollout, and not of an earlier version?",
    }
    return f"{answer.url} answers {answer.status_code}. {remedy.get(answer.status_code, '')}".rstrip()


class Screen:
    """State of a server from its events, and the drawing of it."""

    def __init__(self) -> None:
        self.rollouts: dict[str, dict[str, Any]] = {}
        self._sessions: dict[str, Mapping[str, Any]] = {}
        """Groups of sessions, by name."""
        self._ranks: list[Mapping[str, Any]] = []
        self._rounds: dict[str, Mapping[str, Any]] = {}
        self._now = 0.0

    def take(self, name: str, data: Any) -> bool:
        """Update from an event. Returns True if the screen should be drawn anew."""
        match name:
            case "server":
                self.rollouts, self._sessions, self._now = {}, {}, data["now"]
            case "rollout":
                self.rollouts[data["rollout_id"]] = {**data, "prompts": {p["position"]: p for p in data["prompts"]}}
            case "group" if data["rollout_id"] in self.rollouts:
                self.rollouts[data["rollout_id"]]["prompts"][data["position"]] = data["prompt"]
            case "sessions":
                self._sessions[data["name"]] = data
            case "ranks":
                self._ranks, self._now = data["ranks"], data["at"]
            case "round":
                self._rounds[data["run"]] = data
            case "gone":
                for id in data["rollout_ids"]:
                    self.rollouts.pop(id, None)
                for group in data.get("sessions", ()):
                    self._sessions.pop(group, None)
        return name in ("ranks", "rollout", "round")

    def draw(self, height: int) -> RenderableType:
        parts: list[RenderableType] = [self._rank_table()]
        parts += [Text(self._round_line(each)) for each in self._rounds.values()]
        running = [each for each in self.rollouts.values() if each["state"] == "running"]
        for rollout in running or list(self.rollouts.values())[-1:]:
            parts += [Text(""), self._rollout_line(rollout)]
            room = max(3, (height - NOT_GROUPS - len(self._ranks)) // max(1, len(running)) - 2)
            parts.append(_groups(list(rollout["prompts"].values()), room))
        if self._sessions:
            fates = Counter(each["status"] for each in self._sessions.values())
            told = f"sessions: {fates['complete']} of {len(self._sessions)} groups complete, {fates['running']} run"
            parts += [Text(""), Text(told, style="bold")]
            parts.append(_groups([_of_sessions(each) for each in self._sessions.values()], max(3, height - NOT_GROUPS)))
        elif not self.rollouts:
            parts.append(Text("Nothing has run yet."))
        return Group(*parts)

    def _rank_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("rank", "state", "running", "waiting", "KV cache"):
            table.add_column(column, justify="left" if column in ("state", "KV cache") else "right")
        for rank in self._ranks:
            kv = rank["kv"] or 0.0
            bar = f"{'█' * round(20 * kv):<20} {kv:.0%}"
            table.add_row(str(rank["rank"]), rank["state"], str(rank["running"]), str(rank["waiting"]), bar)
        return table

    def _round_line(self, told: Mapping[str, Any]) -> str:
        return (
            f"run {told['run']}: round {told['round']} was {told['kind']}, {len(told['deferred'])} prompts deferred, "
            f"{told['num_waiting']} wait, next {told['next_round']}"
        )

    def _rollout_line(self, rollout: Mapping[str, Any]) -> Text:
        prompts = rollout["prompts"].values()
        fates = Counter(prompt["status"] for prompt in prompts)
        ends = Counter(end for prompt in prompts for end in prompt["ends"])
        seconds = rollout["seconds"] or max(0.0, self._now - (rollout["began"] or self._now))
        round = f", round {rollout['round']} of {rollout['run']} ({rollout['kind']})" if rollout.get("run") else ""
        told = f"{rollout['rollout_id']}{round}: {rollout['state']}, {seconds:.0f} s, {fates['complete']} of "
        told += f"{rollout['num_prompts']} groups complete; {_counted(ends)} of {rollout['num_candidates']} candidates"
        if rollout["state"] == "running" and (num_queued := rollout["num_prompts"] - len(prompts)):
            told += f"; {num_queued} groups wait for places"
        return Text(told, style="bold")


def _counted(ends: Mapping[str, int]) -> str:
    return ", ".join(f"{ends[end]} {WORDS.get(end, end)}" for end in STYLES if ends.get(end)) or "none"


def _of_sessions(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of sessions in the form of a group of candidates."""
    sessions = group["sessions"]
    told = {name: [each.get(of) for each in sessions] for name, of in OF_SESSION.items()}
    return {"id": group["id"], "rank": group.get("rank"), "over_s": group["seconds"], **told}


def _groups(prompts: list[Mapping[str, Any]], room: int) -> Table:
    """Table of groups: running groups first, then the last that ended."""
    table = Table(box=None, pad_edge=False)
    for column in ("prompt", "rank", "candidates", "longest", "", "rewards"):
        table.add_column(column, justify="right" if column in ("rank", "longest") else "left", no_wrap=True)
    prompts.sort(key=lambda prompt: (prompt["over_s"] is not None, -(prompt["over_s"] or 0.0)))
    longest = max((length for prompt in prompts for length in prompt["lengths"]), default=0)
    for prompt in prompts[:room]:
        bars = Text()
        for length, end in zip(prompt["lengths"], prompt["ends"], strict=True):
            bars.append(BLOCKS[min(len(BLOCKS) * length // (longest + 1), len(BLOCKS) - 1)], STYLES.get(end, ""))
        rewards = "".join("·" if r is None else "+" if r > 0 else "-" for r in prompt.get("rewards") or ())
        rank = prompt.get("rank")
        name = escape(prompt["id"][:MAX_NAME].encode("unicode_escape").decode())
        counted = _counted(Counter(prompt["ends"]))
        table.add_row(
            name, "" if rank is None else str(rank), bars, str(max(prompt["lengths"], default=0)), counted, rewards
        )
    if len(prompts) > room:
        table.add_row(f"… {len(prompts) - room} more")
    return table


def top(url: str, key: str | None, *, once: bool = False, console: Console | None = None) -> None:
    """Draw until interrupted, or only once with `once`. Raises: RolloutError."""
    console = console or Console()
    screen = Screen()
    if once:
        for name, data in feed(url, key):
            screen.take(name, data)
            if name == "ranks":
                console.print(screen.draw(height=1000))
                return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for name, data in feed(url, key):
            if screen.take(name, data):
                live.update(screen.draw(console.height), refresh=True)

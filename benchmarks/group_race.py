"""The first 8 of 16 candidates per prompt, four ways over HTTP, on stock vLLM and on vllm-rollout.

  a  stock vLLM, n=16 in one request per prompt; wait for all, keep the first 8
  b  stock vLLM, n=8 in one request per prompt; wait for all
  c  stock vLLM, 16 streaming requests per prompt (one event per token); when 8 have finished, the client closes
     the others' connections
  d  vllm-rollout, one POST /v1/rollouts for all prompts, group_size 8, redundancy 8

Conditions. One server runs at a time. Both kinds get the same flags, the same prompts as token ids, and the same seeds:
candidate i of a prompt gets that prompt's seed + i in every way. Temperature 1, token ids returned, no log
probabilities. Every prompt has run once before, so that each way finds the same prefix cache. Within a repeat the ways
follow each other, and the order turns round with every repeat. Ratios are medians of the ratios within a repeat.

The client of c is the cheapest we could write: one process, and one connection per candidate on asyncio's transport. It
keeps the bytes it gets and looks in them for a finish reason only. Token ids are read after the clock has stopped. The
other clients use httpx. No way computes a reward.

Results:
  wall_s              from the first request to the last byte of the last answer
  generated_tokens    vLLM's counter vllm:generation_tokens_total, after minus before, once it no longer changes. For a
                      request that a client aborts, it counts the tokens that reached the API process: in c it is a
                      lower bound
  returned_tokens     tokens of the 8 kept candidates per prompt
  wasted_tokens       generated - returned
  tokens_after_completion   per remaining candidate of a group, decoded after the group's 8th completion:
      a: its length beyond that of the 8th shortest; b: there is no remaining candidate
      c: counted by the server, minus what the client had received when it closed the connection (a lower bound)
      d: its num_tokens beyond those of the group's longest winner. Under the synchronous scheduler 0, or 1 for a
         candidate whose first step came one step before the winner's
  api_process_cpu_s   CPU seconds of the server's API process (process_cpu_seconds_total)
  client_cpu_s        CPU seconds of this process
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import httpx
import uvloop
from rich.console import Console

from benchmarks.common import (
    arguments_of,
    median,
    median_of_known,
    publish,
    raise_file_limit,
    ratios,
    record_of_run,
    server_process,
    settled_tokens,
)
from benchmarks.prompts import cycle
from benchmarks.tables import bars, columns, number, picture
from vllm_rollout.demo.options import MAX_CANDIDATES
from vllm_rollout.kernel.rules.prompt_key import seed_for
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import (
    ServerError,
    ServerProcess,
    counter,
    exit_on_sigterm,
    log_folder,
    server_flags,
)

Way = Literal["a", "b", "c", "d"]
WAYS: dict[Way, str] = {
    "a": "stock, n=16, wait for all",
    "b": "stock, n=8, wait for all",
    "c": "stock, 16 streams, client aborts",
    "d": "vllm-rollout",
}
Row = dict[str, Any]
API_CPU = "process_cpu_seconds_total"
TINY = "tiny-random"
MAX_CANDIDATES_TINY = 1024
TINY_PROMPT_TOKENS = 12
"""Few enough for 1024 candidates in one step: vLLM's CPU engine fails if a seeded prompt is split over steps."""


@dataclass(frozen=True, slots=True)
class Race:
    """One comparison of ways: a model, a number of groups at once, a length cap."""

    name: str
    model: str
    num_groups: int
    group_size: int
    num_candidates: int
    max_tokens: int
    ways: tuple[Way, ...]

    @property
    def flags(self) -> list[str]:
        """The server's flags, the same for every race of a model, so that a server can serve several races."""
        return server_flags(MAX_CANDIDATES_TINY if self.model == TINY else MAX_CANDIDATES)


@dataclass(frozen=True, slots=True)
class Returned:
    """The tokens that a way returned, read after the clock has stopped."""

    returned_tokens: int
    tokens_after_completion: float | None
    """Mean per remaining candidate. None if the server's counter is needed, or if there is no remaining candidate."""
    num_remaining: int
    """Number of candidates that were not finished when their group was complete."""
    tokens_received: int
    """Tokens that the client received, returned or not."""


@dataclass(frozen=True, slots=True)
class Task:
    """The input of a way: prompts as token ids, and sampling parameters."""

    race: Race
    prompts: list[list[int]]
    seed: int

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": 1.0, "max_tokens": self.race.max_tokens, "seed": self.seed}

    def body(self, position: int, index: int = 0) -> dict[str, Any]:
        """A completion of the prompt at that position, sampled as a rollout samples its candidate of that index."""
        seed = seed_for(self.seed, str(position)) + index
        return {"prompt": self.prompts[position], "return_token_ids": True, **self.sampling, "seed": seed}


Read = Callable[[], Returned]
"""Reads the answers after the clock has stopped, so that parsing does not count as wall time."""


async def wait_for_all(client: httpx.AsyncClient, task: Task, num_candidates: int) -> Read:
    """Ways a and b: one request per prompt."""

    async def ask(position: int) -> httpx.Response:
        return await client.post("/v1/completions", json=task.body(position) | {"n": num_candidates})

    responses = await asyncio.gather(*map(ask, range(len(task.prompts))))

    def read() -> Returned:
        returned = received = after = num_remaining = 0
        for response in responses:
            choices = _body(response)["choices"]
            lengths = [(c["finish_reason"] != "stop", len(c["token_ids"])) for c in choices]
            kept, beyond = split_group(lengths, task.race.group_size)
            returned += sum(kept)
            received += sum(length for _, length in lengths)
            after += sum(beyond)
            num_remaining += len(beyond)
        return Returned(returned, after / num_remaining if num_remaining else None, num_remaining, received)

    return read


def split_group(candidates: Sequence[tuple[bool, int]], group_size: int) -> tuple[list[int], list[int]]:
    """Lengths of the first `group_size` candidates to finish, and for each other candidate the tokens it decoded after
    that.

    candidates: (was cut, length) of candidates that decoded in step. Cut ones are kept only if there are too few
    others.
    """
    ordered = sorted(candidates)
    kept = [length for _, length in ordered[:group_size]]
    stop = max(kept, default=0)
    return kept, [max(0, length - stop) for _, length in ordered[group_size:]]


async def roll_out(client: httpx.AsyncClient, task: Task) -> Read:
    """Way d: one request for everything."""
    race = task.race
    body = {
        "prompts": [{"prompt_token_ids": prompt} for prompt in task.prompts],
        "group_size": race.group_size,
        "redundancy": race.num_candidates - race.group_size,
        "sampling_params": task.sampling,
        "include": [],
    }
    response = await client.post("/v1/rollouts", json=body)

    def read() -> Returned:
        answer = _body(response)
        beyond = []
        for group in answer["groups"]:
            stop = max(trajectory["num_tokens"] for trajectory in group["trajectories"])
            beyond += [max(0, c["num_tokens"] - stop) for c in group["candidates"] if c["state"] == "surplus"]
        usage = answer["usage"]
        mean = sum(beyond) / len(beyond) if beyond else None
        return Returned(usage["returned_tokens"], mean, len(beyond), usage["generated_tokens"])

    return read


class TokenStream(asyncio.Protocol):
    """One streaming request. It keeps the bytes that it receives, and looks for the finish reason only."""

    FINISHED = b'"finish_reason":"'
    TOKEN_IDS = re.compile(rb'"token_ids":\[([^\]]*)\]')

    __slots__ = ("_on_end", "_request", "_tail", "closed", "received", "stopped", "transport")

    def __init__(self, request: bytes, on_end: Callable[[TokenStream], None]) -> None:
        self._request = request
        self._on_end = on_end
        self._tail = b""
        self.received: list[bytes] = []
        self.closed = False
        self.stopped: bool | None = None
        """Ended by itself (finish reason `stop`), cut at the cap, or None: not ended."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        self.received.append(data)
        text = self._tail + data
        position = text.find(self.FINISHED)
        # What follows the marker tells how it ended: wait for it.
        if position >= 0 and len(text) > position + len(self.FINISHED):
            self.stopped = text[position + len(self.FINISHED)] == ord("s")
            self.close()
            self._on_end(self)
        else:
            self._tail = text[-len(self.FINISHED) - 1 :]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed:
            self.close()
            self._on_end(self)

    def close(self) -> None:
        self.closed = True
        self.transport.close()

    @property
    def num_tokens(self) -> int:
        ids = self.TOKEN_IDS.findall(b"".join(self.received))
        return sum(chunk.count(b",") + 1 for chunk in ids if chunk.strip())


class StreamingGroup:
    """The client's side of way c: 16 streams, of which the first 8 to end by themselves are kept."""

    def __init__(self, size: int, requests: Sequence[bytes]) -> None:
        self._size = size
        self._num_running = len(requests)
        self._num_stopped = 0
        self.streams = [TokenStream(request, self._ended) for request in requests]
        self.kept: list[TokenStream] = []
        self.remaining: list[TokenStream] = []
        """Streams that were closed while their candidates still ran."""
        self.over = asyncio.get_running_loop().create_future()

    def _ended(self, stream: TokenStream) -> None:
        if self.over.done():
            return
        self._num_running -= 1
        if stream.stopped:
            self.kept.append(stream)
        if len(self.kept) == self._size:
            for other in self.streams:
                if not other.closed:
                    self.remaining.append(other)
                    other.close()
            self.over.set_result(None)
        elif self._num_running == 0:
            cut = [s for s in self.streams if s.stopped is False]
            self.kept += cut[: self._size - len(self.kept)]
            self.over.set_result(None)


async def stream_all(client: httpx.AsyncClient, task: Task) -> Read:
    """Way c: a request and a connection per candidate."""
    host, port = client.base_url.host, client.base_url.port
    loop = asyncio.get_running_loop()
    groups = []
    for position in range(len(task.prompts)):
        bodies = [task.body(position, index) | {"stream": True} for index in range(task.race.num_candidates)]
        groups.append(StreamingGroup(task.race.group_size, [_http_request(host, body) for body in bodies]))
    connections = [
        loop.create_connection(lambda stream=stream: stream, host, port) for group in groups for stream in group.streams
    ]
    await asyncio.gather(*connections)
    await asyncio.gather(*(group.over for group in groups))

    def read() -> Returned:
        for group in groups:
            if len(group.kept) < task.race.group_size:
                raise ServerError(f"only {len(group.kept)} candidates of a group ended: {_first_words(group.streams)}")
        returned = sum(stream.num_tokens for group in groups for stream in group.kept)
        received = sum(stream.num_tokens for group in groups for stream in group.streams)
        num_remaining = sum(len(group.remaining) for group in groups)
        return Returned(returned, None, num_remaining, received)

    return read


def _http_request(host: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _first_words(streams: Sequence[TokenStream]) -> str:
    broken = next((s for s in streams if s.stopped is None), streams[0])
    return b"".join(broken.received)[:300].decode(errors="replace")


def _body(response: httpx.Response) -> dict[str, Any]:
    if response.status_code != 200:
        raise ServerError(f"{response.request.url.path} answered {response.status_code}: {response.text[:300]}")
    return response.json()


RUN: dict[Way, Callable[[httpx.AsyncClient, Task], Awaitable[Read]]] = {
    "a": lambda client, task: wait_for_all(client, task, task.race.num_candidates),
    "b": lambda client, task: wait_for_all(client, task, task.race.group_size),
    "c": stream_all,
    "d": roll_out,
}


async def measure(server: ServerProcess, race: Race, way: Way, repeat: int, seed: int) -> Row:
    """Warm up, run one way, and read the counters before and after."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits, trust_env=False) as client:
        try:
            task = Task(race, await _prompts(client, race, seed), seed + 1000 * repeat)
            for prompt in task.prompts:
                _body(await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}))
            tokens = await settled_tokens(client)
            api_cpu = counter((await client.get("/metrics")).text, API_CPU)
            client_cpu = time.process_time()
            started = time.perf_counter()
            read = await RUN[way](client, task)
            wall_s = time.perf_counter() - started
            client_cpu = time.process_time() - client_cpu
            api_cpu = counter((await client.get("/metrics")).text, API_CPU) - api_cpu
            generated = int(await settled_tokens(client) - tokens)
        except httpx.TransportError as error:
            raise server.lost(error) from error
    outcome = read()
    after = outcome.tokens_after_completion
    if way == "c" and outcome.num_remaining:
        after = (generated - outcome.tokens_received) / outcome.num_remaining
    return {
        "way": way,
        "repeat": repeat,
        "wall_s": round(wall_s, 3),
        "generated_tokens": generated,
        "returned_tokens": outcome.returned_tokens,
        "wasted_tokens": generated - outcome.returned_tokens,
        "tokens_after_completion": None if after is None else round(after, 3),
        "num_remaining": outcome.num_remaining,
        "api_process_cpu_s": round(api_cpu, 2),
        "client_cpu_s": round(client_cpu, 2),
    }


async def _prompts(client: httpx.AsyncClient, race: Race, seed: int) -> list[list[int]]:
    if race.model == TINY:
        rng = random.Random(seed)
        return [[rng.randrange(16, 512) for _ in range(TINY_PROMPT_TOKENS)] for _ in range(race.num_groups)]
    bodies = [{"messages": [{"role": "user", "content": prompt}]} for prompt in cycle(race.num_groups)]
    return [_body(await client.post("/tokenize", json=body))["tokens"] for body in bodies]


class Servers:
    """Keeps at most one server. Starting another kind, or a server for another model, stops the one before."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder = folder
        self._console = console
        self._key: tuple[str, str] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def get(self, way: Way, race: Race) -> ServerProcess:
        kind = "rollout" if way == "d" else "stock"
        if self._key != (kind, race.model):
            self._stack.close()
            self._key = None
            server = server_process(kind, resolve(race.model), race.flags, self._folder / f"{kind}.log")
            self._server = self._stack.enter_context(server)
            with self._console.status(f"starting {kind} server, {race.model}"):
                server.wait_until_healthy(lambda seconds, line: None)
            self._key = (kind, race.model)
        self._server.check_alive()
        return self._server


def run_races(races: Sequence[Race], repeats: int, seed: int, console: Console) -> list[dict[str, Any]]:
    """All repeats of a race before the next race. The order of the ways turns round with every repeat."""
    results = []
    with log_folder() as folder, Servers(folder, console) as servers:
        for race in races:
            measurements = []
            for repeat in range(repeats):
                for way in race.ways if repeat % 2 == 0 else race.ways[::-1]:
                    server = servers.get(way, race)
                    measurement = uvloop.run(measure(server, race, way, repeat, seed))
                    measurements.append(measurement)
                    console.print(
                        f"{race.name}, {race.num_groups} groups, repeat {repeat + 1}/{repeats}, way {way}: "
                        f"{measurement['wall_s']:.2f} s, {measurement['generated_tokens']:,} tokens generated"
                    )
            results.append(summarize(race, measurements))
    return results


def summarize(race: Race, measurements: Sequence[Row]) -> dict[str, Any]:
    """Every measurement, medians per way, and the medians of the ratios x/d within a repeat."""
    by_way = {way: sorted((m for m in measurements if m["way"] == way), key=itemgetter("repeat")) for way in race.ways}
    walls = {way: [m["wall_s"] for m in ours] for way, ours in by_way.items()}
    others = [way for way in race.ways if way != "d" and "d" in walls]
    return {
        **asdict(race),
        "server_flags": race.flags,
        "measurements": measurements,
        "medians": {
            way: {
                field: median_of_known((m[field] for m in ours), 3)
                for field in ours[0]
                if field not in ("way", "repeat")
            }
            for way, ours in by_way.items()
        },
        "ratios": {f"{way}/d": round(median(ratios(walls[way], walls["d"])), 3) for way in others},
    }


def tables(result: dict[str, Any]) -> str:
    rows = [
        {**row, "race": f"{race['name']}, {race['num_groups']} groups", "way": way, "ratios": race["ratios"]}
        for race in result["races"]
        for way, row in race["medians"].items()
    ]
    return columns(
        "Medians; x/d: wall time over that of way d, paired within a repeat",
        rows,
        {
            "race": lambda row: row["race"],
            "way": lambda row: f"{row['way']}: {WAYS[row['way']]}",
            "wall s": lambda row: number(row["wall_s"], 2),
            "x/d": lambda row: number(row["ratios"].get(f"{row['way']}/d", 1.0), 2),
            "generated": lambda row: f"{row['generated_tokens']:,.0f}",
            "returned": lambda row: f"{row['returned_tokens']:,.0f}",
            "wasted": lambda row: f"{row['wasted_tokens']:,.0f}",
            "after 8th": lambda row: number(row["tokens_after_completion"], 2),
            "API CPU s": lambda row: number(row["api_process_cpu_s"], 1),
            "client CPU s": lambda row: number(row["client_cpu_s"], 1),
        },
    )


COLORS: dict[Way, str] = {"a": "#94a3b8", "b": "#64748b", "c": "#f59e0b", "d": "#0f766e"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Left: wall time and tokens on the real model. Right: how the ratios grow with the number of groups."""
    real = next(race for race in result["races"] if race["model"] != TINY)
    tiny = [race for race in result["races"] if race["model"] == TINY]
    with picture(path, figsize=(13.5, 4.6), width_ratios=(1.5, 1), w_pad=3) as (left, right):
        medians = real["medians"]
        bars(
            left,
            {way: row["wall_s"] for way, row in medians.items()},
            colors=COLORS,
            names={way: f"{way}: {title}" for way, title in WAYS.items()},
            texts={
                w: f"{r['wall_s']:.1f} s, {r['generated_tokens']:,.0f} tokens generated" for w, r in medians.items()
            },
            runs={way: [m["wall_s"] for m in real["measurements"] if m["way"] == way] for way in medians},
            title=f"First {real['group_size']} of {real['num_candidates']} candidates, {real['num_groups']} prompts\n"
            f"{Path(real['model']).name}, at most {real['max_tokens']} tokens",
            xlabel="seconds until every group has its trajectories (ticks: single runs)",
        )
        _draw_concurrency(right, tiny)


def _draw_concurrency(axes: Any, races: Sequence[dict[str, Any]]) -> None:
    ways = [way for way in WAYS if any(f"{way}/d" in race["ratios"] for race in races)]
    width = 0.8 / max(1, len(ways))
    for rank, way in enumerate(ways):
        places = [position - 0.4 + (rank + 0.5) * width for position in range(len(races))]
        heights = [race["ratios"].get(f"{way}/d", 0) for race in races]
        drawn = axes.bar(places, heights, 0.92 * width, color=COLORS[way], label=way)
        axes.bar_label(drawn, [f"{height:.2f}" for height in heights], padding=2, size=9)
    axes.axhline(1, color=COLORS["d"], lw=2, label="d = 1")
    axes.set_xticks(range(len(races)), [str(race["num_groups"]) for race in races])
    axes.margins(y=0.22)
    axes.set_xlabel("groups at once, 16 candidates each")
    axes.set_ylabel("wall time over that of d")
    axes.set_title("More groups at once\ntiny random model", loc="left", weight="bold")
    axes.legend(frameon=False, fontsize=9, ncols=4, loc="upper center")


def parse_arguments() -> argparse.Namespace:
    parser = arguments_of(__doc__, "group_race", seed=7, repeats=3, plot=True)
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="model of the first part (default %(default)s)")
    add("--prompts", type=int, default=8, help="groups at once on the model (default %(default)s)")
    add("--max-tokens", type=int, default=1024, help="length cap on the model (default %(default)s)")
    add("--groups", type=int, nargs="*", default=[4, 16, 64], help="groups at once on the tiny random model (default "
        "4 16 64). Without a number this part is left out")  # fmt: skip
    add("--tiny-max-tokens", type=int, default=512, help="length cap on the tiny model (default %(default)s)")
    add("--group-size", type=int, default=8, help="M, trajectories kept per prompt (default %(default)s)")
    add("--candidates", type=int, default=16, help="M', candidates per prompt in ways a, c and d (default %(default)s)")
    add("--ways", default="abcd", help="ways to run, in this order, e.g. cd (default %(default)s)")
    arguments = parser.parse_args()
    if not arguments.ways or set(arguments.ways) - set(WAYS) or len(set(arguments.ways)) < len(arguments.ways):
        parser.error(f"--ways must be some of {''.join(WAYS)}, each once, got {arguments.ways!r}")
    if not 1 <= arguments.group_size <= arguments.candidates:
        parser.error(f"--group-size must be in 1 to --candidates ({arguments.candidates}), got {arguments.group_size}")
    if max([0, *arguments.groups]) * arguments.candidates > MAX_CANDIDATES_TINY:
        parser.error(f"--groups times --candidates must be at most {MAX_CANDIDATES_TINY}, got {max(arguments.groups)}")
    if arguments.prompts * arguments.candidates > MAX_CANDIDATES:
        parser.error(f"--prompts times --candidates must be at most {MAX_CANDIDATES}, got {arguments.prompts} prompts")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    exit_on_sigterm()
    ways: tuple[Way, ...] = tuple(arguments.ways)
    sizes = (arguments.group_size, arguments.candidates)
    races = [Race("real model", arguments.model, arguments.prompts, *sizes, arguments.max_tokens, ways)]
    races += [Race("tiny model", TINY, n, *sizes, arguments.tiny_max_tokens, ways) for n in arguments.groups]
    raise_file_limit(2 * max(race.num_groups * race.num_candidates for race in races) + 256)
    result = record_of_run(seed=arguments.seed, workload={"ways": WAYS, "conditions": __doc__})
    try:
        result["races"] = run_races(races, arguments.repeats, arguments.seed, Console(stderr=True))
    except (ServerError, ValueError) as error:
        raise SystemExit(f"group_race: {error}") from error
    publish(arguments, result, tables, draw)


if __name__ == "__main__":
    main()

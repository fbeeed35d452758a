"""Clients of a server whose ranks are killed. Each checks that its stream is complete, and counts how rollouts end."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from typing import Any

import httpx

TIMEOUT_S = 600.0
GROUP_SIZE = 3
NO_RANK = "every rank of the engine is drained, or has died"
"""Answered while the last rank is being drained, if it was not the last one when the drain began."""
PAUSE_S = 0.2


def stream_of(response: httpx.Response) -> Any:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


class Reader:
    """Runs rollouts with retry, one after the other, until `stop` is set or the server announces its end."""

    def __init__(self, url: str, name: int, stop: threading.Event, max_tokens: int) -> None:
        self._url = url
        self._name = name
        self._stop = stop
        self._max_tokens = max_tokens
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.said = ""
        """Reason for which the reader stopped."""

    def read(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            prompts = [{"id": f"{i}", "prompt_token_ids": [10 + self._name, 20 + number, 1 + i]} for i in range(4)]
            body = {"prompts": prompts, "group_size": GROUP_SIZE, "redundancy": 1, "on_engine_failure": "retry"}
            body |= {"stream": True, "stream_tokens": 1}
            body |= {"sampling_params": {"seed": number, "max_tokens": self._max_tokens}}
            try:
                with httpx.stream("POST", f"{self._url}/v1/rollouts", json=body, timeout=TIMEOUT_S) as response:
                    if response.status_code != 200:
                        self.said = json.loads(response.read())["error"]["message"]
                        if NO_RANK not in self.said:
                            return
                        self._stop.wait(PAUSE_S)
                        continue
                    self.counts["groups_asked"] += len(prompts)
                    ended = self._check(response)
            except httpx.TransportError as error:
                self.said = type(error).__name__
                return
            if ended is not None and NO_RANK not in ended:
                self.said = ended
                return
        self.said = "stopped"

    def _check(self, response: httpx.Response) -> str | None:
        """None after a complete rollout, else the server's error."""
        tokens: dict[tuple[str, int], list[int]] = {}
        over: dict[str, list[int]] = {}
        for event in stream_of(response):
            match event["type"]:
                case "tokens":
                    said = tokens.setdefault((event["prompt_id"], event["index"]), [])
                    if event["offset"] != len(said):
                        self.problems.append(f"tokens from {event['offset']} on, {len(said)} were sent")
                    said += event["token_ids"]
                case "restarted":
                    self.counts["groups_restarted"] += 1
                    tokens = {key: said for key, said in tokens.items() if key[0] != event["prompt_id"]}
                case "trajectory":
                    key = event["prompt_id"], event["trajectory"]["index"]
                    if tokens.get(key) != event["trajectory"]["token_ids"]:
                        self.problems.append(f"trajectory {key} is not what was streamed")
                case "group":
                    if event["prompt_id"] in over:
                        self.problems.append(f"group {event['prompt_id']} ended twice")
                    over[event["prompt_id"]] = event["selected"]
                    if event["status"] != "complete" and NO_RANK in (event["reason"] or ""):
                        self.counts["groups_without_a_rank"] += 1  # it ran on a rank that died, and others are drained
                    elif (event["status"], len(event["selected"])) != ("complete", GROUP_SIZE):
                        self.problems.append(f"group {event['prompt_id']}: {event['reason']}")
                    self.counts["groups_complete"] += event["status"] == "complete"
                case "error":
                    self.counts["groups_that_ended_with_an_error"] += 4 - len(over)
                    return event["error"]["message"]
                case "done":
                    if len(over) != 4:
                        self.problems.append(f"{len(over)} of 4 groups ended")
                    return None
        self.problems.append("a stream ended without a last event")
        return "no last event"


class Mover:
    """Drains ranks and restores them at random, until the server ends."""

    def __init__(self, url: str, seed: int, num_ranks: int, stop: threading.Event) -> None:
        self._url = url
        self._chance = random.Random(seed)
        self._num_ranks = num_ranks
        self._stop = stop
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def move(self) -> None:
        while not self._stop.is_set():
            rank = self._chance.randrange(self._num_ranks)
            try:
                for action in ("drain", "restore"):
                    answer = httpx.post(f"{self._url}/v1/engines/{rank}/{action}", timeout=TIMEOUT_S)
                    self.counts[f"{action}_{answer.status_code}"] += 1
                    if answer.status_code not in (200, 409, 503):
                        self.problems.append(f"{action}: {answer.status_code} {answer.text[:200]}")
                    elif answer.status_code == 503 and "has stopped" in answer.text:
                        return
            except httpx.TransportError:
                return
            self._stop.wait(self._chance.uniform(0, 0.05))

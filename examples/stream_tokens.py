"""A trainer that makes forward passes over candidates' tokens while the candidates still run (DARTS 4.3.2).

Needs `vllm-rollout serve` at http://127.0.0.1:8000. In place of counting, `forward` would run the policy or the
reference model over the new tokens of each candidate, with a KV cache per candidate. Rewards and the backward pass wait
for whole trajectories. While `forward` works, nothing is read. The engine goes on, so the next chunks are longer.
"""

import asyncio
import sys
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from vllm_rollout import AsyncRolloutClient
from vllm_rollout.answers import CandidateEvent, DoneEvent, GroupEvent, TokensEvent, TrajectoryEvent

PROMPTS = ["Once upon a time", "The first rule of sailing is"]
CHUNK_TOKENS = 8
FORWARD_TOKENS = 64
"""Number of new tokens at which a forward pass begins."""


@dataclass
class Prefix:
    """The tokens of a candidate so far."""

    token_ids: list[int] = field(default_factory=list)
    num_forwarded: int = 0

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - self.num_forwarded


def forward(prefixes: Iterable[Prefix]) -> None:
    """One forward pass over all tokens that no pass has processed."""
    for prefix in prefixes:
        prefix.num_forwarded = len(prefix.token_ids)


async def main(url: str) -> None:
    running: dict[tuple[str, int], Prefix] = {}
    num_overlapped = num_dropped = 0
    async with AsyncRolloutClient(url) as client:
        await client.wait_until_ready(timeout_s=600)
        stream = client.stream(
            PROMPTS, group_size=4, redundancy=4, sampling_params={"max_tokens": 128}, stream_tokens=CHUNK_TOKENS
        )
        async with aclosing(stream) as events:
            async for event in events:
                match event:
                    case TokensEvent():
                        running.setdefault((event.prompt_id, event.index), Prefix()).token_ids += event.token_ids
                        if sum(prefix.num_new for prefix in running.values()) >= FORWARD_TOKENS:
                            forward(running.values())
                    case CandidateEvent(candidate=candidate):
                        prefix = running.pop((event.prompt_id, candidate.index), Prefix())
                        num_dropped += prefix.num_forwarded
                        print(f"{event.prompt_id}/{candidate.index}: {candidate.state}, dropped")
                    case TrajectoryEvent(trajectory=trajectory):
                        prefix = running.pop((event.prompt_id, trajectory.index))
                        assert prefix.token_ids == trajectory.token_ids
                        num_overlapped += prefix.num_forwarded
                        forward([prefix])
                    case GroupEvent():
                        print(f"{event.prompt_id}: {event.status}, selected {event.selected}: reward, backward pass")
                    case DoneEvent(usage=usage):
                        print(f"{num_overlapped} of {usage.returned_tokens} returned tokens were forwarded before")
                        print(f"their trajectories came, and {num_dropped} tokens of candidates that were dropped")


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:] or ["http://127.0.0.1:8000"])))

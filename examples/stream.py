"""Streams the events of a group as they happen. Needs `vllm-rollout serve` at http://127.0.0.1:8000.

Leaving the stream early, as `aclosing` does on any exit, aborts the candidates that still run.
"""

import asyncio
import sys
from contextlib import aclosing

from vllm_rollout import AsyncRolloutClient
from vllm_rollout.answers import CandidateEvent, DoneEvent, GroupEvent, TokensEvent, TrajectoryEvent


async def main(url: str) -> None:
    async with AsyncRolloutClient(url) as client:
        await client.wait_until_ready(timeout_s=600)
        stream = client.stream(
            ["Once upon a time"], group_size=2, redundancy=2, sampling_params={"max_tokens": 64}, stream_tokens=16
        )
        async with aclosing(stream) as events:
            async for event in events:
                match event:
                    case TokensEvent():
                        print(f"candidate {event.index}: {len(event.token_ids)} tokens from {event.offset}")
                    case TrajectoryEvent(trajectory=trajectory):
                        print(
                            f"trajectory {trajectory.index}: {trajectory.num_tokens} tokens, {trajectory.finish_reason}"
                        )
                    case CandidateEvent(candidate=candidate):
                        print(f"candidate {candidate.index}: {candidate.state} at {candidate.num_tokens} tokens")
                    case GroupEvent():
                        print(f"group {event.prompt_id}: {event.status}, selected {event.selected}")
                    case DoneEvent():
                        print(f"wasted {event.usage.wasted_tokens} of {event.usage.generated_tokens} tokens")


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:] or ["http://127.0.0.1:8000"])))

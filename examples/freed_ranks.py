"""Trains on ranks that a rollout no longer needs (RollPacker 4.4): gradients begin while the last answers still run.

Needs `vllm-rollout serve --data-parallel-size 2 --api-server-count 1`, or more ranks, at http://127.0.0.1:8000. When
half of the ranks are free (event `ranks_free`), a thread trains on the complete groups, then on each further group as
it completes. If the rollout frees no rank, training begins when the rollout is over. The next rollout begins after the
update.

A freed rank keeps its weights and its KV cache, and serves again after the rollout: its time is free, its memory is
not. Put your policy in place of the small one here, and send new weights to the server after each step.
"""

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import torch
from torch.nn.utils.rnn import pad_sequence

from vllm_rollout import AsyncRolloutClient
from vllm_rollout.answers import GroupEvent, RanksFreeEvent, RestartedEvent, Trajectory, TrajectoryEvent
from vllm_rollout.training.stream import StreamTrainer

STEPS, PROMPTS, GROUP_SIZE, VOCABULARY = 3, 16, 8, 65536


class Bigrams(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Embedding(VOCABULARY, 32), torch.nn.Embedding(VOCABULARY, 32)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Score of each token given the token before it, [num_samples, num_tokens - 1]."""
        return torch.nn.functional.logsigmoid((self.before(token_ids[:, :-1]) * self.after(token_ids[:, 1:])).sum(-1))


def losses(policy: Bigrams, group: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of tokens and the mask of those that count, for `StreamTrainer.add`. Short answers are rewarded."""
    lengths = torch.tensor([float(each.num_tokens) for each in group])
    advantages = (lengths.mean() - lengths) / lengths.std().clamp(min=1.0)
    token_ids = pad_sequence([torch.tensor(each.token_ids) for each in group], batch_first=True)
    mask = torch.arange(1, token_ids.shape[1]) < lengths[:, None]
    return -advantages[:, None] * policy(token_ids), mask


async def rollout(client: AsyncRolloutClient, groups: asyncio.Queue, free: asyncio.Event) -> None:
    """Put each group into the queue when it is complete, and None after the last group."""
    trajectories: dict[str, list[Trajectory]] = defaultdict(list)
    prompts = [f"Question {i}:" for i in range(PROMPTS)]
    stream = client.stream(prompts, group_size=GROUP_SIZE, sampling_params={"max_tokens": 1024}, scale_down="auto")
    async with aclosing(stream) as events:
        async for event in events:
            match event:
                case TrajectoryEvent():
                    trajectories[event.prompt_id].append(event.trajectory)
                case RestartedEvent():
                    trajectories.pop(event.prompt_id, None)
                case RanksFreeEvent():
                    print(f"  ranks {event.ranks} are free after {event.after_s:.1f} s: {event.reason}")
                    free.set()
                case GroupEvent(status="complete"):
                    groups.put_nowait(trajectories.pop(event.prompt_id))
    free.set()
    groups.put_nowait(None)


async def train(work: Callable[[list[Trajectory]], None], groups: asyncio.Queue, free: asyncio.Event) -> list[float]:
    """Train on one group after the other, in a thread. Returns: the `time.monotonic` at which each was done."""
    done = []
    await free.wait()
    with ThreadPoolExecutor(1) as thread:  # left when its backward pass is over, whatever happens to the rollout
        while (group := await groups.get()) is not None:
            await asyncio.get_running_loop().run_in_executor(thread, work, group)
            done.append(time.monotonic())
    return done


async def main(url: str) -> None:
    policy = Bigrams()
    trainer = StreamTrainer(policy.parameters(), torch.optim.SGD(policy.parameters(), lr=1e-2), max_norm=1.0)
    async with AsyncRolloutClient(url) as client:
        await client.wait_until_ready(timeout_s=600)
        for step in range(STEPS):
            groups, free, begun = asyncio.Queue(), asyncio.Event(), time.monotonic()
            trainer.begin(step)
            try:
                async with asyncio.TaskGroup() as tasks:
                    work = tasks.create_task(train(lambda group: trainer.add(*losses(policy, group)), groups, free))
                    await rollout(client, groups, free)
                    over = time.monotonic()
            except BaseException:  # the server died, or a backward pass failed: nothing of this attempt may stay
                trainer.abandon()
                raise
            num_before = sum(each < over for each in work.result())
            result = trainer.finish()
            print(
                f"step {step}: rollout {over - begun:.1f} s; {num_before} of {result.parts} groups had their gradients"
                f" before its end; updated {time.monotonic() - over:.2f} s after it, loss {result.loss:.3f}"
            )


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:] or ["http://127.0.0.1:8000"])))

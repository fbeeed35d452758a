"""A synchronous GRPO-like loop over the rounds of a run: short rounds, and a long one for prompts that took too long.

Needs `vllm-rollout serve` at http://127.0.0.1:8000. With `--rollout-state FOLDER` the run survives the server. After a
crash of the server or of this program, start this program again: it continues, and no prompt is lost or trained on
twice. The server knows which prompts wait, and the file DONE lists those that were used.

In place of `print`, a trainer would make its update with the advantages, and send the new weights to the server.
"""

import random
import re
import statistics
import sys
from pathlib import Path

from vllm_rollout import RolloutClient
from vllm_rollout.answers import GroupAnswer

GROUP_SIZE, PROMPTS_PER_ROUND = 4, 8
DONE = Path("rounds-example.done")  # a trainer would keep this in its checkpoint


def data(num_prompts: int) -> list[dict]:
    """Questions with a checkable answer, some of which take longer than others."""
    chance = random.Random(7)
    prompts = []
    for i in range(num_prompts):
        a, b = chance.randrange(10, 100), chance.randrange(10, 100)
        how = chance.choice(["Answer with the number only.", "Explain each step in full sentences, then answer."])
        content = f"What is {a} + {b}? {how}"
        prompts.append({"id": f"{i}={a + b}", "messages": [{"role": "user", "content": content}]})
    return prompts


def advantages(group: GroupAnswer) -> list[float]:
    """Advantages of a group, standardized. The reward is 1 if a trajectory's last number is right, else 0."""
    right = group.prompt_id.split("=")[1]
    rewards = [float(re.findall(r"\d+", t.text or "")[-1:] == [right]) for t in group.trajectories]
    std = statistics.pstdev(rewards) or 1.0
    return [(reward - statistics.fmean(rewards)) / std for reward in rewards]


def main(url: str, num_prompts: int = 50) -> None:
    with RolloutClient(url) as client:
        client.wait_until_ready(timeout_s=600)
        run = client.run(GROUP_SIZE, PROMPTS_PER_ROUND, id="rounds-example", sampling_params={"max_tokens": 256})
        known = {*run.info.queue, *run.info.unstarted, *(DONE.read_text().split() if DONE.exists() else ())}
        if run.info.open_round is not None:
            known.update(run.info.open_round.prompt_ids)
        prompts = [prompt for prompt in data(num_prompts) if prompt["id"] not in known]
        for round in run.rounds(prompts, epoch=1, include=["text", "logprobs"]):
            batch = [(t, a) for g in round.groups for t, a in zip(g.trajectories, advantages(g), strict=False)]
            num_teaching = sum(advantage != 0 for _, advantage in batch)
            print(
                f"round {round.round}, {round.kind}: {len(round.groups)} prompts in {round.timing.latency_s:.1f} s, "
                f"longest {max(g.lengths.max for g in round.groups)} tokens, {num_teaching} of {len(batch)} "
                f"trajectories teach, deferred {round.deferred or 'none'}"
            )
            with DONE.open("a") as file:
                file.writelines(f"{group.prompt_id}\n" for group in round.groups)
        totals, savings = run.info.totals, run.info.savings
        print(f"{totals.num_returned} prompts back, {totals.num_waiting} wait; {totals.latency_s:.0f} s in all")
        print(f"steps of synchronous rounds over ours: {savings.ratio or 'not known yet'}")
        run.delete()
        DONE.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")

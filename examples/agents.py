"""Agents that race, with a calculator and a search over six facts. Needs `vllm-rollout serve` at http://127.0.0.1:8000.

Six conversations start for each question. The first 3 to end make its group. The others are cancelled at any point.
"""

import asyncio
import math
import re
import sys

from vllm_rollout import AgentSession, AsyncRolloutClient

FACTS = ["Paris has 2 million people.", "Rome has 3 million people.", "Oslo has 0.7 million people.",
         "A day has 24 hours.", "A week has 7 days.", "A year has 365 days."]  # fmt: skip
RULES = "Use tools: write CALC(17 + 25) or SEARCH(Rome) and stop. When you know the answer, write ANSWER(42)."
QUESTIONS = [("How many hours has a week?", 168), ("How many people live in Paris and Rome, in millions?", 5)]


def use_tool(name: str, words: str) -> str:
    if name == "SEARCH":
        found = [fact for fact in FACTS if any(word.lower() in fact.lower() for word in words.split())]
        return " ".join(found) or "nothing found"
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", words)]
    return str(math.prod(numbers) if "*" in words else sum(numbers))


async def run(session: AgentSession) -> float:
    question, solution = session.prompt
    messages = [{"role": "user", "content": f"{RULES}\n{question}"}]
    for _ in range(4):
        answer = await session.chat(messages, max_tokens=64, temperature=1.0)
        text = answer["choices"][0]["message"]["content"]
        called = re.search(r"(CALC|SEARCH|ANSWER)\((.*?)\)", text)
        if called is not None and called[1] == "ANSWER":
            return float(called[2].strip() == str(solution))
        result = "Write a call." if called is None else use_tool(*called.groups())
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": result}]
    return 0.0


async def main(url: str) -> None:
    async with AsyncRolloutClient(url) as client:
        await client.wait_until_ready(timeout_s=600)
        async for group in client.agents(QUESTIONS, group_size=3, redundancy=3, run=run, cut_turn="goes_on"):
            rewards = [trajectory.reward for trajectory in group.trajectories]
            print(f"{group.prompt[0]} {group.status}, rewards {rewards}, {len(group.others)} stopped")


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:] or ["http://127.0.0.1:8000"])))

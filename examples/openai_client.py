"""The OpenAI client with spare candidates: still exactly n choices. Needs `vllm-rollout serve` at http://127.0.0.1:8000."""

import sys

from openai import OpenAI


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is 17 + 25? Answer with the number."}],
        n=4,
        max_tokens=128,
        extra_body={"vllm_xargs": {"rollout_redundancy": 4}},
    )
    for choice in answer.choices:
        print(f"{choice.index}: {choice.finish_reason}, {choice.message.content!r:.60}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["http://127.0.0.1:8000"]))

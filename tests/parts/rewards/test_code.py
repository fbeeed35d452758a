"""The part of an answer that is the program."""

from __future__ import annotations

import pytest

from vllm_rollout.parts.rewards.grading.code import program_of

FIVE = "```python\nprint(5)\n```"


@pytest.mark.parametrize(
    "text",
    [
        f"```python\nprint(4)\n```\nSo:\n{FIVE}\nThat is it.",
        f"It prints\n```text\n5\n```\nHere is the code:\n{FIVE}\nDone.",
        f"{FIVE}\nRun it:\n```bash\npython main.py\n```\nIt prints\n```text\n5\n```\nDone.",
        f"In C++:\n```cpp\nint main() {{}}\n```\nIn Python:\n{FIVE}",
        f"A fence is ```x``` here.\n{FIVE}",
        "The program:```Python3\nprint(5)\n```",
        "```py title=main.py\nprint(5)```",
        "```\nprint(5)\n```",
        "  ```python\n  print(5)\n  ```",
        "```python\r\nprint(5)\r\n```\r\n",
        "print(5)",
    ],
)
def test_the_last_block_of_python_is_the_program(text: str):
    assert program_of(text).strip() == "print(5)"


@pytest.mark.parametrize("text", ["```cpp\nint main() {}\n```", "```python\nprint(5)", "no code"])
def test_without_such_a_block_it_is_the_whole_text(text: str):
    assert program_of(text) == text

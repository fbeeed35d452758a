"""Rules for pages that can be counted: sentences of at most 25 words, without a semicolon, that begin with a subject.

`python -m tests.test_english [PAGE...]` prints what breaks a rule.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READ_ONCE = (
    "README.md",
    "docs/contributing/architecture.md",
    "docs/contributing/design.md",
    "docs/contributing/gpu.md",
    "docs/contributing/versions.md",
    "docs/results.md",
    "docs/guides/agents.md",
    "docs/guides/pruning.md",
    "docs/guides/race.md",
    "docs/guides/rewards.md",
    "docs/guides/rounds.md",
    "docs/guides/shaping.md",
    "docs/guides/asynchronous.md",
    "docs/guides/deploy.md",
    "docs/guides/drafts.md",
    "docs/guides/emulation.md",
    "docs/guides/in_process.md",
    "docs/guides/training.md",
    "docs/guides/troubleshooting.md",
    "docs/guides/tuning.md",
    "docs/guides/watching.md",
    "docs/index.md",
    "docs/recipes/index.md",
    "docs/recipes/nemo-rl.md",
    "docs/recipes/openrlhf.md",
    "docs/recipes/others.md",
    "docs/recipes/prime-rl.md",
    "docs/recipes/skyrl.md",
    "docs/recipes/trl.md",
    "docs/recipes/verl.md",
    "docs/start/matrix.md",
    "docs/start/quickstart.md",
    "docs/start/when.md",
)
"""Pages that keep to the rules. Others follow as they are rewritten."""
MAX_WORDS = 25
NOT_FIRST = ("Of", "Who", "Whoever", "What", "Nobody")


def sentences(page: str) -> Iterator[str]:
    """Sentences of the text and of table cells, without code, headings and addresses of links."""
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    page = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", page)
    for block in re.split(r"\n\s*\n|\n(?=[-*|#] ?)", page):
        if block.startswith("#"):
            continue
        for cell in block.strip("|").split("|") if block.startswith("|") else [re.sub(r"^[-*] ", "", block)]:
            text = " ".join(cell.replace("**", "").split())
            yield from (each for each in re.split(r"(?<=[.?!:])\s+(?=[A-Z`*])", text) if len(each.split()) > 1)


def broken(sentence: str) -> str | None:
    """The rule that this sentence breaks."""
    words = sentence.split()
    if len(words) > MAX_WORDS:
        return f"{len(words)} words"
    if ";" in re.sub(r"`[^`]*`", "", sentence):
        return "a semicolon"
    return f"begins with {words[0]}" if words[0] in NOT_FIRST else None


def violations(found: Iterable[str]) -> list[tuple[str, str]]:
    """The rule and the sentence of each that breaks one."""
    return [(rule, each) for each in found if (rule := broken(each))]


@pytest.mark.parametrize("page", READ_ONCE)
def test_a_page_is_read_once(page: str) -> None:
    assert violations(sentences((ROOT / page).read_text())) == []


def test_rules_are_found_where_they_are_broken() -> None:
    long = " ".join(["Word", *["word"] * 25]) + "."
    table, code = "| a cell | Of a cell |", "```\nOf; code\n```"
    page = f"# Of headings\n\nIt is short. {long}\n\n- What it is.\n- One; two.\n\n{table}\n\n{code}\n"
    rules = [broken(each) for each in sentences(page)]
    assert rules == [None, "26 words", "begins with What", "a semicolon", None, "begins with Of"]


if __name__ == "__main__":
    pages = sys.argv[1:] or sorted(
        str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    )
    for page in pages:
        all_of = list(sentences((ROOT / page).read_text()))
        bad = violations(all_of)
        print(f"{page}: {len(bad)} of {len(all_of)} sentences")
        for rule, each in bad if sys.argv[1:] else ():
            print(f"  {rule}: {each[:140]}")

"""Rules for pages and docstrings that can be counted: at most 25 words, no semicolon, and a subject that comes first.

`python -m tests.test_english [PAGE...]` prints sentences that break a rule, and `make lint` runs it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOG = ROOT / "docs" / "development" / "log.md"
"""A diary of experiments, which nobody reads from its beginning to its end."""
PAGES = [page for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))) if page != LOG]
MAX_WORDS = 25
NOT_FIRST = ("Of", "Who", "Whoever", "What", "Nobody")
RIDDLES = (*NOT_FIRST, "Whether", "How", "The same")
"""First words of a docstring that does not name its subject."""
SOURCES = ("benchmarks", "conformance", "docs_tools", "examples", "kernels", "tests", "vllm_rollout")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_read_once(page: Path) -> None:
    assert violations(sentences(page.read_text())) == []


def test_the_pages_fit_into_a_third_of_what_they_were() -> None:
    """30,000 words for users and contributors together; generated pages and the log are not counted."""
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert len(pages) > 30
    assert sum(len(re.findall(r"\S*\w\S*", page.read_text())) for page in pages) <= 30_000


def strings_alone(source: str) -> Iterator[str]:
    """Docstrings, of attributes too: strings that are statements."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value.strip()


def test_docstrings_name_their_subject() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {docstring[:60]}"
        for folder in SOURCES
        for path in sorted((ROOT / folder).rglob("*.py"))
        for docstring in strings_alone(path.read_text())
        if docstring.startswith(tuple(f"{first} " for first in RIDDLES))
    ]
    assert found == []


def test_rules_are_found_where_they_are_broken() -> None:
    long = " ".join(["Word", *["word"] * 25]) + "."
    table, code = "| a cell | Of a cell |", "```\nOf; code\n```"
    page = f"# Of headings\n\nIt is short. {long}\n\n- What it is.\n- One; two.\n\n{table}\n\n{code}\n"
    rules = [broken(each) for each in sentences(page)]
    assert rules == [None, "26 words", "begins with What", "a semicolon", None, "begins with Of"]


def main(names: list[str]) -> int:
    """Print violations of the named pages, or of all. The exit status is 1 if there is one."""
    found = [
        f"{page.relative_to(ROOT)}: {rule}: {sentence}"
        for page in ([Path(name).resolve() for name in names] or PAGES)
        for rule, sentence in violations(sentences(page.read_text()))
    ]
    print(*found, sep="\n") if found else print(f"english: {len(names) or len(PAGES)} pages, no rule is broken")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

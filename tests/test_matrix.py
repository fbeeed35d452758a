"""docs/start/matrix.md: its rows, its tests and its messages are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_rollout.versions import SUPPORTED_VLLM

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "start" / "matrix.md").read_text()
CAPABILITIES = ("race", "rounds", "pruning", "rewards", "agents", "drafts", "moves", "in process")
ROWS = (
    *("dense", "MoE", "multi-modal", "hybrid", "FP8", "AWQ", "bitsandbytes", "TP", "PP", "DP", "EP", "LoRA"),
    *("speculative decoding", "structured outputs", "tool parsers", "reasoning parsers", "prefix caching"),
    *("sleep mode", "CUDA graphs", "runner V1", "runner V2", *SUPPORTED_VLLM),
)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def table(first: str) -> Iterator[list[str]]:
    """Rows of every table whose header begins so."""
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, flags=re.MULTILINE):
        header, _, *rows = block.splitlines()
        if cells(header)[: first.count("|") + 1] == cells(first):
            yield from map(cells, rows)


MATRIX = list(table(f" | {' | '.join(CAPABILITIES)}"))
REFUSED = list(table("what | the message has"))


def strings(path: Path) -> Iterator[str]:
    """Strings of a module, those of several parts as one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_there_with_a_cell_for_each_capability(row: str) -> None:
    found = [its for its in MATRIX if row in its[0]]
    assert found
    assert all(len(its) == 1 + len(CAPABILITIES) for its in found)
    assert all(re.match(r"[TrX–](?!\w)", cell) for its in found for cell in its[1:])


def test_every_test_that_is_named_is_there() -> None:
    named = set(re.findall(r"`((?:tests|conformance)/[\w/]+\.py)(?:::(\w+))?`", PAGE))
    assert len(named) > 20
    missing = {
        (path, function)
        for path, function in named
        if not (ROOT / path).exists() or (function and f"def {function}(" not in (ROOT / path).read_text())
    }
    assert missing == set()


def test_every_row_with_something_tried_names_a_test() -> None:
    named = " ".join(row[0] for row in table("row | tests"))
    tried = {its[0].split(",")[0] for its in MATRIX if any(cell.startswith("T") for cell in its[1:])}
    assert {row for row in tried if row.removesuffix(" off").removesuffix(" on") not in named} == set()


def test_every_refusal_quotes_words_of_a_message() -> None:
    said = "\n".join(each for path in (ROOT / "vllm_rollout").rglob("*.py") for each in strings(path))
    quoted = [re.match(r'"([^"]+)"', row[1]) for row in REFUSED]
    assert all(quoted)
    assert len(quoted) > 10
    assert {words[1] for words in quoted if words and words[1] not in said} == set()

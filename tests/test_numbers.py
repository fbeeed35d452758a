"""Every number of a table of results follows from its file, and every entry of `numbers` is on its page."""

from __future__ import annotations

import re

import pytest

from tests.numbers import PAGES, ROOT, Quoted, computed, numbers_in, paths_of, rows

SHOWN = {page: list(rows((ROOT / page).read_text())) for page in PAGES}
ENTRIES = [(page, quoted) for page, entries in PAGES.items() for quoted in entries]


@pytest.mark.parametrize("page", PAGES)
def test_rows_and_entries_are_the_same(page: str) -> None:
    on_the_page = [(cells[0], cells[1]) for cells in SHOWN[page]]
    assert len(set(on_the_page)) == len(on_the_page) >= 5
    assert sorted(on_the_page) == sorted((quoted.what, quoted.against) for quoted in PAGES[page])


@pytest.mark.parametrize(
    ("page", "quoted"), ENTRIES, ids=lambda value: value.what if isinstance(value, Quoted) else value
)
def test_numbers_of_a_row_are_those_of_its_file(page: str, quoted: Quoted) -> None:
    (row,) = (cells for cells in SHOWN[page] if (cells[0], cells[1]) == (quoted.what, quoted.against))
    assert [number for cell in row[2:5] for number in numbers_in(cell)] == computed(quoted)
    links = re.findall(r"\]\(\.\./([^)]+)\)", " ".join(row[5:]))
    assert links == (paths_of(quoted) if row[5:] else [])


def test_a_number_is_read_as_it_is_printed() -> None:
    found = numbers_in("1,024 of 7B, SmolLM2-135M: −10 to -7 %, +0.004, 5, and 2.2")
    assert found == ["1,024", "-10", "-7", "0.004", "5", "2.2"]


def test_rows_of_other_tables_are_no_results() -> None:
    table = (
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n| what | against | result |\n|---|---|---|\n| [x](y.md) | `z` | **3** |\n"
    )
    assert list(rows(table)) == [["x", "z", "3"]]

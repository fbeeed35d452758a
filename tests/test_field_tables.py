"""docs/http.md says of every field what the table of fields says."""

from tests.support.field_tables import PAGE, TABLE, with_tables


def test_tables_of_the_page_are_those_of_the_fields():
    page = PAGE.read_text()
    assert {name for name, _ in TABLE.findall(page)} == {"rollout", "pruning", "own", "join", "session"}
    assert with_tables(page) == page, "make docs-tables"

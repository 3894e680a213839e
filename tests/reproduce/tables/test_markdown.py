"""Lines of Markdown tables: cells, and which side they keep to."""

from __future__ import annotations

from reproduce.tables.markdown import row_of, rule_of


def test_a_table_has_its_first_column_to_the_left() -> None:
    assert row_of("row", "1.5", "") == "| row | 1.5 |  |"
    assert rule_of(2) == "| --- | ---: | ---: |"

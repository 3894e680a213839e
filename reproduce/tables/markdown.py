"""Lines of a table in Markdown, for the blocks of docs/prediction.md."""

from __future__ import annotations

__all__ = ["row_of", "rule_of"]


def row_of(*cells: str) -> str:
    """Return a line of the table."""
    return f"| {' | '.join(cells)} |"


def rule_of(columns: int) -> str:
    """Return the line below the headings: one to the left, and `columns` to the right."""
    return row_of("---", *["---:"] * columns)

"""Make tables of records, as text and as Markdown."""

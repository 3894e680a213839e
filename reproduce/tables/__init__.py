"""Make tables of records (files of results), as text and as Markdown."""

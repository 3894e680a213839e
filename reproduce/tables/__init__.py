"""Tables of records, as text and as Markdown.
It may import `predict`, `numbers` and what lies below, not `run`."""

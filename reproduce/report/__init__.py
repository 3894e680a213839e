"""Report results: one page to look at, with tables and figures made from records.
It may import `tables` and what lies below, not `run` or `predict`."""

"""Report results: one page to look at, with tables and figures made from records."""

"""Report results on one page, with tables and figures that are made from records."""

"""Measure the library: the papers' models, and suites that time the pipeline on them."""

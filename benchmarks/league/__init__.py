"""The league: predictions of transformers' training, beside tables that other projects published.

docs/league.md explains it. `python -m benchmarks.league` predicts all tables.
"""

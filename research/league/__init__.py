"""Predict tables that others published and that decided nothing here: `python -m research.league` (docs/league.md)."""

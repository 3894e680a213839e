"""Generated cases are the same in every run, and are not timed: that is for benchmarks."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

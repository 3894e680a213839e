"""Generated cases are the same in every run, and nothing about them is timed: that is for benchmarks."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],  # it looks at the clock, and a busy machine would fail it
)
settings.load_profile("suite")

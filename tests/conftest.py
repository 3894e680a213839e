"""What all tests take for granted: generated cases that are the same in every run, and a Ctrl-C that interrupts."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite",
    deadline=None,  # nothing about them is timed: that is for benchmarks
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],  # it looks at the clock, and a busy machine would fail it
)
settings.load_profile("suite")

# A shell lets what it starts in the background ignore it; programs started by tests would, too, and go on for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

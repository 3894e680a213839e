"""What the failures' processes share: where the checkout is, and that none outlives who started it."""

from __future__ import annotations

import ctypes
import signal
import sys

from reproduce.machine.description import ROOT as ROOT


def die_with_parent() -> None:
    """Let this process be killed when its parent ends, where the system can do so."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1

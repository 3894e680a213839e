"""Clock cycles of tasks."""

from torchgpipe.engine.schedule import clock_cycles

__all__ = ["clock_cycles"]

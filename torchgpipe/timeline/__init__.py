"""Timelines show when each task of a training ran, on all ranks, in Perfetto (ui.perfetto.dev)."""

from torchgpipe.timeline.record import Recording, record

__all__ = ["Recording", "record"]

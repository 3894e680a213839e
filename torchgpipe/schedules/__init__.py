"""Schedules: which device does what, in which order, as data.

Dependencies between actions, times, memory and pictures are derived from the lists of actions.
"""

from torchgpipe.schedules.action import Action, Kind
from torchgpipe.schedules.named import draw, make
from torchgpipe.schedules.replay import Timeline
from torchgpipe.schedules.schedule import Schedule

__all__ = ["Action", "Kind", "Schedule", "Timeline", "draw", "make"]

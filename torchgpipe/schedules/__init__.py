"""Schedules: data that says which device does which action, and in which order.

A schedule has a list of actions for each device. From these lists, the library derives
dependencies, times, memory and pictures.
"""

from torchgpipe.schedules.action import Action, Kind
from torchgpipe.schedules.named import draw, make
from torchgpipe.schedules.replay import Timeline
from torchgpipe.schedules.schedule import Schedule

__all__ = ["Action", "Kind", "Schedule", "Timeline", "draw", "make"]

"""Refuse to change the balance, the schedule or the layers of a pipeline after it was made."""

from collections.abc import Sequence
from typing import NoReturn

from torch import nn

from torchgpipe.caught import shortened
from torchgpipe.engine.arrangement import ScheduleView
from torchgpipe.engine.batch import ProgramsEngine
from torchgpipe.task.stage import Stage
from torchgpipe.tensors.checkpoint import Mode


class Fixed(nn.Module):
    """A base class of pipelines: setting `balance`, `schedule` or a layer raises an error.

    The pipeline has already moved its layers to the devices, and prepared them for its schedule.
    """

    chunks: int
    checkpoint: Mode
    _balance: list[int]
    _programs_engine: ProgramsEngine
    _stages: Sequence[Stage]

    @property
    def balance(self) -> list[int]:
        """The number of layers of each partition."""
        return self._balance

    @balance.setter
    def balance(self, balance: object) -> NoReturn:
        """Refuse a new balance by an `AttributeError`: the layers are already on their devices.

        This setter always raises.
        """
        raise AttributeError(
            f"a pipeline keeps the balance that it was made with, {self._balance}; to use "
            f"{balance}, make a new pipeline of the layers with this balance, and a new optimizer"
        )

    @property
    def schedule(self) -> ScheduleView:
        """The schedule in use; its `report()` says how each stage's backward is split."""
        return ScheduleView(
            self._programs_engine.arrangement, self._stages, self.chunks, self.checkpoint
        )

    @schedule.setter
    def schedule(self, schedule: object) -> NoReturn:
        """Refuse a new schedule by an `AttributeError`: the engine was made for the old one.

        This setter always raises.
        """
        raise AttributeError(
            f"a pipeline keeps the schedule that it was made with, {self.schedule.name!r}; to use "
            f"{shortened(schedule)}, make a new pipeline of the layers with this schedule"
        )

    def __setitem__(self, index: object, layer: object = None) -> NoReturn:
        """Refuse to replace a layer of the pipeline: raise `TypeError`."""
        raise TypeError(
            f"layer {shortened(index)} of a pipeline cannot be replaced or removed; change the "
            "layers first, then wrap them in a new pipeline (what is inside of a layer may be "
            "replaced)"
        )

    __delitem__ = __setitem__

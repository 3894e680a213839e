"""Which engine runs a mini-batch: by the devices, and on the CPU by what there is to gain from threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from torchgpipe.copy import CopyStreams
from torchgpipe.graph import GraphEngine
from torchgpipe.inline import InlineEngine
from torchgpipe.microbatch import TensorOrTensors
from torchgpipe.schedule import overlaps
from torchgpipe.stage import Stage, training
from torchgpipe.workers import WorkersEngine

__all__ = ["SHORT_TASK", "EngineName", "Engines", "check_engine"]

# In seconds by count, for a mean task: below, threads that hand over tasks, and share Python's lock, cost more than
# their overlap gains.
SHORT_TASK = 200e-6
# In seconds by the clock: a task that was counted as short and takes this long does something that no count knows of.
LONG_TASK = 25 * SHORT_TASK

EngineName = Literal["auto", "graph", "inline", "workers"]
Engine = GraphEngine | InlineEngine | WorkersEngine


def check_engine(name: str, devices: Sequence[torch.device]) -> None:
    """Raise `ValueError` where there is no such engine, or it cannot serve the devices."""
    if name not in get_args(EngineName):
        raise ValueError(f"engine must be one of {', '.join(map(repr, get_args(EngineName)))}, but got {name!r}")
    if name in ("inline", "workers") and any(device.type != "cpu" for device in devices):
        raise ValueError(f"engine={name!r} is for CPU devices, but got {sorted({str(d) for d in devices})}")


class Engines:
    """The engines that may serve a pipeline; `name` asks for one of them, or for the best ("auto")."""

    def __init__(self, name: EngineName, stages: Sequence[Stage], *, dependency: bool, copy_streams: bool) -> None:
        on_cpu = all(stage.device.type == "cpu" for stage in stages)
        self._stages = stages
        # In training or not: elements of the micro-batch that was counted, and of the last one that was timed, and how
        # long a task of that took.
        self._counted: dict[bool, int] = {}
        self._timed: dict[bool, int] = {}
        self._task_seconds: dict[bool, float] = {}
        self.graph: GraphEngine | None = None
        self.inline: InlineEngine | None = None
        self.workers: WorkersEngine | None = None
        if name == "graph" or (name == "auto" and not on_cpu):
            copies = CopyStreams([stage.device for stage in stages], enabled=copy_streams)
            self.graph = GraphEngine(stages, copies, dependency=dependency)
        if name == "inline" or (name == "auto" and on_cpu):
            self.inline = InlineEngine(stages, self._task_seconds)
        if name == "workers" or (name == "auto" and on_cpu and len(stages) > 1):
            self.workers = WorkersEngine(stages, self._task_seconds)

    def choose(self, micro_batches: Sequence[TensorOrTensors]) -> Engine:
        """Return the engine for a mini-batch."""
        if self.workers is not None:
            mode, size = training(self._stages), _elements(micro_batches[0])
            if self.inline is None or not self._nothing_to_gain(len(micro_batches), size, mode):
                self._timed[mode] = max(1, size)
                return self.workers
        engine = self.graph or self.inline
        assert engine is not None
        return engine

    def _nothing_to_gain(self, m: int, size: int, mode: bool) -> bool:
        if not overlaps(m, len(self._stages)):
            return True
        if mode not in self._task_seconds:
            # The first mini-batch of its kind, which is counted and timed: until it is known that overlap gains
            # something, it must not cost memory.
            self._counted[mode] = self._timed[mode] = max(1, size)
            return True
        growth = size / self._counted[mode]
        by_count = sum(stage.efforts[mode].seconds(growth) for stage in self._stages) / len(self._stages)
        by_clock = self._task_seconds[mode] * min(1.0, size / self._timed[mode])
        return by_count < SHORT_TASK and by_clock < LONG_TASK


def _elements(micro_batch: TensorOrTensors) -> int:
    return sum(x.numel() for x in ((micro_batch,) if isinstance(micro_batch, Tensor) else micro_batch))

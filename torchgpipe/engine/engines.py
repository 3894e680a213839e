"""Which engine runs a pipeline: the devices decide, when it is made."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from torchgpipe.engine.graph import GraphEngine
from torchgpipe.engine.workers import WorkersEngine
from torchgpipe.task.stage import Stage

EngineName = Literal["auto", "graph", "workers"]
Engine = GraphEngine | WorkersEngine


def check_engine(name: str, devices: Sequence[torch.device]) -> None:
    """Raise `ValueError` where there is no such engine, or it cannot serve the devices."""
    if name not in get_args(EngineName):
        raise ValueError(f"engine must be one of {', '.join(map(repr, get_args(EngineName)))}, but got {name!r}")
    if name == "workers" and any(device.type != "cpu" for device in devices):
        raise ValueError(f"engine={name!r} is for CPU devices, but got {sorted({str(d) for d in devices})}")


def make_engine(name: EngineName, stages: Sequence[Stage], *, dependency: bool, copy_streams: bool) -> Engine:
    """Return the engine of this name; for `"auto"`, workers where several CPU partitions compute, or else the graph."""
    several_on_cpu = len(stages) > 1 and all(stage.device.type == "cpu" for stage in stages)
    if name == "workers" or (name == "auto" and several_on_cpu):
        return WorkersEngine(stages)
    return GraphEngine(stages, dependency=dependency, copy_streams=copy_streams)

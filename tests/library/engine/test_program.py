"""A program: what it says that it does. Its results are tested with those of the pipelines."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.engine.program import Program, in_order
from torchgpipe.task.ambient import Ambient
from torchgpipe.task.stage import Stage
from torchgpipe.tensors.item import Item


class Notes(nn.Module):
    """Note in forward and backward what the program says that it computes."""

    def __init__(self, seen: list[str | None]) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(1)), seen
        self.program: Any

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.program.computing)
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda _: self.seen.append(self.program.computing))
        return y


class Between:
    """Links of which each call notes what the program at them says that it computes."""

    def __init__(self, seen: list[str | None], item: Any) -> None:
        self.seen, self.item = seen, item
        self.program: Any

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> Any:
            self.seen.append(self.program.computing)
            return self.item

        return call


def test_what_a_program_computes_and_that_it_computes_nothing_while_it_waits() -> None:
    seen: list[str | None] = []
    layer = Notes(seen)
    stage = Stage(1, nn.Sequential(layer), torch.device("cpu"))
    stage.look()
    stage.connect([])
    modes = Ambient([stage.device])
    program = layer.program = Program(stage, 3, 2, 1, modes, in_order, None)
    forward: Any = Between(seen, Item((torch.ones(1),), True, (False,)))
    backward: Any = Between(seen, (torch.ones(1),))
    forward.program = backward.program = program

    program.forward(forward, [])
    assert tasks(seen) == [None, "forward of micro-batch 0", None, "forward of micro-batch 1", None]

    seen.clear()
    program.backward(backward, modes, [], keep=False)
    again = ["recomputation of micro-batch 0", None, "backward of micro-batch 0", None]
    assert tasks(seen) == [None, "backward of micro-batch 1", None, *again]
    assert (program.doing, program.computing) == ("backward of micro-batch 0", None)


def tasks(seen: list[str | None]) -> list[str | None]:
    """Return what was seen, without repetitions."""
    return [task for task, _ in groupby(seen)]

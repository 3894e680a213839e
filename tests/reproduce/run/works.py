"""Functions that return a model and its data (`Work`) to the processes that train the model.

The processes import these functions. So the functions are not in a module of tests.
"""

import os
import signal
from contextlib import closing
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from reproduce.run.engines.engines import Work
from reproduce.run.engines.processes import Processes
from torchgpipe.tensors.checkpoint import Mode

from ...behaviours.parts.layers import layer
from ...parts import Fails


def work(checkpoint: Mode = "never", dropout: float = 0.0) -> Work:
    torch.manual_seed(0)
    # Both outputs require grad. Between stages, schedules of PyTorch 2.12 refuse other tensors.
    split = layer(lambda y: (y, y.cos()))
    first = nn.Sequential(nn.Dropout(dropout), nn.Linear(4, 4), split)
    last = layer(lambda y, other: (y * other).tanh())  # a partition can have no parameters
    return Work(
        layers=nn.Sequential(first, last),
        balance=(1, 1),
        chunks=2,
        checkpoint=checkpoint,
        input=torch.rand(6, 4),
        target=torch.rand(6, 4),
        loss=nn.functional.mse_loss,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), 0.5),
    )


def failing() -> Work:
    """Return a model and its data. The last layer raises an error in the second training step."""
    fails = Fails()
    fails.fail("forward", ValueError("no such luck"), calls_before=2)
    layers = nn.Sequential(nn.Linear(4, 4), fails)
    return replace(work(), layers=layers)


def killed() -> Work:
    """Kill this process if it runs the last rank. Otherwise, wait for ever."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
    return work()


def ids(processes: Processes) -> list[int]:
    """Return the process ids of the ranks."""
    return [process.pid for process in processes._ranks.processes]


# As a script, this module starts processes, prints their ids, and waits to be killed.
if __name__ == "__main__":
    from tests.reproduce.run import works  # a name that other processes can import

    with closing(Processes(2)) as processes:
        processes.make("ranks", works.work)
        print(*ids(processes), flush=True)
        signal.pause()

"""Train for three steps, with a fault in the second step. tests/failures runs this program."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.state.saves import Saves

from ..parts import Fails
from .faults import (
    Keyboard,
    computes,
    cut_off,
    cuts_links,
    overflows,
    sleeps,
    takes_another_pipeline,
)
from .rows import Row

WORLD = 3
X = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))


def pipeline(row: Row) -> Any:
    """Build a pipeline of three partitions, each with a linear layer and a layer that can fail."""
    layers = nn.Sequential()
    for _ in range(WORLD):
        layers.extend([nn.Linear(4, 4), Fails()])
    schedule = row.schedule or "GPipe"
    options: dict[str, Any] = {"chunks": 2, "checkpoint": "always", "schedule": schedule}
    if row.engine == "ranks":
        return DistributedGPipe(layers, [2] * WORLD, timeout=row.timeout, **options)
    options |= {"devices": ["cpu"] * WORLD, "engine": row.engine}
    return GPipe(layers, [2] * WORLD, **options)


def train(rank: int, said: Any, row: Row, folder: Path) -> None:
    """Train for three steps. Send the test one message at the fault and one at the end."""
    os.setsid()  # so that only the test stops or continues this process
    os.dup2(os.open(folder / f"{rank}.errors", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    if row.engine == "ranks":
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
        )
    try:
        _Training(row, rank, folder, said).run()
    except BaseException as error:
        said.send((f"{type(error).__name__}: {error}", time.monotonic()))
        raise
    said.send(("", time.monotonic()))


class _Training:
    """A training in one process, with a fault from a row of the table of faults in rows.py."""

    def __init__(self, row: Row, rank: int, folder: Path, said: Any) -> None:
        self.row, self.folder, self.said = row, folder, said
        self.model = pipeline(row)
        self.saves = Saves(folder / "saves")
        # The fault happens in the criterion, while the process saves, or outside of the pipeline.
        self.point = Fails()
        if row.place in ("forward", "recompute", "backward"):
            self.point = self.model.partition[1] if row.engine == "ranks" else self.model[3]
        self.here = row.engine != "ranks" or rank == row.rank
        self.other = self.model
        if row.does is takes_another_pipeline:
            self.other = pipeline(row)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.scaler = ShardedGradScaler("cpu", init_scale=8.0, enabled=row.does is overflows)
        self.number = 0

    @property
    def goes_wrong(self) -> bool:
        """Whether the fault happens in the present step of this process."""
        return self.here and self.number == 2

    def happens(self) -> None:
        if self.row.engine == "ranks":
            # A rank that waits reports to the other ranks where it is. It does so after a quarter
            # of the timeout, but after a second at most. Sleep twice as long before the fault, so
            # that the other ranks have this report.
            time.sleep(2 * min(self.row.timeout / 4, 1.0))
        self.said.send(("", time.monotonic()))
        if self.row.does is cuts_links:
            cuts_links(self.folder / "cut")
        elif self.row.does in (sleeps, computes):
            self.row.does(1.5 * self.row.timeout)
        elif self.row.does is not None:
            self.row.does()

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        self.point.reach("criterion")
        return (output - target).square().mean()

    def watch_saving(self) -> None:
        """Whenever a save writes to a file, let the fault happen if it is due."""
        writer: Any = FileSystemWriter
        written = writer.write_data

        def write_data(*args: Any) -> Any:
            self.point.reach("saving")
            return written(*args)

        writer.write_data = write_data

    def step(self) -> list[Tensor]:
        self.number += 1
        if self.goes_wrong:
            self.point.at(self.row.place, self.happens)
        self.point.reach("outside")
        self.model.zero_grad()
        if self.row.schedule:
            self.model.step(self.criterion, X, X, scaler=self.scaler)
        else:
            model = self.other if self.goes_wrong else self.model
            loss = model.loss(self.criterion, X, X)
            if self.row.does is not None or not self.goes_wrong:
                self.scaler.scale(loss).backward()
        if self.row.does is overflows:
            self.update()
        if self.row.place == "saving":
            self.saves.save(self.number, self.model, None)
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def update(self) -> None:
        """Update the parameters, unless a gradient is infinite on any rank."""
        if self.goes_wrong:
            first = next(self.model.parameters())
            first.grad.fill_(torch.inf)
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        assert self.scaler.get_scale() == (8.0 if self.number == 1 else 4.0)

    def run(self) -> None:
        """Train the three steps."""
        self.watch_saving()
        row = self.row
        if isinstance(row.does, Keyboard):
            row.does.listen()
        if row.does is cuts_links and not self.here:
            cut = self.folder / "cut"
            threading.Thread(target=cut_off, args=[cut], daemon=True).start()
        expected = self.step()
        try:
            self.step()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # more signals can still arrive
            if row.engine == "workers" and isinstance(row.does, Keyboard) and row.does.lasts < 1:
                assert row.does.over
                assert all(map(torch.equal, self.step(), expected))
            raise
        except Exception:
            assert not row.schedule or all(p.grad is None for p in self.model.parameters())
            raise
        assert all(map(torch.equal, self.step(), expected))

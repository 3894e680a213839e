"""What a process of a row of the table does: it trains three steps, in the second of which something goes wrong."""

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
from .faults import SILENCE, Keyboard, cut_off, cuts_links, overflows, takes_another_pipeline
from .rows import Row

WORLD = 3
X = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))


def pipeline(engine: str, schedule: str = "") -> Any:
    """Return a pipeline of three partitions, each a linear layer and one that can be made to fail."""
    layers = nn.Sequential(*(layer for _ in range(WORLD) for layer in (nn.Linear(4, 4), Fails())))
    options: dict[str, Any] = {"chunks": 2, "checkpoint": "always", "schedule": schedule or "GPipe"}
    if engine == "ranks":
        return DistributedGPipe(layers, [2] * WORLD, timeout=SILENCE, **options)
    return GPipe(layers, [2] * WORLD, devices=["cpu"] * WORLD, engine=engine, **options)  # type: ignore[arg-type]


def train(rank: int, said: Any, row: Row, folder: Path) -> None:
    """Say when it comes to the place, and how the training ends."""
    os.setsid()  # so that nobody but the test stops or continues it
    os.dup2(os.open(folder / f"{rank}.errors", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    if row.engine == "ranks":
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
        )
    try:
        _steps(row, rank, folder, said)
    except BaseException as error:
        said.send((f"{type(error).__name__}: {error}", time.monotonic()))
        raise
    said.send(("", time.monotonic()))


def _steps(row: Row, rank: int, folder: Path, said: Any) -> None:
    model, saves = pipeline(row.engine, row.schedule), Saves(folder / "saves")
    writer: Any = FileSystemWriter
    written = writer.write_data
    point = Fails()  # outside, in the criterion, and while it saves
    if row.place in ("forward", "recompute", "backward"):
        point = model.partition[1] if row.engine == "ranks" else model[3]
    number, here = 0, row.engine != "ranks" or rank == row.rank
    other = pipeline(row.engine) if row.does is takes_another_pipeline else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, enabled=row.does is overflows)

    def happens() -> None:
        if row.engine == "ranks":
            time.sleep(SILENCE / 2)  # in which others hear of the place, also on a busy machine
        said.send(("", time.monotonic()))
        if row.does is cuts_links:
            cuts_links(folder / "cut")
        elif row.does is not None:
            row.does()

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        point.reach("criterion")
        return (output - target).square().mean()

    def write_data(*args: Any) -> Any:
        point.reach("saving")
        return written(*args)

    def step() -> list[Tensor]:
        nonlocal number
        number += 1
        if here and number == 2:
            point.at(row.place, happens)
        point.reach("outside")
        model.zero_grad()
        if row.schedule:
            model.step(criterion, X, X, scaler=scaler)
        else:
            loss = (other if here and number == 2 else model).loss(criterion, X, X)
        if not row.schedule and (row.does is not None or not here or number != 2):
            scaler.scale(loss).backward()
        if row.does is overflows:
            if here and number == 2:
                next(model.parameters()).grad.fill_(torch.inf)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (8.0 if number == 1 else 4.0)
        if row.place == "saving":
            saves.save(number, model, None)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    writer.write_data = write_data
    if isinstance(row.does, Keyboard):
        row.does.listen()
    if row.does is cuts_links and not here:
        threading.Thread(target=cut_off, args=[folder / "cut"], daemon=True).start()
    expected = step()
    try:
        step()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is still on its way
        if row.engine == "workers" and isinstance(row.does, Keyboard) and row.does.lasts < 1:
            assert row.does.over
            assert all(map(torch.equal, step(), expected))
        raise
    except Exception:
        assert not row.schedule or all(p.grad is None for p in model.parameters())
        raise
    assert all(map(torch.equal, step(), expected))

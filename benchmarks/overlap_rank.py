"""PyTorch's own `ScheduleGPipe`, a process per partition linked by gloo, for `benchmarks.overlap`."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.child import Child, serve


class ScheduleGPipe:
    """Two processes that wait to be asked for a step."""

    def __init__(self, size: Sequence[int], balance: Sequence[int], batch: int, chunks: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        self._ranks = [
            Child("overlap_rank.py", environment={"RANK": str(rank), "WORLD_SIZE": "2", **address}) for rank in range(2)
        ]
        self._both("build", size, balance, batch, chunks)

    def step(self) -> float:
        """Run one step; return the seconds until both ranks were done."""
        began = time.perf_counter()
        self._both("step")
        return time.perf_counter() - began

    def close(self) -> None:
        """End both processes."""
        for rank in self._ranks:
            rank.close()

    def _both(self, *request: Any) -> None:
        for rank in self._ranks:
            rank.send(*request)
        for rank in self._ranks:
            rank.receive()


class Flat(nn.Module):
    """Layers that take and return tensors in a row, as a stage does; the cells pass a tuple."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        output: Tensor | tuple[Tensor, ...] = self.part(tensors if len(tensors) > 1 else tensors[0])
        return output


class Rank:
    """Build a partition, then run steps."""

    def __call__(self, what: str, *arguments: Any) -> None:
        try:
            getattr(self, what)(*arguments)
        except RuntimeError as error:
            raise SystemExit(f"ScheduleGPipe: {error}") from None  # or the other rank would wait for this one

    def build(self, size: Sequence[int], balance: Sequence[int], batch: int, chunks: int) -> None:
        """Meet the other rank, and make this one's layers and data."""
        import torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining import ScheduleGPipe as Schedule

        from reproduce.models import amoebanetd

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        torch.manual_seed(0)
        model = amoebanetd(*size)
        self.part = model[: balance[0]] if rank == 0 else model[balance[0] :]
        x, target = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
        self.step_takes: dict[str, Any] = {"target": target, "losses": []} if rank else {}
        self.inputs = [] if rank else [x]
        stage = PipelineStage(Flat(self.part), rank, 2, torch.device("cpu"))
        self.schedule = Schedule(stage, n_microbatches=chunks, loss_fn=nn.functional.cross_entropy)

    def step(self) -> None:
        """Run one step with the other rank."""
        self.part.zero_grad()
        self.schedule.step(*self.inputs, **self.step_takes)


if __name__ == "__main__":
    serve(Rank())

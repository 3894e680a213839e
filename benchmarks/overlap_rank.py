"""PyTorch's own `ScheduleGPipe`, a process per partition linked by gloo, for `benchmarks.overlap`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent


class ScheduleGPipe:
    """Two processes that wait for a line and then run one step each."""

    def __init__(self, size: Sequence[int], balance: Sequence[int], batch: int, chunks: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        configuration = json.dumps([list(size), list(balance), batch, chunks])
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "benchmarks.overlap_rank", configuration],
                cwd=ROOT,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for rank in self._ranks:
            _line(rank.stdout)

    def step(self) -> float:
        """Run one step; return the seconds until both ranks were done."""
        began = time.perf_counter()
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("step\n")
            rank.stdin.flush()
        for rank in self._ranks:
            _line(rank.stdout)
        return time.perf_counter() - began

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.communicate()


def _line(stream: IO[str] | None) -> str:
    assert stream is not None
    line = stream.readline()
    if not line:
        raise subprocess.SubprocessError("a rank ended early")
    return line


def main() -> None:
    """Be one rank: build its partition, then run a step for each line on standard input."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import ScheduleGPipe as Schedule

    from reproduce.models import amoebanetd

    (layers, filters), balance, batch, chunks = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = amoebanetd(layers, filters)
    part = model[: balance[0]] if rank == 0 else model[balance[0] :]
    x = torch.randn(batch, 3, 224, 224)
    target = torch.randint(1000, (batch,))

    class Flat(nn.Module):
        # A stage takes and returns tensors in a row; the cells pass a tuple.
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
            output: Tensor | tuple[Tensor, ...] = self.part(tensors if len(tensors) > 1 else tensors[0])
            return output

    stage = PipelineStage(Flat(part), rank, 2, torch.device("cpu"))
    schedule = Schedule(stage, n_microbatches=chunks, loss_fn=nn.functional.cross_entropy)
    print("ready", flush=True)
    for _ in sys.stdin:
        part.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=[])
        print("done", flush=True)


if __name__ == "__main__":
    main()

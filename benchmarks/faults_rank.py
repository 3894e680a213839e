"""What a rank does in a case of `benchmarks.faults`: it trains, and at one point something goes wrong with one of them.

Ranks are forked from a process that has imported torch and has no threads, and then run and end as any script does. It
reads cases from its input, and writes each rank's process, and later how and when that ended. Under torchrun, which
starts ranks in its own way, a case is the only argument.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimizers need; here once, instead of in each rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from benchmarks.child import die_with_parent
from benchmarks.faults_cases import RANKS, Case
from benchmarks.two_machines import move_to
from torchgpipe import is_recomputing
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.saves import Saves

ON_PURPOSE = "the layer's own message"
AT = {"first mini-batch": (0, "forward")}
"""The mini-batch and the point of a phase; others are points themselves, in mini-batch 2."""
MICRO_BATCH = 1  # of which a layer's task goes wrong; four, three of which are recomputed
SUDDEN = ("killed", "stopped", "link cut")  # faults that the rank cannot tell of


def mark(case: Case, name: str) -> None:
    """Tell other ranks and the outside process when something has happened."""
    part = Path(case.folder, f".{name}.{os.getpid()}")
    part.write_text(repr(time.monotonic()))
    part.rename(Path(case.folder, name))


def wait(case: Case, name: str) -> None:
    """Wait until something has happened."""
    while not Path(case.folder, name).exists():
        time.sleep(0.005)


class Training:
    """The training of one rank."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.number, self.point = AT.get(case.phase, (2, case.phase))
        self.step = 0
        self.happened = False

    def run(self) -> None:
        """Train, save and evaluate in turn."""
        case = self.case
        if case.phase == "loss" and self.rank == case.victim < RANKS - 1:
            threading.Thread(target=self._meanwhile, daemon=True).start()
        layers = nn.Sequential(*(layer for j in range(RANKS) for layer in (nn.Linear(16, 16), Point(self, j))))
        model = DistributedGPipe(layers, [2] * RANKS, chunks=RANKS, silence=case.silence)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_pre_hook(lambda *_: self.at("optimizer"))
        saves = Saves(Path(case.folder, "saves"))
        for x, target in self._batches():
            loss = model.loss(self._criterion, x, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if self.step:
                saves.save(self.step, model, optimizer)
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
            self.step += 1
        dist.destroy_process_group()

    def at(self, point: str, micro_batch: int = MICRO_BATCH) -> None:
        """Let it happen if this is the point where it is to happen, on this rank."""
        here = self.step == self.number and point == self.point and micro_batch == MICRO_BATCH
        if here and self.rank == self.case.victim and not self.happened:
            self.happened = True
            if self.case.fault in SUDDEN:
                time.sleep(self.case.silence / 3)  # others hear more often what it does, and no more after this
            mark(self.case, "fault")
            HAPPENS[self.case.fault](self.case)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.case.steps):
            self.at("loading data")
            yield torch.rand(8, 16), torch.rand(8, 16)

    def _criterion(self, output: Tensor, target: Tensor) -> Tensor:
        self.at("loss")
        if self.case.phase == "loss" and self.step == self.number and self.case.victim < RANKS - 1:
            mark(self.case, "loss")
            time.sleep(self.case.silence / 2)  # meanwhile it happens to another rank
        return (output - target).square().mean()

    def _meanwhile(self) -> None:
        """Let it happen to this rank while the last one computes the loss."""
        wait(self.case, "loss")
        self.at("loss")


class Point(nn.Module):
    """A layer of one rank, in whose tasks something may happen."""

    def __init__(self, training: Training, own: int) -> None:
        super().__init__()
        self._training, self._own, self._counts = training, own, Counter[str]()

    def reached(self, point: str) -> None:
        """Count micro-batches; those of the backward come in the opposite order."""
        if self._own != self._training.rank:
            return
        count = self._counts[point] % (RANKS - (point == "recomputation"))
        self._counts[point] += 1
        order = {"recomputation": RANKS - 2 - count, "backward": RANKS - 1 - count}
        self._training.at(point, order.get(point, count))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.reached("recomputation" if is_recomputing() else "forward")
        else:
            self.reached("evaluation")
        y = x.view_as(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.reached("backward"))
        return y


def _stopped(case: Case) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _killed(case: Case) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raises(case: Case) -> None:
    raise ValueError(ON_PURPOSE)


def _out_of_memory(case: Case) -> None:
    """Allow 64 MB more than there are, and fill them."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**26, resource.RLIM_INFINITY))
    filled = []
    while True:
        filled.append(torch.zeros(2**20))


def _hangs(case: Case) -> None:
    while True:
        time.sleep(1000)


def _waits(case: Case) -> None:
    wait(case, "done")  # by the outside process


def _pauses(case: Case) -> None:
    time.sleep(2 * case.silence)


def _computes(case: Case) -> None:
    end = time.monotonic() + 2 * case.silence
    while time.monotonic() < end:
        pass


def _another_process(case: Case) -> None:
    busy = f"import time\nend = time.monotonic() + {2 * case.silence}\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)


def _compiles(case: Case) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{case.folder}/compiled"
    layers = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())))
    with torch.enable_grad():  # a checkpointed task has none
        torch.compile(layers)(torch.rand(2, 16)).sum().backward()


HAPPENS: dict[str, Callable[[Case], None]] = {
    "killed": _killed,
    "stopped": _stopped,
    "raising": _raises,
    "out of memory": _out_of_memory,
    "hang": _hangs,
    "link cut": _waits,
    "a pause": _pauses,
    "a long computation": _computes,
    "another process that computes": _another_process,
    "torch.compile": _compiles,
    "all ranks stopped, and continued": _waits,
}


def serve() -> None:
    """Fork the ranks of each case that is read; return on a rank."""
    die_with_parent()
    for line in sys.stdin:
        case = Case(*json.loads(line))
        ranks: dict[int, int] = {}
        for rank in range(RANKS):
            process = os.fork()
            if not process:
                enter(case, rank)
                return
            ranks[process] = rank
        print(json.dumps([*ranks]), flush=True)
        for _ in range(RANKS):
            process, status = os.wait()
            said = [ranks[process], os.waitstatus_to_exitcode(status), time.monotonic()]
            print(json.dumps(said), flush=True)


def enter(case: Case, rank: int) -> None:
    """Become a rank, and train."""
    die_with_parent()
    for number, name in enumerate((os.devnull, f"{case.folder}/{rank}.printed", f"{case.folder}/{rank}.error")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    if case.networks:
        move_to(case.networks[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = "link"
    store = dist.FileStore(f"{case.folder}/store", RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    train(case)


def train(case: Case) -> None:
    """Train on this rank, one of all."""
    training = Training(case, dist.get_rank())
    written = FileSystemWriter.write_data

    def write_data(*args: Any, **kwargs: Any) -> Any:
        training.at("saving")
        return written(*args, **kwargs)

    FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    training.run()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(Case(*json.loads(sys.argv[1])))
    else:
        gc.freeze()  # or each rank would copy, as it ends, all that there is of modules
        serve()

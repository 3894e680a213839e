"""The layers of the soak, in which faults spring, and the traps that let them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.soak_plan import IN_LAYERS, Episode, Fault, Place
from benchmarks.soak_reports import Report
from torchgpipe import is_recomputing
from torchgpipe.skip import Namespace, pop, skippable, stash


class Trap:
    """A place at which a fault springs in this process, when that is passed for the last time of so many."""

    def __init__(self, fault: Fault, layer: int, passes: int, report: Report, released: Path) -> None:
        self._fault, self._layer, self._left, self._report = fault, layer, passes, report
        self._released = released
        self._set = fault.place == "loading"

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._set = self._left > 0 and step == self._fault.step

    def begin_saving(self) -> None:
        """Let a fault that comes some time after the beginning of a save have its time from now on."""
        if self._set and self._fault.after is not None:
            timer = threading.Timer(self._fault.after, self._spring)
            timer.daemon = True
            timer.start()

    def pass_by(self, place: Place, layer: int | None) -> None:
        """Pass by a place, which may be in a layer."""
        if self._set and self._fault.place == place and self._fault.after is None and layer in (None, self._layer):
            self._left -= 1
            if not self._left:
                self._set = False
                self._spring()

    def _spring(self) -> None:
        kind, place, slow = self._fault.kind, self._fault.place, self._fault.kind == "slow"
        self._report("slow" if slow else "fault")
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "raising":
            raise ArithmeticError(f"a fault in {place}")
        elif kind == "out of memory":
            torch.empty(2**55)
        elif kind in ("hanging", "link cut"):  # which the soak does
            while not self._released.exists():
                time.sleep(0.05)
        elif place in IN_LAYERS:  # computing all the time
            end = time.monotonic() + SLOW
            while time.monotonic() < end:
                torch.ones(1000).sum()
        else:
            time.sleep(SLOW)


traps: list[Trap] = []
SLOW = 4.5  # seconds, more than the silence


def pass_by(place: Place, layer: int | None = None) -> None:
    """Say that this process is at a place, which may be in a layer."""
    for trap in traps:
        trap.pass_by(place, layer)


class Passed(torch.autograd.Function):
    """Pass by a place in a layer's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: int) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        pass_by("backward", ctx.layer)
        return grads[0], None


class Layer(nn.Module):
    """A layer that passes by places where faults spring. Each has a parameter, so that each rank has one."""

    def __init__(self, k: int, width: int) -> None:
        super().__init__()
        self.k = k
        self.shift = nn.Parameter(torch.zeros(width))

    def begin(self) -> None:
        """Pass by a place in forward."""
        pass_by("recomputation" if is_recomputing() else "forward" if self.training else "evaluation", self.k)

    def end(self, x: Tensor) -> Tensor:
        """Return the output."""
        y: Tensor = Passed.apply(x + self.shift, self.k)
        return y

    def _save_to_state_dict(self, *args: Any) -> None:
        pass_by("saving", self.k)
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        pass_by("loading", self.k)
        super()._load_from_state_dict(*args)


class Plain(Layer):
    """A layer around a module."""

    def __init__(self, k: int, width: int, inner: nn.Module, *, residual: bool = False) -> None:
        super().__init__(k, width)
        self.inner, self.residual = inner, residual

    def forward(self, x: Tensor) -> Tensor:
        self.begin()
        y = self.inner(x)
        return self.end(x + y if self.residual else y)


class Channels(nn.Module):
    """Batch norm over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return y


@skippable(stash=["skip"])
class Stash(Layer):
    """Stash the input."""

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        self.begin()
        yield stash("skip", x)
        return self.end(x)


@skippable(pop=["skip"])
class Pop(Layer):
    """Add what was stashed."""

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        self.begin()
        skip = yield pop("skip")
        return self.end(x + torch.tanh(skip))


def layers_of(episode: Episode) -> nn.Sequential:
    """Build an episode's layers, the same at every call."""
    torch.manual_seed(episode.seed * 100_003 + episode.number)
    spaces: dict[str, Namespace] = {}
    width, layers = episode.width, nn.Sequential()
    for k, name in enumerate(episode.layers):
        kind, _, which = name.partition(" ")
        if kind in ("stash", "pop"):
            made: Any = (Stash if kind == "stash" else Pop)(k, width)
            made.isolate(spaces.setdefault(which, Namespace()))
        elif kind == "linear":
            made = Plain(k, width, nn.Sequential(nn.Linear(width, width), nn.Tanh()))
        elif kind == "residual":
            inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            made = Plain(k, width, inner, residual=True)
        elif kind == "dropout":
            made = Plain(k, width, nn.Dropout(0.2))
        else:
            made = Plain(k, width, {"norm": nn.LayerNorm, "batch": Channels}[kind](width))
        layers.append(made)
    return layers

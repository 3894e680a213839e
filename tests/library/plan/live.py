"""Count live bytes, by device, of a real pipeline on `meta`: `meta:0`, `meta:1`, … tell devices apart in copies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe.partitioned
from reproduce.run.live_bytes import LiveBytes, Watch
from torchgpipe import GPipe
from torchgpipe.plan.count.count import Counts, count
from torchgpipe.tensors.microbatch import mapped


class Live(LiveBytes):
    """Count what is on `meta`: an optimizer's counters of steps are on the host."""

    last = 0
    """The device of the latest tensor."""

    def add(self, tensors: Iterable[Tensor], device: int) -> None:
        super().add([x for x in tensors if x.is_meta], device)

    def device_of(self, tensors: Iterable[Tensor]) -> int:
        known = (self._known.get(id(x.untyped_storage())) for x in tensors if x.numel())
        self.last = next((found[0] for found in known if found is not None), self.last)
        return self.last


class Copies(Watch):
    """A copy belongs to the device that it goes to."""

    counter: Live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = (kwargs or {}).get("device") if "_to_copy" in str(func) else None
        self.device = None if target is None else target.index or 0
        self.counter.last = self.counter.last if self.device is None else self.device
        return super().__torch_dispatch__(func, types, args, kwargs)


@functools.cache
def counted(build: Callable[[], nn.Sequential], shape: tuple[int, ...]) -> Counts:
    return count(build(), torch.empty(shape))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


def real_peaks(
    model: nn.Sequential,
    x: Tensor,
    balance: Sequence[int],
    chunks: int,
    checkpoint: Any,
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    *,
    zeroed: bool = False,
) -> list[int]:
    """Return each device's peak in the second of two steps, the optimizer's included.

    The mini-batch is on the first device, and stays there; the output stays until parameters are updated.
    """
    with pytest.MonkeyPatch.context() as patch:
        # The mini-batch stays where it is.
        patch.setattr(
            torchgpipe.partitioned, "mapped", lambda change, x: mapped(change, x) if change is torch.clone else x
        )
        devices = [f"meta:{j}" for j in range(len(balance))]
        pipeline = GPipe(model.to("meta"), balance, devices=devices, chunks=chunks, checkpoint=checkpoint)
        # All are on one device, `meta`; groups are updated apart, as devices are.
        trained = [[p for p in partition.parameters() if p.requires_grad] for partition in pipeline.partitions]
        optimizer = make([{"params": parameters} for parameters in trained if parameters])
        live = Live(len(balance))
        for j, partition in enumerate(pipeline.partitions):
            live.add([*partition.parameters(), *partition.buffers()], j)
            for parameter in partition.parameters():  # some optimizers begin with their state
                live.add(filter(torch.is_tensor, optimizer.state.get(parameter, {}).values()), j)
        x = x.to("meta")
        live.add([x], 0)
        with Copies(live, None):
            for _ in range(2):
                live.peak = list(live.live)
                output = pipeline(x)
                live.last = len(balance) - 1
                gradient = torch.empty_like(output)
                output.backward(gradient)
                del gradient
                optimizer.step()
                optimizer.zero_grad(set_to_none=not zeroed)
                del output
    return list(live.peak)

"""Count live bytes, by device, of a real pipeline on `meta`: `meta:0`, `meta:1`, … tell devices apart in copies."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchgpipe.partitioned
from torchgpipe import GPipe
from torchgpipe.microbatch import mapped
from torchgpipe.plan.count import Counts, count
from torchgpipe.plan.operators import tensors_in


class Live(TorchDispatchMode):
    """A tensor belongs where it was copied to, or where the first tensor lives that it was made from."""

    def __init__(self, devices: int) -> None:
        super().__init__()
        self.owner: dict[int, int] = {}
        self.live = [0] * devices
        self.peak = [0] * devices
        self.last = 0

    def note(self, x: Tensor, device: int) -> None:
        storage = x.untyped_storage()
        if x.is_meta and id(storage) not in self.owner:  # an optimizer's counters of steps are on the host
            self.owner[id(storage)] = device
            weakref.finalize(storage, self.forget, id(storage), storage.nbytes(), device).atexit = False
            self.live[device] += storage.nbytes()
            self.peak[device] = max(self.peak[device], self.live[device])

    def forget(self, key: int, nbytes: int, device: int) -> None:
        del self.owner[key]
        self.live[device] -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        device: int | None = None
        if "_to_copy" in str(func) and kwargs and kwargs.get("device") is not None:
            device = kwargs["device"].index or 0
        else:
            known = (self.owner.get(id(x.untyped_storage())) for x in tensors_in((args, kwargs)) if x.numel())
            device = next((owner for owner in known if owner is not None), None)
        self.last = self.last if device is None else device
        for x in tensors_in(result):
            self.note(x, self.last)
        return result


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
            for tensor in (*partition.parameters(), *partition.buffers()):
                live.note(tensor, j)
            for parameter in partition.parameters():  # some optimizers begin with their state
                for tensor in filter(torch.is_tensor, optimizer.state.get(parameter, {}).values()):
                    live.note(tensor, j)
        x = x.to("meta")
        live.note(x, 0)
        with live:
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

"""Measure the peak memory of a real pipeline on `meta` devices, by counting live tensors."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe.layers.batches
from reproduce.run.live_bytes import LiveBytes, LiveBytesMode
from torchgpipe import GPipe
from torchgpipe.tensors.microbatch import mapped


class OnMeta(LiveBytes):
    """Counts the live bytes of tensors on `meta`.

    Tensors on the host, such as the step counts of optimizers, are not counted.
    """

    last = 0
    """The device of the latest tensor, and of new tensors that are made from no known tensor."""

    def add(self, tensors: Iterable[Tensor], device: int) -> None:
        on_meta = [x for x in tensors if x.is_meta]
        super().add(on_meta, device)

    def device_of(self, tensors: Iterable[Tensor]) -> int:
        for x in tensors:
            if x.numel() == 0:
                continue
            known = self._known.get(id(x.untyped_storage()))
            if known is not None:
                self.last = known[0]
                break
        return self.last


class Copies(LiveBytesMode):
    """A dispatch mode that counts live bytes. A copied tensor counts for the device of the copy."""

    counter: OnMeta

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = None
        if "_to_copy" in str(func) and kwargs:
            target = kwargs.get("device")
        if target is None:
            self.device = None
        else:
            self.device = target.index or 0
            self.counter.last = self.device
        return super().__torch_dispatch__(func, types, args, kwargs)


def real_peaks(
    model: nn.Sequential,
    x: Tensor,
    balance: Any,
    chunks: int,
    checkpoint: Any,
    make: Any,
    zeroed: bool = False,
    loss: Callable[[Tensor], Tensor] | None = None,
) -> list[int]:
    """Run two steps with an optimizer, and return each device's peak live bytes in the second step.

    During the step, the mini-batch stays alive on the first device. The output stays alive until
    the parameters are updated. The backward begins at `loss(output)`, or, without `loss`, at the
    output.
    """

    def mapped_if_cloned(change: Any, x: Any) -> Any:
        """Replace the library's `mapped`, which applies a function `change` to all tensors in `x`.

        The library calls `mapped` to clone tensors, and to copy them to another device. All devices
        are `meta` here, so a copy would be no new tensor, and is left out.
        """
        return mapped(change, x) if change is torch.clone else x

    n = len(balance)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchgpipe.layers.batches, "mapped", mapped_if_cloned)
        devices = [f"meta:{j}" for j in range(n)]
        model = model.to("meta")
        pipeline = GPipe(model, balance, devices=devices, chunks=chunks, checkpoint=checkpoint)
        # Each device has its own parameter group, so that its parameters are updated separately.
        groups = []
        for partition in pipeline.partitions:
            trained = [p for p in partition.parameters() if p.requires_grad]
            if trained:
                groups.append({"params": trained})
        optimizer = make(groups)
        live = OnMeta(n)
        for j, partition in enumerate(pipeline.partitions):
            live.add([*partition.parameters(), *partition.buffers()], j)
            for parameter in partition.parameters():
                # Some optimizers create their state before the first step.
                state = optimizer.state.get(parameter, {})
                live.add(filter(torch.is_tensor, state.values()), j)
        x = x.to("meta")
        live.add([x], 0)
        with Copies(live, None):
            for _ in range(2):
                live.peak = list(live.live)
                output = pipeline(x)
                live.last = n - 1
                if loss is None:
                    gradient = torch.empty_like(output)
                    output.backward(gradient)
                    del gradient
                else:
                    loss(output).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=not zeroed)
                del output
    return list(live.peak)

"""Run training steps of one torchgpipe, or of a plain loop, on one device, for `benchmarks.steps`."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as plain_checkpoint

from benchmarks.child import serve
from benchmarks.pipelines import evenly
from reproduce.models import amoebanetd, resnet101, unet

Model = tuple[Callable[[], nn.Sequential], tuple[int, ...]]  # layers, the shape of a sample
MODELS: dict[str, dict[str, Model]] = {
    "full": {
        "AmoebaNet-D": (lambda: amoebanetd(18, 256), (3, 224, 224)),
        "U-Net": (lambda: unet(5, 5, 64), (3, 192, 192)),
        "ResNet-101": (resnet101, (3, 224, 224)),
    },
    "small": {
        "AmoebaNet-D": (lambda: amoebanetd(3, 8, num_classes=10), (3, 224, 224)),
        "U-Net": (lambda: unet(3, 1, 8), (3, 32, 32)),
    },
}
PRECISIONS = ("fp32", "tf32", "bf16")
WARM_UP = 2


def plain(
    layers: nn.Sequential, balance: Sequence[int], device: torch.device, m: int, checkpointed: int
) -> Callable[[Tensor], Tensor]:
    """Return a loop over micro-batches and partitions, the first `checkpointed` micro-batches under
    `torch.utils.checkpoint`; skips are handed on as arguments."""
    from torchgpipe.microbatch import Flat
    from torchgpipe.skip.layout import skip_layout
    from torchgpipe.skip.scope import SkipKey
    from torchgpipe.stage import Stage

    partitions = [layers[a:b] for a, b in pairwise([0, *accumulate(balance)])]
    stages = [Stage(j, partition, device) for j, partition in enumerate(partitions)]
    for stage in stages:
        stage.look()
        stage.connect(skip_layout(partitions))

    def run(x: Tensor) -> Tensor:
        outputs = []
        for i, micro_batch in enumerate(x.chunk(m)):
            flat: Flat = (micro_batch,)
            atomic = True
            stashed: dict[SkipKey, Tensor | None] = {}
            for stage in stages:
                flat = (*flat, *(stashed.pop(arrival.key) for arrival in stage.arrivals))
                if i < checkpointed:
                    flat, atomic = plain_checkpoint(stage.run, flat, atomic, use_reentrant=False)
                else:
                    flat, atomic = stage.run(flat, atomic)
                for departure in reversed(stage.departures):
                    stashed[departure.key] = flat[-1]
                    flat = flat[:-1]
            outputs.append(flat[0])
        return torch.cat(outputs)  # type: ignore[arg-type]

    return run


class Steps:
    """One configuration that is ready to run.

    Raises:
        ValueError: it would not compute in the precision that was asked for.
        torch.OutOfMemoryError: the device is too small.
    """

    def __init__(self, how: str, asked: dict[str, Any]) -> None:
        self.device = torch.device(asked["device"])
        build, shape = MODELS[asked["scale"]][asked["model"]]
        layout = torch.channels_last if asked["layout"] == "channels_last" else torch.contiguous_format
        tf32 = asked["precision"] == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        self.autocast = asked["precision"] == "bf16"
        if self.device.type == "cpu" and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

        torch.manual_seed(0)
        self.layers = build().to(self.device, memory_format=layout)  # type: ignore[call-overload]
        self.x = torch.rand(asked["batch"], *shape).to(self.device, memory_format=layout)
        balance = evenly(self.layers, asked["n"])
        m, mode = asked["m"], asked["checkpoint"]
        self.model: Callable[[Tensor], Tensor]
        if how == "plain":
            checkpointed = {"always": m, "except_last": len(self.x.chunk(m)) - 1, "never": 0}[mode]
            self.model = plain(self.layers, balance, self.device, m, checkpointed)
        else:
            from torchgpipe import GPipe

            devices = [self.device] * len(balance)
            self.model = GPipe(self.layers, balance, devices=devices, chunks=m, checkpoint=mode)
        for _ in range(WARM_UP):
            found = self.run().dtype
        if self.autocast and found != torch.bfloat16:
            raise ValueError(f"computes in {found} under autocast")

    def run(self) -> Tensor:
        """Run forward, loss and backward; return the output."""
        self.layers.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext():
            output = self.model(self.x)
        output.float().square().mean().backward()
        return output.detach()

    def seconds(self) -> float:
        """Return how long a step takes until the device is done with it."""
        self._finish()
        began = time.perf_counter()
        self.run()
        self._finish()
        return time.perf_counter() - began

    def peak(self) -> int | None:
        """Return the bytes that a step allocates at most, None on a CPU."""
        if self.device.type != "cuda":
            return None
        self._finish()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run()
        self._finish()
        return torch.cuda.max_memory_allocated(self.device)

    def waits(self) -> int | None:
        """Return how often the host waits for the device within a step, None on a CPU."""
        if self.device.type != "cuda":
            return None
        self._finish()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self.run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(one.message) for one in caught)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Server:
    """Answer [how, configuration] with None once that is ready, then "seconds", "peak" and "waits" of its steps."""

    ready: Steps | None = None

    def __call__(self, what: str, *configuration: Any) -> Any:
        if not configuration:
            return getattr(self.ready, what)()
        self.ready = None
        gc.collect()
        torch.cuda.empty_cache()
        self.ready = Steps(what, *configuration)
        return None


if __name__ == "__main__":
    serve(Server())

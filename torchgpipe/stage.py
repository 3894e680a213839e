"""A stage: one partition on its device, with the skips that cross its boundaries."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.effort import Effort
from torchgpipe.microbatch import check
from torchgpipe.skip.layout import PartitionSkips
from torchgpipe.skip.scope import skip_scope
from torchgpipe.skip.skippable import skips_of

__all__ = ["Flat", "Stage", "training"]

Flat = tuple[Tensor | None, ...]
"""A task's inputs or outputs in a row: the micro-batch's tensors, then the skips."""


_ANYWHERE = nullcontext()


class Stage:
    """Run partition `index` on a micro-batch."""

    def __init__(self, index: int, partition: nn.Sequential, device: torch.device, skips: PartitionSkips) -> None:
        self.index = index
        self.partition = partition
        self.device = device
        self.arrivals = skips.arrivals
        self.departures = skips.departures
        self.draws: dict[bool, bool] = {}
        """Whether the partition draws random numbers in training (True) and evaluation (False), once known."""
        self.efforts: dict[bool, Effort] = {}
        """What a task takes in training (True) and evaluation (False), once counted."""
        self._keys = tuple(arrival.key for arrival in self.arrivals)
        modules = list(partition.modules())
        self._holders = [m for m in modules if m._parameters]
        self.deferred_norms = [m for m in modules if isinstance(m, DeferredBatchNorm)]
        self._norms = [m for m in modules if isinstance(m, _NormBase) and m not in set(self.deferred_norms)]
        # A recomputation puts running statistics aside; a forward from another thread must not run meanwhile.
        self._turns: AbstractContextManager[object] = threading.RLock() if self._norms else _ANYWHERE
        # Most partitions need neither a device to be current, nor a scope for skips, nor turns.
        self._special = device.type == "cuda" or bool(self._keys or self._norms) or any(skips_of(partition))

    def run(self, inputs: Flat, atomic: bool) -> tuple[Flat, bool]:
        """Run the layers on the micro-batch and the skips in `inputs`; return their outputs alike.

        `atomic` says that the micro-batch is a tensor, rather than a tuple of them.
        """
        if not self._special:
            y = self.partition(inputs[0] if atomic else inputs)
            skips: Flat = ()
        else:
            count = len(inputs) - len(self._keys)
            arrived = dict(zip(self._keys, inputs[count:], strict=True))
            with self._turns, self._on_device(), skip_scope(arrived) as scope:
                y = self.partition(inputs[0] if atomic else inputs[:count])
                skips = tuple(scope[departure.key] for departure in self.departures)
        if isinstance(y, Tensor):
            return (y, *skips), True
        check(y, f"output of partition {self.index}")
        return (*y, *skips), False

    def _on_device(self) -> AbstractContextManager[object]:
        # For layers that create tensors on "the" accelerator; operators on tensors need no help.
        return torch.cuda.device(self.device) if self.device.type == "cuda" else _ANYWHERE

    def trainable(self) -> bool:
        """Return whether any parameter of the partition takes a gradient."""
        for layer in self._holders:  # called for every task, and `parameters()` would cost more than a small layer
            for p in layer._parameters.values():
                if p is not None and p.requires_grad:
                    return True
        return False

    def running_statistics_left_alone(self) -> AbstractContextManager[object]:
        """Keep normalization layers from updating their running statistics, for a second pass over a batch."""
        return self._put_aside() if self._norms else _ANYWHERE

    @contextmanager
    def _put_aside(self) -> Iterator[None]:
        with self._turns:
            updating = [m for m in self._norms if m.training and m.track_running_stats and m.running_mean is not None]
            kept = [(m, m._buffers["running_mean"], m._buffers["running_var"]) for m in updating]
            for m in updating:
                m.track_running_stats = False
                m._buffers["running_mean"] = m._buffers["running_var"] = None
            try:
                yield
            finally:
                for m, mean, var in kept:
                    m.track_running_stats = True
                    m._buffers["running_mean"], m._buffers["running_var"] = mean, var


def training(stages: Sequence[Stage]) -> bool:
    """Return whether any layer is in training mode."""
    return any(layer.training for stage in stages for layer in stage.partition)

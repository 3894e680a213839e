"""Where a rank ends or fails, others go on, and nothing is left. What they hear is in test_cuda.py and in failures."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchgpipe.distributed import DistributedGPipe, RankFailed

from ...parts import Fails
from ..ledger import assert_eventually
from .test_calls import WORLD, loss_of, small

pytestmark = pytest.mark.ranks(WORLD)


def pipeline(**options: Any) -> tuple[DistributedGPipe, Fails]:
    """Return a pipeline, and the layer of this rank that can be made to fail."""
    layers = nn.Sequential(*(layer for _ in range(WORLD) for layer in (nn.Linear(4, 4), Fails())))
    model = DistributedGPipe(layers, [2] * WORLD, **options)
    return model, model.partition[1]  # type: ignore[return-value]


def assert_gone(wires: weakref.ref[Any]) -> None:
    def gone() -> bool:
        gc.collect()
        return wires() is None

    assert_eventually(gone, lambda: "connections are kept", 10)  # a thread may still be about to end


def test_the_last_ranks_end_first() -> None:
    """They need nothing from those before them, which go on. Nothing is left of connections that were closed."""
    rank = dist.get_rank()
    ours, layer = pipeline(chunks=2, checkpoint="never")
    if rank == 0:
        layer.at("backward", dist.barrier)  # until all other ranks have closed their connections
    loss_of(ours).backward()
    wires = weakref.ref(ours._wires)
    if rank:
        ours.close()
        dist.barrier()
    ours.close()
    assert all(p.grad is not None for p in ours.parameters())
    loss_of(ours).backward()
    assert_gone(wires)
    ours.close()


def test_a_failure_leaves_nothing() -> None:
    """No error is kept: its frames would hold an earlier loss, whose graph holds all that was sent and expected."""
    rank = dist.get_rank()
    ours, layer = pipeline(chunks=3)

    def hold() -> None:
        """Wait until the others have failed."""
        dist.send(torch.zeros(1), rank - 1)
        dist.barrier()

    def fail() -> None:
        dist.recv(torch.zeros(1), rank + 1)
        raise ArithmeticError("it failed")

    def failed(held: int) -> weakref.ref[Any]:
        loss = loss_of(ours)
        loss.backward()
        if rank == held:
            layer.at("forward", hold)
        if rank == held - 1:
            layer.at("forward", fail, calls_before=2)
        with pytest.raises(ArithmeticError if rank == held - 1 else RankFailed, match="it failed"):
            loss_of(ours)
        return weakref.ref(ours._wires)

    for held in (1, 2):
        wires = failed(held)
        if rank != held:
            dist.barrier()
        ours.close()
        loss_of(ours).backward()
        assert_gone(wires)
    ours.close()


def test_a_process_forks_after_connections_were_closed() -> None:
    gc.collect()  # groups of other tests: PyTorch cannot end these in a fork
    model, _ = small()
    for _ in range(2):
        loss_of(model).backward()
        model.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: this one has none that matter
        child = os.fork()
    if not child:
        del model
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

"""Where a rank fails or ends, the others hear of it or go on, and nothing is left."""

from __future__ import annotations

import gc
import os
import time
import warnings
import weakref
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe.distributed import DistributedGPipe, RankFailed

from ...parts import Fails
from .test_calls import WORLD, loss_of, small

pytestmark = pytest.mark.ranks(WORLD)


def test_a_failure_is_heard_by_all() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    x, target = torch.randn(9, 4), torch.randn(9, 4)
    model = DistributedGPipe(
        nn.Sequential(*(layer for _ in range(WORLD) for layer in (nn.Linear(4, 4), Fails()))),
        [2] * WORLD, chunks=3, checkpoint="always",
    )  # fmt: skip
    fails = model.partition[1]
    assert isinstance(fails, Fails)
    for phase, victim in product(("forward", "recompute", "backward"), range(WORLD)):
        if rank == victim:
            fails.fail(phase, ValueError("on purpose"), calls_before=1)
        try:
            model.loss(nn.functional.mse_loss, x, target).backward()
            # The last rank may have ended its backward by then.
            model.loss(nn.functional.mse_loss, x, target)
        except (RankFailed, ValueError) as error:
            said = str(error)
        doing = f"{'recomputation' if phase == 'recompute' else phase} of micro-batch 1"
        assert said == ("on purpose" if rank == victim else f"rank {victim} failed in {doing}: ValueError: on purpose")
        if phase == "forward":  # all ranks are in the same mini-batch
            model.loss(nn.functional.mse_loss, x, target).backward()
        model.close()
        model.loss(nn.functional.mse_loss, x, target).backward()  # it works again
    model.close()


def gone(wires: weakref.ref[Any]) -> bool:
    for _ in range(100):
        gc.collect()
        if wires() is None:
            return True
        time.sleep(0.1)  # a thread may still be about to end
    return False


class Late(torch.autograd.Function):
    """Let the first backward begin when all other ranks have closed their connections."""

    waits = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Late.waits:
            Late.waits = False
            dist.barrier()
        return grad


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Late.apply(super().forward(x))
        return y


def test_the_last_ranks_end_first() -> None:
    """They need nothing from those before them, which go on. Nothing is left of connections that were closed."""
    rank = dist.get_rank()
    layers = nn.Sequential(Slow(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    ours = DistributedGPipe(layers, [1] * WORLD, chunks=2, checkpoint="never")
    loss_of(ours).backward()
    wires = weakref.ref(ours._wires)
    if rank:
        ours.close()
        dist.barrier()
    ours.close()
    assert all(p.grad is not None for p in ours.parameters())
    ours.zero_grad()
    loss_of(ours).backward()
    assert gone(wires)
    ours.close()


class Held(nn.Linear):
    """In its first call after `hold`, wait until the others have failed; after `fail`, raise in the third."""

    what, calls = "", 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if (self.what, self.calls) == ("hold", 1):
            dist.send(torch.zeros(1), dist.get_rank() - 1)
            dist.barrier()
        if (self.what, self.calls) == ("fail", 3):
            dist.recv(torch.zeros(1), dist.get_rank() + 1)
            raise ArithmeticError("it failed")
        return super().forward(x)


def test_a_failure_leaves_nothing() -> None:
    """No error is kept: its frames would hold an earlier loss, whose graph holds all that was sent and expected."""
    rank = dist.get_rank()
    ours = DistributedGPipe(nn.Sequential(*(Held(4, 4) for _ in range(WORLD))), [1] * WORLD, chunks=4)
    layer: Any = ours.partition[0]

    def loss_of_held() -> Tensor:
        return ours.loss(nn.functional.mse_loss, torch.ones(4, 4), torch.zeros(4, 4))

    def fail() -> weakref.ref[Any]:
        loss = loss_of_held()
        loss.backward()
        layer.what, layer.calls = {held: "hold", held - 1: "fail"}.get(rank, ""), 0
        with pytest.raises(ArithmeticError if rank == held - 1 else RankFailed, match="it failed"):
            loss_of_held()
        return weakref.ref(ours._wires)

    for held in (1, 2):
        wires = fail()
        layer.what = ""
        if rank != held:
            dist.barrier()
        ours.close()
        loss_of_held().backward()
        assert gone(wires), f"rank {held} was held"
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

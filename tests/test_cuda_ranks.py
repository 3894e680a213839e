"""On CUDA: ranks of one pipeline, which share a GPU (tensors go through pinned memory) or have one each (NCCL)."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from itertools import product
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessException, spawn

from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, RankFailed

from .behaviours.compare import found
from .behaviours.draw import Draw
from .cuda import DEVICES, balance, layers, needs_cuda
from .parts import Fails
from .test_cuda_streams import Late

pytestmark = needs_cuda

WORLD = 4
BALANCE = balance(["cuda"] * WORLD)
APART = "TORCHGPIPE_TEST_RANKS_APART"
"""Set where each rank has a GPU of its own."""


Scene = Callable[[int], None]


def own(rank: int) -> str:
    return f"cuda:{rank if APART in os.environ else 0}"


def results_are_those_of_one_process(rank: int) -> None:
    for chunks, checkpoint in product((1, 3), ("always", "except_last", "never")):
        options: dict[str, Any] = {"chunks": chunks, "checkpoint": checkpoint, "deferred_batch_norm": True}
        ranks = DistributedGPipe(layers(), BALANCE, device=own(rank), **options)
        one = GPipe(layers(), BALANCE, devices=[own(rank)] * WORLD, **options)
        for size in (13, 12, 13):
            torch.manual_seed(size)
            x, target = torch.randn(size, 16, device=own(rank)), torch.randn(size, 32, device=own(rank))
            losses = []
            for model in (ranks, one):
                loss = model.loss(nn.functional.mse_loss, x, target)
                loss.backward()
                losses.append((loss.detach(), model.clip_grad_norm_(1.0)))
            torch.testing.assert_close(*losses)
            whole, part = dict(found(one)), dict(found(ranks))
            torch.testing.assert_close(part, {name: whole[name] for name in part})
        ranks.close()


def nothing_is_read_before_it_is_there(rank: int) -> None:
    """Large tensors and slow tasks; small whole numbers, so that every sum is exact."""
    for checkpoint in ("always", "never"):
        module = nn.Sequential(*(Late() for _ in range(WORLD)))
        model = DistributedGPipe(module, [1] * WORLD, device=own(rank), chunks=3, checkpoint=checkpoint)
        x = torch.randint(3, (6, 1 << 18), generator=torch.Generator().manual_seed(0)).float().to(own(rank))
        x.requires_grad_()
        for step in range(1, 4):
            loss = model.loss(lambda y, _: y.sum(), x, None)
            loss.backward()
            assert loss.item() == x.sum().item() * 2**WORLD
            if rank == 0:
                assert x.grad is not None
                assert torch.equal(x.grad, torch.full_like(x, float(2**WORLD * step)))
        model.close()


def a_recomputation_drops_the_same(rank: int) -> None:
    draw = Draw(lambda x: nn.functional.dropout(torch.ones_like(x), 0.5))
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(WORLD)))
    module[rank] = draw
    model = DistributedGPipe(module, [1] * WORLD, device=own(rank), chunks=4, checkpoint="always")
    loss = model.loss(lambda y, _: y.sum(), torch.randn(8, 16, requires_grad=True), None)
    before = torch.cuda.get_rng_state(own(rank))
    loss.backward()
    assert len(draw.first) == 4
    assert torch.equal(torch.stack(draw.first), torch.stack(draw.second[::-1]))
    assert torch.equal(torch.cuda.get_rng_state(own(rank)), before), "backward took numbers of the caller's"
    model.close()


def a_failure_is_heard_by_all(rank: int) -> None:
    module = nn.Sequential(*(layer for _ in range(WORLD) for layer in (nn.Linear(4, 4), Fails())))
    model = DistributedGPipe(module, [2] * WORLD, device=own(rank), chunks=3, checkpoint="always")
    x, target = torch.randn(9, 4), torch.randn(9, 4, device=own(rank))
    for when, victim in product(("forward", "recompute", "backward"), range(WORLD)):
        if rank == victim:
            model.partition[1].fail(when, ValueError("on purpose"), calls_before=1)  # type: ignore[operator]
        try:
            for _ in range(2):  # the last rank may have ended its backward by then
                model.loss(nn.functional.mse_loss, x, target).backward()
            raise AssertionError("no rank failed")
        except (RankFailed, ValueError) as error:
            assert "on purpose" in str(error)
        torch.cuda.synchronize(own(rank))  # nothing is left that waits for the rank that failed
        model.close()
        dist.barrier()
        model.loss(nn.functional.mse_loss, x, target).backward()  # it works again
    model.close()


def pinned_memory_is_used_again(rank: int) -> None:
    model = DistributedGPipe(layers(), BALANCE, device=own(rank), chunks=4)
    pinned = []
    for _ in range(20):
        x, target = torch.randn(8, 16, device=own(rank)), torch.randn(8, 32, device=own(rank))
        model.loss(nn.functional.mse_loss, x, target).backward()
        pinned.append(torch.cuda.host_memory_stats().get("num_host_alloc", 0))
    assert pinned[-1] <= 2 * pinned[2], pinned  # which blocks are free is a matter of time
    assert APART in os.environ or pinned[-1] > 0
    model.close()


SCENES = {
    each.__name__: each
    for each in (
        results_are_those_of_one_process,
        nothing_is_read_before_it_is_there,
        a_recomputation_drops_the_same,
        a_failure_is_heard_by_all,
        pinned_memory_is_used_again,
    )
}


def play(scenes: Iterable[Scene], world: int) -> dict[str, list[str]]:
    """Let `world` ranks play each scene; return what each rank has to say of each, nothing if all was right.

    They are new processes: CUDA does not work in those that ranks.py forks.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = get_context("spawn").SimpleQueue()
    with suppress(ProcessException):  # a rank that failed in a scene may leave others waiting: they say less
        spawn(_rank, ([*scenes], world, port, queue), world)
    said: dict[str, list[str]] = {}
    while not queue.empty():
        name, rank, text = queue.get()
        said.setdefault(name, []).append(text and f"on rank {rank}: {text}")
    return said


def _rank(rank: int, scenes: list[Scene], world: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for scene in scenes:
        try:
            scene(rank)
            queue.put((scene.__name__, rank, ""))
        except Exception:
            queue.put((scene.__name__, rank, traceback.format_exc()))
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("", id="one GPU"),
        pytest.param(
            "1", id="a GPU each", marks=pytest.mark.skipif(WORLD > DEVICES, reason=f"needs {WORLD} CUDA devices")
        ),
    ],
)
def told(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Return what each rank has to say of each scene, nothing if all was right."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setenv(APART, request.param)
        return play(SCENES.values(), WORLD)


@pytest.mark.parametrize("scene", SCENES)
def test_over_processes(scene: str, told: dict[str, list[str]]) -> None:
    assert told[scene] == [""] * WORLD, "\n".join(told[scene])

"""Test how ranks connect by NCCL, and what they do if NCCL hangs or does not connect them.

threads.py simulates the ranks and NCCL, according to the source code of PyTorch's process groups.
Only tests on several GPUs can show how the real NCCL behaves.
"""

import copy
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchgpipe.distributed import DistributedGPipe, RankFailed
from torchgpipe.distributed.channels import nccl
from torchgpipe.distributed.channels.nccl import PairAddress, Pairs

from .threads import GPUS, PATIENCE, Pair, World, simulate_ranks

N = 3
NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
CPU = torch.device("cpu", 0)


def trained(world: World) -> list[Any]:
    """Train a model over simulated ranks.

    Return a list, which has the losses or the error of each rank. Its last item is a list of the
    texts of all warnings.
    """
    torch.manual_seed(0)
    x = torch.rand(6, 3)
    layers = nn.Sequential(nn.Linear(3, 3), nn.PReLU(), nn.Linear(3, 3))
    models = [copy.deepcopy(layers) for _ in range(N)]

    def program(rank: int) -> Any:
        model = DistributedGPipe(models[rank], [1] * N, device=f"cpu:{rank}", chunks=2)
        losses = [float(model.step(nn.functional.mse_loss, x, x)) for _ in range(2)]
        model.close()
        return losses

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = world.run(program)
    return [*found, [str(each.message) for each in caught]]


def with_broken_pair(world: World, fails: Callable[[], None], streams: Any) -> None:
    """Replace transfers from rank 1 to rank 2 by calls of `fails`, on both ranks."""

    def made(store: str, own: int, *more: Any) -> Pair:
        pair: Any = world.pair(store, own, *more)
        if store.endswith("/forward 1 2"):
            pair.send = pair.recv = lambda *_: fails()
        return pair

    streams.patch.setattr(dist, "ProcessGroupNCCL", made)


def test_if_nccl_does_not_connect_one_pair_all_ranks_use_host_memory(streams: Any) -> None:
    def refuse() -> None:
        raise RuntimeError("unhandled system error\nmore")

    *expected, said = trained(simulate_ranks(streams, GPUS[:N]))
    assert said == []
    world = simulate_ranks(streams, GPUS[:N])
    with_broken_pair(world, refuse, streams)
    *found, said = trained(world)
    assert found == expected
    assert world.pairs
    assert all(pair.aborted for pair in world.pairs)
    assert world.issued == [[]] * N, "NCCL transfers nothing"
    why = "on rank 1, 2 (RuntimeError: unhandled system error); so tensors go through host memory"
    first = "on rank 1, 2; so tensors go through host memory"
    assert sorted(why in line for line in said) == [False, True, True]
    assert sum(first in line for line in said) == 1


def test_a_rank_that_dies_while_others_connect_ends_them(streams: Any) -> None:
    """Check that the other ranks raise an error at once if a rank dies while ranks connect."""
    world = simulate_ranks(streams, GPUS[:N])

    def die() -> None:
        with world.changed:
            groups = {key[0][0] for key in world.boxes if len(key) == 2}
            world.closed |= {(group, 1) for group in groups}
            world.changed.notify_all()
        raise RuntimeError("the process of rank 1 has died")

    with_broken_pair(world, die, streams)
    *found, _ = trained(world)
    assert [type(each) for each in found] == [RankFailed] * N
    assert all(pair.aborted for pair in world.pairs)


def test_a_pair_whose_other_rank_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = threading.Event()

    class Group:
        def __init__(self, *_: Any) -> None:
            pass

        def recv(self, *_: Any) -> None:
            assert aborted.wait(PATIENCE)
            raise RuntimeError("aborted")

    monkeypatch.setattr(nccl, "CONNECT_SECONDS", 0.01)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    addresses: Any = [PairAddress("one", 1)]  # type: ignore[arg-type]
    assert Pairs().connect(CPU, addresses) == "it has not connected after 0.01 s"
    aborted.set()


def test_groups_are_made_without_a_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Group:
        def __init__(self, store: str, *_: Any) -> None:
            made.append((store, os.environ[NO_WATCHDOG]))
            if store == "broken":
                raise RuntimeError("no GPUs found")

        def abort(self) -> None:
            pass

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    addresses: Any = [PairAddress("one", 0), PairAddress("broken", 1)]  # type: ignore[arg-type]
    for before in (None, "0"):
        if before is None:
            monkeypatch.delenv(NO_WATCHDOG, raising=False)
        else:
            monkeypatch.setenv(NO_WATCHDOG, before)
        assert Pairs().connect(CPU, addresses) == "RuntimeError: no GPUs found"
        assert os.environ.get(NO_WATCHDOG) == before
    assert made == [("one", "1"), ("broken", "1")] * 2


NO_GPUS = "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!"


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="expects an error without a GPU")
@pytest.mark.skipif(not dist.is_nccl_available(), reason="this PyTorch has no NCCL")
def test_pytorch_takes_these_arguments_and_has_these_methods() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    assert Pairs().connect(CPU, [PairAddress(store, 0)]) == NO_GPUS
    assert "returns immediately in all cases" in str(dist.Work.block_current_stream.__doc__)
    for name in ("send", "recv", "abort"):
        assert hasattr(dist.ProcessGroupNCCL, name)


def test_all_pairs_are_aborted_at_the_same_time() -> None:
    """Check that a rank aborts all of its NCCL groups, each of which has two ranks, in parallel.

    In NCCL, the abort of one group ends only when the transfers of all groups have ended. Aborts
    one after another would hang.
    """
    n = 4
    together = threading.Barrier(n, timeout=PATIENCE)

    class Group:
        aborts = 0

        def abort(self) -> None:
            together.wait()
            self.aborts += 1

    groups = [Group() for _ in range(n)]
    pairs = Pairs()
    pairs.pairs += [nccl.Pair(group, 0, None) for group in groups]
    pairs.abort()
    pairs.abort()
    assert [group.aborts for group in groups] == [1] * n


def test_an_abort_that_never_ends_does_not_hold_up_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()
    ended = threading.Event()

    class Group:
        def abort(self) -> None:
            over.wait(PATIENCE)
            ended.set()

    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.01)
    pairs = Pairs()
    pairs.pairs += [nccl.Pair(Group(), 0, None), nccl.Pair(Group(), 0, None)]
    pairs.abort()
    assert not ended.is_set()
    over.set()
    assert ended.wait(PATIENCE)

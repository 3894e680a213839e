"""Test ranks on simulated GPUs: their results, their failures, and what they submit to streams.

The tests need no GPU: the devices are `cpu:0`, `cpu:1` and so on. Streams are simulated by
benchmarks/simulated.py. NCCL and processes are simulated by threads.py. Simulated times are tested
in tests/library/test_simulated.py, and real GPUs in tests/test_cuda.py.
"""

import threading
import weakref
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, RankFailed
from torchgpipe.distributed.channels import nccl
from torchgpipe.distributed.channels.channel import ChannelAddress
from torchgpipe.distributed.channels.layout import dense
from torchgpipe.distributed.channels.message import Message
from torchgpipe.distributed.channels.sender import Sender
from torchgpipe.distributed.channels.transfer import Departure, Transfer
from torchgpipe.engine.relay import Stopped
from torchgpipe.layers import batches
from torchgpipe.tensors import accelerator

from ...behaviours.compare import differences
from ...parts import Fails
from ..layers import partitions
from ..ledger import assert_gone
from .test_channel import PLACED
from .threads import GPUS, PATIENCE, Group, Pair, simulate_ranks

WAYS = {
    "NCCL": GPUS,
    "staging": ["one"] * 4,
    "staging, as two ranks share a GPU": ["one", "two", "three", "one"],
}


def layers(*skips: tuple[int, int]) -> tuple[nn.Sequential, list[int]]:
    """Return layers for four partitions, with the given skips between them, and the balance.

    Args:
        skips: For each skip, the partition that stashes it and the partition that pops it.
    """
    torch.manual_seed(0)
    each = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Fails()) for _ in range(4)]
    return partitions(each, skips, torch.cos)


def train(model: Any, x: Tensor, target: Tensor) -> dict[str, Any]:
    """Run a step and return the gradients."""
    model.zero_grad()
    model.loss(nn.functional.mse_loss, x, target).backward()
    return {name: p.grad for name, p in model.named_parameters()}


ALL = ((0, 2), (0, 3), (1, 3))
TWICE = ((0, 2), (0, 2), (1, 3))
CROSSING = ((0, 3), (1, 2))
# A schedule, the number of ranks, and skips.
LISTS: list[tuple[str, int, tuple[tuple[int, int], ...]]] = [
    ("GPipe", 4, ()),
    ("GPipe", 4, TWICE),
    ("GPipe", 4, CROSSING),
    ("GPipe", 4, ALL),
    ("1F1B", 4, ALL),
    ("Interleaved1F1B", 2, ALL),
    ("ZBVZeroBubble", 2, ALL),
]


@pytest.mark.quick(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name, n, skips", LISTS)
def test_results_are_those_of_one_process(
    way: str, name: str, n: int, skips: Any, checkpoint: Any, streams: Any
) -> None:
    x = torch.rand(7, 3)
    target = torch.rand(7, 3)
    options = {"chunks": 4, "checkpoint": checkpoint, "schedule": name}

    def results(model: Any) -> dict[str, Any]:
        seen = {"loss": model.step(nn.functional.mse_loss, x, target)}
        for name, parameter in model.named_parameters():
            seen[f"{name} by a step"] = parameter.grad.clone()
        train(model, x, target)
        return seen | train(model, x, target)

    model, balance = layers(*skips)
    expected = results(GPipe(model, balance, devices=["cpu"] * n, **options))
    copies = [layers(*skips) for _ in range(n)]
    world = simulate_ranks(streams, WAYS[way][:n])

    def program(rank: int) -> Any:
        model = DistributedGPipe(*copies[rank], device=f"cpu:{rank}", **options)
        found = results(model)
        model.close()
        return found

    together: dict[str, Any] = {}
    for found in world.run(program):
        assert torch.equal(found["loss"], expected["loss"])
        together |= found
    assert differences(together, expected) == []
    if n == 4:
        channels = 2 * (3 + len({*skips}))  # each takes one connection in each direction
        assert len(world.pairs) == (2 * channels if way == "NCCL" else 0)
    for pair in world.pairs:
        assert pair.aborted, "groups are given back when the pipeline is closed"


# For each kind of task, its third task on a rank.
TASKS = {
    "forward": "forward of micro-batch 2",
    "recompute": "recomputation of micro-batch 1",
    "backward": "backward of micro-batch 1",
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", TASKS)
@pytest.mark.parametrize("victim", range(4))
def test_a_failure_ends_all_that_streams_wait_for(
    way: str, phase: str, victim: int, streams: Any
) -> None:
    copies = [layers((0, 2)) for _ in range(4)]
    world = simulate_ranks(streams, WAYS[way])
    ready = threading.Barrier(4, timeout=20)
    x = torch.rand(8, 3)
    target = torch.rand(8, 3)
    told = f"rank {victim} failed in {TASKS[phase]}: ValueError: on purpose"
    lost: list[weakref.ref[Any]] = []

    def program(rank: int) -> None:
        model = DistributedGPipe(*copies[rank], device=f"cpu:{rank}", chunks=4, checkpoint="always")
        if rank == victim:
            (fails,) = [each for each in model.partition.modules() if isinstance(each, Fails)]
            fails.fail(phase, ValueError("on purpose"), calls_before=2)
        with pytest.raises((ValueError, RankFailed)) as caught:
            for _ in range(2):  # the last rank may hear of a failure only in its next step
                train(model, x, target)
        # The others are also told in which layer.
        assert str(caught.value).startswith("on purpose" if rank == victim else told)
        lost.append(weakref.ref(model._connections))
        ready.wait()
        if rank == 0:
            for pair in world.pairs:
                assert pair.aborted
        ready.wait()
        if phase != "forward":  # after a failed forward, all ranks are in the same mini-batch
            model.close()
            ready.wait()
        train(model, x, target)  # after the failure, the pipeline works again
        model.close()

    assert world.run(program) == [None] * 4
    assert len(world.pairs) == (2 * 2 * 8 if way == "NCCL" else 0)
    # The function `program` must keep no reference to the error. The error's traceback refers to
    # the loss, and the loss's graph refers to all tensors that were sent or awaited.
    assert_gone(lost)


X = torch.arange(12.0)
TENSORS = {name: x for name, (x, _) in PLACED.items()}
TENSORS |= {
    "of a layer": nn.Parameter(X.clone()),
    "bfloat16": X.bfloat16(),
    "truth": X > 3,
    "a conjugate": torch.complex(X, X).conj(),
}


@pytest.mark.parametrize("way", ["NCCL", "staging"])
@pytest.mark.parametrize("x", TENSORS.values(), ids=TENSORS)
def test_any_tensor_travels(x: Tensor, way: str, streams: Any) -> None:
    there, back = ends(way, streams)
    streams.patch.setattr(Tensor, "to", lambda x, *_, **__: x)  # `cpu:1` does not really exist
    by_nccl = way == "NCCL"

    first, second, third = there.depart((x, None, x)).tensors

    assert first is not None
    assert third is not None
    assert second is None
    assert first.is_meta == by_nccl
    assert third.is_meta == by_nccl
    y, nothing, again = back.arrive((first, second, third))
    assert nothing is None
    for each in (y, again):
        assert each is not None
        assert each.dtype == x.dtype
        assert each.stride() == dense(x).stride()
        assert torch.equal(each, x.detach())
        assert not each.is_meta


def ends(way: str, streams: Any) -> tuple[Transfer, Transfer]:
    """Return the sending and the receiving end of a connection from rank 0 to rank 1."""
    world = simulate_ranks(streams, GPUS[:2])
    ends = []
    for own in (0, 1):
        device = torch.device("cpu", own)
        pair: Any = None
        if way == "NCCL":
            group = Pair(world, "forward 0 1")
            pair = nccl.Pair(group, 1 - own, accelerator.new_stream(device))
        ends.append(Transfer(device, pair))
    sender, receiver = ends
    return sender, receiver


OUTSIDE = ["cpu:0 copies waits for cpu:0 compute", "memory is used by cpu:0 copies"]
INSIDE = ["cpu:1 compute waits for cpu:1 copies", "memory is used by cpu:1 compute"]
WAITS = {
    "NCCL": [*OUTSIDE, *INSIDE],
    "staging": [*OUTSIDE, "copy to host on cpu:0 copies", "copy to cpu:1 on cpu:1 copies", *INSIDE],
}


@pytest.mark.parametrize("way", WAITS)
def test_waits(way: str, streams: Any) -> None:
    there, back = ends(way, streams)
    real = Tensor.copy_

    def noted(x: Tensor, y: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            streams.log.append(f"copy to host on {streams.current[-1].name}")
        return real(x, y)

    streams.patch.setattr(Tensor, "copy_", noted)
    streams.log.clear()
    departure = there.depart((X,))
    # Host memory has to be filled before it is sent. NCCL uses the memory until the transfer ends.
    assert (departure.before is None) == (way == "NCCL")
    assert (departure.after is None) == (way == "staging")
    back.arrive(departure.tensors)
    assert streams.log == WAITS[way]
    on_host = torch.rand(3, device="meta")  # not on one of the simulated GPUs
    for nothing in ((), (None, on_host)):
        assert there.depart(nothing) == Departure(nothing)
    assert back.arrive((None,)) == (None,)
    assert streams.log == WAITS[way], "nothing is to move"


def test_a_channel_waits_before_it_sends_memory_of_the_host_and_after_it_has_told_of_nccl() -> None:
    began: list[str] = []
    # A mock that stands for a group, for a transfer, and for the events to wait for.
    noted: Any = Mock(late=1)
    noted.begin.side_effect = lambda: began.append(threading.current_thread().name)
    noted.depart.side_effect = lambda tensors: Departure(tensors, noted.before, noted.after)
    sender = Sender(ChannelAddress(noted, 1, 0, lambda error: None, noted))
    sender.give(Message(1, None, ()))
    assert not noted.depart.called, "it is late by one message"
    sender.release()
    sender.settle()
    sender.stop()
    sender.thread.join()
    first, second, *others = [name for name, *_ in noted.mock_calls]
    assert {first, second} == {"begin", "depart"}
    assert began == ["gpipe-to-1"]
    assert others == ["before.synchronize", "send", "send().wait", "after.synchronize"]


def test_what_nccl_says_is_raised_unless_it_was_aborted(streams: Any) -> None:
    for transfer in ends("NCCL", streams):
        pair: Any = transfer._pair
        pair._group.abort()
        with pytest.raises(RuntimeError, match="was aborted"):
            pair.move([X])

    for transfer in ends("NCCL", streams):
        aborted: Any = transfer._pair
        aborted.abort()
        with pytest.raises(Stopped):
            aborted.move([X])


def test_where_the_host_would_wait_for_nccl_it_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert nccl.identity(torch.device("cuda", 0)) == nccl.UNFIT


def test_the_first_rank_waits_until_its_pinned_input_is_copied(streams: Any) -> None:
    world = simulate_ranks(streams, GPUS[:2])
    happened: list[str] = []
    event = Mock(synchronize=lambda: happened.append("wait"))
    streams.patch.setattr(batches, "record_copies", lambda input, device: event)
    x = torch.rand(4, 3)

    def program(rank: int) -> None:
        model = DistributedGPipe(nn.Sequential(Fails(), Fails()), [1, 1], device=f"cpu:{rank}")
        model._stages[0].runs_later = True
        with torch.no_grad():
            model.evaluate(nn.functional.mse_loss, x, x)
            happened.append(f"rank {rank}")
        model.close()

    assert world.run(program) == [None] * 2
    assert sorted(happened) == ["rank 0", "rank 1", "wait"]
    assert happened.index("wait") < happened.index("rank 0")


def test_a_message_that_is_lost_as_a_rank_ends_is_noticed(
    streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a sender raises an error if Gloo loses its message.

    Gloo may lose a message when the receiver has just closed the connection. Then the send may
    never end, so the sender must not rely on the end of the send.
    """
    world = simulate_ranks(streams, GPUS[:2])
    closed = threading.Event()
    over = threading.Event()
    send = Group.send

    def sent(group: Group, tensors: list[Tensor], peer: int, tag: int) -> Any:
        if group.lost(peer):
            return Mock(wait=over.wait)
        return send(group, tensors, peer, tag)

    monkeypatch.setattr(Group, "send", sent)
    x = torch.rand(7, 3)
    told = r"rank 1 has ended.* rank 0 needs more.*a message to it was not received"

    def program(rank: int) -> None:
        linears = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model = DistributedGPipe(linears, [1, 1], device=f"cpu:{rank}", chunks=3, timeout=None)
        train(model, x, x)
        if rank == 1:
            model.close()
            closed.set()
        else:
            assert closed.wait(PATIENCE)
            with pytest.raises(RankFailed, match=told):
                model.loss(nn.functional.mse_loss, x, x)

    found = world.run(program)
    over.set()
    assert found == [None, None]

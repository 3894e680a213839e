"""Ranks on GPUs: what their programs give to streams and to NCCL, and in which order.

There may be no GPU here, so streams are stand-ins (../conftest.py), and so are NCCL and processes (threads.py). The
GPUs are `cpu:0`, `cpu:1`, …. tests/test_cuda_ranks.py runs real ones.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.checkpoint import Mode
from torchgpipe.distributed import DistributedGPipe, RankFailed, cuda
from torchgpipe.distributed.cuda import Departure, Transfer
from torchgpipe.distributed.layout import dense
from torchgpipe.distributed.wire import Message, Route, Sender
from torchgpipe.plan.replay import Event, replay
from torchgpipe.relay import Stopped
from torchgpipe.skip import Namespace

from ...parts import Fails
from ..layers import Pop, Stash
from ..test_graph_overlap import COPIES, Task, cost
from .threads import Pair, World, play

GPUS = ["one", "two", "three", "four"]
WAYS = {"NCCL": GPUS, "staging": ["one"] * 4, "staging, as two ranks share a GPU": ["one", "two", "three", "one"]}


def partitions(n: int, skips: Sequence[tuple[int, int]], layer: Callable[[int], nn.Module]) -> list[list[nn.Module]]:
    """Return the layers of `n` partitions, with skips from one to another."""
    found = [[layer(j)] for j in range(n)]
    for source, target in skips:
        namespace = Namespace()
        found[source].append(Stash(lambda x: x * 0).isolate(namespace))  # type: ignore[operator]
        found[target].insert(0, Pop().isolate(namespace))  # type: ignore[operator]
    return found


def step(
    world: World, m: int, mode: Mode, skips: Sequence[tuple[int, int]], work: Callable[[Any, int, int], None]
) -> None:
    """Run one step in which tasks do this `work`, and note in `world` what was issued."""

    def task(kind: Any, i: int, j: int) -> None:
        work(kind, i, j)
        world.issued[j].append((kind, i))

    ready = threading.Barrier(world.n, timeout=20)
    layers = [partitions(world.n, skips, lambda j: Task(j, task)) for _ in range(world.n)]

    def program(rank: int) -> None:
        flat = nn.Sequential(*(layer for partition in layers[rank] for layer in partition))
        balance = [*map(len, layers[rank])]
        model = DistributedGPipe(flat, balance, device=f"cpu:{rank}", chunks=m, checkpoint=mode)
        loss = model.loss(lambda y, _: y.sum(), torch.arange(m).float(), None)
        # As if the loss were printed: the replay recomputes nothing before it is there, and a quick host would.
        if ready.wait() == 0:
            world.streams.synchronize()
        ready.wait()
        loss.backward()
        assert loss.item() == sum(range(m))
        model.close()

    assert world.run(program) == [None] * world.n


# Skips that leave late are in time if they take no longer than an item that goes from rank to rank.
COPIES["skips in time"] = 0.25, {(0, 2): 0.5, (0, 3): 0.75, (1, 3): 0.5}

CASES: dict[str, tuple[int, int, str, str, Sequence[Mode]]] = {
    "two ranks": (2, 4, "any", "some time", ("never", "except_last", "always")),
    "four ranks": (4, 5, "any", "some time", ("never", "except_last", "always")),
    "a slow rank": (4, 5, "last slow", "as long as a task", ("never", "except_last", "always")),
    "fewer micro-batches than ranks": (4, 2, "equal", "some time", ("never", "except_last", "always")),
    # Among recomputations, p - s - 1 tasks are longer than the way that the gradient of the item has.
    "skips": (4, 5, "equal", "skips in time", ("never",)),
    "skips, few micro-batches": (4, 2, "equal", "skips in time", ("never",)),
    "a skip, no time": (4, 5, "equal", "a skip, no time", ("never",)),
}


@pytest.mark.parametrize(
    "n, m, times, copies, mode",
    [pytest.param(*case, mode, id=f"{name}, {mode}") for name, (*case, modes) in CASES.items() for mode in modes],
)
def test_every_task_starts_when_the_replay_says(
    n: int, m: int, times: str, copies: str, mode: Mode, streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = cost(n, m, mode, times, copies)
    assert not isinstance(costs.copy, float)
    seconds = {**{(j, j + 1): each for j, each in enumerate(costs.copy)}, **costs.skips}
    world = play(monkeypatch, streams, GPUS[:n], seconds)
    events: list[Event] = []

    def work(kind: Any, i: int, j: int) -> None:
        start, end = streams.of(torch.device("cpu", j)).run(getattr(costs, kind)[i][j])
        events.append(Event(kind, i, j, start, end))

    step(world, m, mode, [*costs.skips], work)
    assert sorted(events) == sorted(replay(costs).events)


LAYOUTS: dict[str, list[tuple[int, int]]] = {
    "no skip": [],
    "one": [(0, 2)],
    "long and short": [(0, 3), (1, 2)],
    "several between two ranks": [(0, 3), (1, 3), (0, 3), (0, 3)],
}


@pytest.mark.parametrize("skips", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("m", [2, 3, 6])
def test_a_skip_leaves_late_and_with_all_others_for_its_rank(
    m: int, skips: list[tuple[int, int]], checkpoint: Any, streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = play(monkeypatch, streams, GPUS)
    step(world, m, checkpoint, skips, lambda *task: None)

    # Of every wire: for each tensor, how many tasks were issued before.
    found = defaultdict[Any, list[int]](list)
    for issued in world.issued:
        for at, (what, *wire) in enumerate(issued):
            if what == "send":
                found[tuple(wire)].append(sum(wire[0].startswith(str(task)) for task, *_ in issued[:at]))

    expected: dict[Any, list[int]] = {}
    for j in range(3):
        expected["forward", j, j + 1] = expected["backward", j + 1, j] = [i + 1 for i in range(m)]
    for s, p in skips:
        late = [min(i + p - s - 1, m - 1) + 1 for i in range(m) for _ in range(skips.count((s, p)))]
        expected["forward skips", s, p] = expected["backward skips", p, s] = late
    assert found == expected
    # And all skips of a micro-batch for one rank are one message over gloo.
    assert {wire: count for wire, count in world.sent.items() if "skips" in wire[0]} == {
        wire: m for wire in expected if "skips" in wire[0]
    }


def layers(*skips: tuple[int, int]) -> tuple[nn.Sequential, list[int]]:
    torch.manual_seed(0)
    found = partitions(4, skips, lambda j: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Fails()))
    return nn.Sequential(*(layer for partition in found for layer in partition)), [*map(len, found)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("skips", [(), ((0, 2), (0, 2), (1, 3))], ids=["no skip", "skips"])
def test_results_are_those_of_one_process(
    way: str, skips: Any, checkpoint: Any, streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, balance = layers(*skips)
    expected = GPipe(module, balance, devices=["cpu"] * 4, chunks=4, checkpoint=checkpoint)
    x, target = torch.rand(7, 3), torch.rand(7, 3)
    expected.loss(nn.functional.mse_loss, x, target).backward()
    copies = [layers(*skips)[0] for _ in range(4)]
    world = play(monkeypatch, streams, WAYS[way])

    def program(rank: int) -> Any:
        model = DistributedGPipe(copies[rank], balance, device=f"cpu:{rank}", chunks=4, checkpoint=checkpoint)
        for _ in range(2):
            model.zero_grad()
            model.loss(nn.functional.mse_loss, x, target).backward()
        model.close()
        return {name: p.grad for name, p in model.named_parameters()}

    results = world.run(program)
    grads = {name: p.grad for name, p in expected.named_parameters()}
    found: dict[str, Any] = {name: grad for own in results for name, grad in own.items()}
    assert found.keys() == grads.keys()
    assert all(torch.equal(found[name], grad) for name, grad in grads.items() if grad is not None)
    assert len(world.pairs) == (2 * (2 * 3 + 2 * len({*skips})) if way == "NCCL" else 0)
    assert all(pair.aborted for pair in world.pairs), "they are given back when the pipeline is closed"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("victim", range(4))
def test_a_failure_ends_all_that_streams_wait_for(
    way: str, phase: str, victim: int, streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    balance = layers((0, 2))[1]
    copies = [layers((0, 2))[0] for _ in range(4)]
    world = play(monkeypatch, streams, WAYS[way])
    ready = threading.Barrier(4, timeout=20)

    def program(rank: int) -> None:
        model = DistributedGPipe(copies[rank], balance, device=f"cpu:{rank}", chunks=4, checkpoint="always")
        if rank == victim:
            next(layer for layer in model.partition.modules() if isinstance(layer, Fails)).fail(
                phase, ValueError("on purpose"), calls_before=2
            )
        with pytest.raises((ValueError, RankFailed), match="on purpose"):
            for _ in range(2):
                model.loss(nn.functional.mse_loss, torch.rand(8, 3), torch.rand(8, 3)).backward()
        ready.wait()
        if rank == 0:
            assert all(pair.aborted for pair in world.pairs)
        model.close()
        ready.wait()
        model.loss(nn.functional.mse_loss, torch.rand(8, 3), torch.rand(8, 3)).backward()  # it works again
        model.close()

    assert world.run(program) == [None] * 4
    assert len(world.pairs) == (2 * 2 * 8 if way == "NCCL" else 0)


X = torch.arange(12.0)
TENSORS: dict[str, Callable[[], Tensor]] = {
    "a row": lambda: X.clone(),
    "columns first": lambda: X.view(3, 4).t(),
    "a part": lambda: X[::2],
    "one value, repeated": lambda: X[:1].expand(5),
    "nothing": lambda: X[:0],
    "a number": lambda: torch.tensor(3.0),
    "of a layer": lambda: nn.Parameter(X.clone()),
    "bfloat16": lambda: X.bfloat16(),
    "truth": lambda: X > 3,
    "a conjugate": lambda: torch.complex(X, X).conj(),
}


@pytest.mark.parametrize("way", ["NCCL", "staging"])
@pytest.mark.parametrize("name", TENSORS)
def test_any_tensor_travels(name: str, way: str, streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = TENSORS[name]()
    there, back = ends(way, streams, monkeypatch)
    monkeypatch.setattr(Tensor, "to", lambda x, *_, **__: x)  # there is one device in truth
    tensors = (x, None, x)
    sent = there.depart(tensors).tensors
    assert [y is not None and y.is_meta for y in sent] == [way == "NCCL", False, way == "NCCL"]
    y, nothing, again = back.arrive(sent)
    assert nothing is None
    for each in (y, again):
        assert each is not None and each.dtype == x.dtype and each.stride() == dense(x).stride()
        assert torch.equal(each, x.detach())
        assert not each.is_meta


def ends(way: str, streams: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Transfer, Transfer]:
    """Return both ends of a wire from rank 0 to rank 1."""
    world = play(monkeypatch, streams, GPUS[:2])
    pairs: list[Any] = [Pair(world, "forward 0 1") if way == "NCCL" else None for _ in (0, 1)]
    return Transfer(torch.device("cpu", 0), pairs[0], 1), Transfer(torch.device("cpu", 1), pairs[1], 0)


OUTSIDE = ["cpu:0 copies waits for cpu:0 compute", "memory is used by cpu:0 copies"]
INSIDE = ["cpu:1 compute waits for cpu:1 copies", "memory is used by cpu:1 compute"]
WAITS = {
    "NCCL": [*OUTSIDE, *INSIDE],
    "staging": [*OUTSIDE, "copy to host on cpu:0 copies", "copy to cpu:1 on cpu:1 copies", *INSIDE],
}


@pytest.mark.parametrize("way", WAITS)
def test_waits(way: str, streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there, back = ends(way, streams, monkeypatch)
    real = Tensor.copy_

    def noted(x: Tensor, y: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            streams.log.append(f"copy to host on {streams.current[-1].name}")
        return real(x, y)

    monkeypatch.setattr(Tensor, "copy_", noted)
    streams.log.clear()
    departure = there.depart((X,))
    # Memory of the host must be filled before it is sent. NCCL has begun, and keeps the memory until it has ended.
    assert (departure.before is None, departure.after is None) == ((way == "NCCL"), (way == "staging"))
    back.arrive(departure.tensors)
    assert streams.log == WAITS[way]


@pytest.mark.parametrize("way", ["NCCL", "staging"])
def test_nothing_is_done_where_nothing_is_to_move(way: str, streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there, back = ends(way, streams, monkeypatch)
    on_host = torch.rand(3, device="meta")  # another kind of device than the GPUs here
    streams.log.clear()
    assert there.depart((None, on_host)) == Departure((None, on_host))
    assert there.depart(()) == Departure(())
    assert back.arrive((None,)) == (None,)
    assert streams.log == []


def test_a_wire_waits_before_it_sends_memory_of_the_host_and_after_it_has_told_of_nccl() -> None:
    log: list[str] = []

    class Noted:
        late = 1

        def begin(self) -> None:
            log.append(f"begin in {threading.current_thread().name}")

        def depart(self, tensors: Any) -> Departure:
            log.append("depart")
            return Departure(tensors, Wait("before"), Wait("after"))  # type: ignore[arg-type]

        def send(self, *_: Any) -> Any:
            log.append("send")
            return self

        def wait(self) -> None:
            log.append("sent")

    class Wait:
        def __init__(self, name: str) -> None:
            self.name = name

        def synchronize(self) -> None:
            log.append(f"wait {self.name}")

    noted: Any = Noted()
    sender = Sender(Route(noted, 1, 0, lambda error: None, noted))
    sender.give(Message(1, None, ()))
    assert not [entry for entry in log if entry != "begin in gpipe-to-1"], "it is late by one message"
    sender.release()
    sender.settle()
    sender.stop()
    sender.thread.join()
    assert log == ["begin in gpipe-to-1", "depart", "wait before", "send", "sent", "wait after"] or log == [
        "depart", "begin in gpipe-to-1", "wait before", "send", "sent", "wait after",
    ]  # fmt: skip


def test_what_nccl_says_is_raised_unless_it_was_aborted(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for broken, error in ((True, RuntimeError), (False, Stopped)):
        transfer, _ = ends("NCCL", streams, monkeypatch)
        pair: Any = transfer._group
        if broken:
            pair.abort()
        else:
            transfer.abort()
        with pytest.raises(error):
            transfer.depart((X,))


def test_ranks_on_other_kinds_of_devices_are_refused(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = play(monkeypatch, streams, GPUS[:2])
    monkeypatch.setattr(cuda, "_identity", lambda device: cuda._UNFIT if device.type == "cpu" else cuda._NO_GPU)

    def program(rank: int) -> None:
        device = ["cpu:0", "meta"][rank]
        model = DistributedGPipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], device=device)
        with pytest.raises(
            (ValueError, RankFailed), match="the kind of device is 'cpu' on rank 0 and 'meta' on rank 1"
        ):
            model(torch.rand(3, 3))
        model.close()

    assert world.run(program) == [None] * 2


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT"])
def test_where_the_host_would_wait_for_nccl_it_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setenv(name, "1")
    assert cuda._identity(torch.device("cuda", 0)) == cuda._UNFIT

"""Check that a pipeline over processes gives the same bits as a pipeline over threads.

The tests also check that ranks send only what is needed, and that a closed pipeline frees its
connections. Failures of ranks are tested in test_cuda.py and in tests/failures.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.distributed.channels.channel import KINDS
from torchgpipe.distributed.channels.message import Message
from torchgpipe.distributed.channels.sender import Sender
from torchgpipe.schedules import Action, Schedule, make
from torchgpipe.schedules.action import LETTERS
from torchgpipe.schedules.named import NAMED
from torchgpipe.tensors.checkpoint import MODES

from ...parts import Fails
from ..layers import Lambda, Pop, Stash, partitions
from ..ledger import assert_eventually
from ..state.test_saved_files import forked
from . import training
from .test_calls import WORLD, loss_of, small
from .training import adam, assert_same, trained

BALANCE = [4, 3, 3]
pytestmark = pytest.mark.ranks(WORLD)


def layers(times: int = 1) -> nn.Sequential:
    """Return a model on `meta` that uses most features of a pipeline.

    It has dropout, batch norm, a layer that returns a pair of tensors, and a skip over a whole
    rank.

    Args:
        times: The factor by which the model is wider than the smallest such model.
    """
    torch.manual_seed(3)
    width = 6 * times
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(5, 6),
            Lambda(lambda x: x.repeat(1, times)),
            Stash(torch.sin),
            nn.Dropout(0.3),
            nn.BatchNorm1d(width),
            nn.PReLU(),
            Lambda(lambda x: x.chunk(2, 1)),
            Lambda(lambda halves: torch.cat(halves, 1)),
            Pop(),
            nn.Linear(width, 4),
        )


def reset(k: int, layer: nn.Module) -> None:
    getattr(layer, "reset_parameters", int)()


def seen(model: Any, *sizes: int) -> dict[str, Any]:
    """Train on mini-batches of the given sizes.

    Return a dictionary of all results, with the state of the random generator after the training.
    """
    torch.manual_seed(3)
    results = trained(model, adam(model), 5, sizes)
    results["generator"] = torch.get_rng_state()
    return results


def drawing(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(nn.functional.dropout(y), target)


def stepped(model: Any, first: bool = True, last: bool = True) -> dict[str, Any]:
    """Call `evaluate`, `step` and `loss` with a criterion that uses dropout. Return the results.

    Args:
        model: The pipeline.
        first: Whether this rank has the first stage. Only then does it give an input.
        last: Whether this rank has the last stage. Only then does it give a target.
    """
    more: dict[str, Any] = {}

    def loss_of(x: Tensor, target: Tensor) -> Tensor:
        size = len(x)
        if first:
            x.requires_grad_()
        given = (x if first else None, target if last else None)
        more[f"losses {size}"] = model.evaluate(drawing, *given, reduction="none")
        loss: Tensor = model.step(drawing, *given)
        again = model.loss(drawing, x, target)
        again.backward()
        more[f"again {size}"] = again.detach()
        more[f"generator {size}"] = torch.get_rng_state()
        if first:
            more[f"of the input {size}"] = x.grad
        return loss

    torch.manual_seed(3)
    return trained(model, adam(model), 5, (23, 23, 20), loss_of) | more


def assert_equal_to_threads(times: int = 1, **options: Any) -> None:
    """Train one pipeline over ranks and one over threads, and assert that all results are equal.

    Args:
        times: The factor by which the model is wider than the smallest such model.
        options: The options of both pipelines, such as `chunks` and `schedule`.
    """
    name = options.setdefault("schedule", "GPipe")
    options["init"] = reset
    stages_on_each = len(make(name, 1, 1).placement)
    balance = BALANCE if stages_on_each == 1 else [1, 4, 1, 1, 1, 2]
    ours = DistributedGPipe(layers(times), balance, **options)
    devices = ["cpu"] * WORLD
    threads = GPipe(layers(times), balance, devices=devices, engine="workers", **options)
    placement, rank = ours.schedule.placement, dist.get_rank()
    first, last = placement[0] == rank, placement[-1] == rank

    found = stepped(ours, first, last)

    assert_same(found, stepped(threads))
    with torch.no_grad():
        output = ours.eval()(torch.ones(7, 5))
    assert (output is None) == (not last)


@pytest.mark.quick(3)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_equal_to_threads(chunks: int, mode: str, deferred: bool) -> None:
    assert_equal_to_threads(chunks=chunks, checkpoint=mode, deferred_batch_norm=deferred)


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", MODES)
def test_large_tensors(mode: str) -> None:
    """Check results if tensors are too large to share a buffer with the message's description.

    Ranks send such tensors separately. The receiver puts each of them into memory that an earlier
    tensor has used.
    """
    assert_equal_to_threads(3_000, chunks=4, checkpoint=mode)


# `test_equal_to_threads` has GPipe's schedule.
@pytest.mark.quick(3)
@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize(("name", "mode"), [*zip(NAMED, 2 * MODES, strict=True)][1:])
def test_every_other_schedule_is_equal_to_threads(name: str, mode: str, chunks: int) -> None:
    assert_equal_to_threads(chunks=chunks, checkpoint=mode, schedule=name)


@pytest.mark.ranks(2)
def test_skips_may_be_fetched_in_another_order_than_they_are_left() -> None:
    lists = []
    for row in ("0F0 0F1 1F1 1F0 1B1 1B0 0B0 0B1", "2F1 2F0 2B1 2B0"):
        actions = []
        for entry in row.split():
            stage, letter, micro_batch = list(entry)
            actions.append(Action(LETTERS[letter], int(micro_batch), int(stage)))
        lists.append(actions)
    schedule = Schedule("mine", [0, 0, 1], lists)
    x = torch.arange(12.0).view(3, 4).cos()
    results: list[dict[str, Any]] = []
    for pipeline in (DistributedGPipe, partial(GPipe, devices=["cpu"] * 2)):
        torch.manual_seed(0)
        linears = [nn.Linear(4, 4) for _ in range(3)]
        model = pipeline(*partitions(linears, [(0, 2)], torch.sin), chunks=2, schedule=schedule)
        by_step = model.step(nn.functional.mse_loss, x, x)
        by_loss = model.loss(nn.functional.mse_loss, x, x)
        by_loss.backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        found["loss by step"] = by_step
        found["loss"] = by_loss.detach()
        results.append(found)
    found, expected = results
    assert_same(found, expected)


def test_only_what_is_needed_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that ranks send each activation, each skip and each gradient only once.

    Ranks describe the shape of a tensor only when they send the first tensor of this shape.
    """
    give = Sender.give
    counted = Counter[tuple[str, int]]()

    def noted(sender: Sender, message: Message) -> None:
        kind = KINDS[sender._tag % len(KINDS)]
        if kind not in ("control", "liveness", "loss"):
            nbytes = sum(x.nbytes for x in message.tensors if x is not None)
            counted[kind, sender.rank] += nbytes
        give(sender, message)

    monkeypatch.setattr(Sender, "give", noted)
    ours = DistributedGPipe(layers(), BALANCE, init=reset, chunks=4, checkpoint="always")
    described = []
    sent = []
    for size in (20, 20, 15, 20, 15):
        seen(ours, size)
        connections: Any = ours._connections
        described.append(sum(len(sender._numbers) for sender in connections._senders()))
        sent.append(counted.copy())

    first, again, of_another_size, *later = described
    assert first == again, described
    assert again < of_another_size, described
    assert later[:2] == [of_another_size, of_another_size], described
    boundary = 20 * 6 * 4
    expected: list[dict[tuple[str, int], int]] = [
        {("forward", 1): boundary, ("forward skips", 2): boundary},
        {("forward", 2): boundary, ("backward", 0): boundary},
        {("backward", 1): boundary, ("backward skips", 0): boundary},
    ]
    assert sent[1] - sent[0] == expected[dist.get_rank()], sent


def test_the_last_ranks_end_first() -> None:
    """Check that the last ranks can close the pipeline before the first rank ends its backward.

    The last ranks have finished their backward by then, and need nothing more from other ranks. A
    closed pipeline frees its connections.
    """
    rank = dist.get_rank()
    layer = Fails()
    each = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4), nn.Linear(4, 4))
    ours = DistributedGPipe(each, [2, 1, 1], chunks=2, checkpoint="never")
    layer.at("backward", dist.barrier)  # until the other ranks are closed
    loss_of(ours).backward()
    connections: weakref.ref[Any] = weakref.ref(ours._connections)
    if rank != 0:
        ours.close()
        dist.barrier()
    ours.close()
    for parameter in ours.parameters():
        assert parameter.grad is not None
    loss_of(ours).backward()

    def gone() -> bool:
        gc.collect()
        return connections() is None

    assert_eventually(gone, lambda: "connections are kept", 10)


def test_a_process_forks_after_connections_were_closed() -> None:
    gc.collect()  # free other tests' process groups, which PyTorch cannot destroy in a fork
    pipelines = [small()[0]]
    for _ in range(2):
        loss_of(pipelines[0]).backward()
        pipelines[0].close()

    def free() -> None:
        pipelines.clear()
        gc.collect()

    assert forked(free) == 0


def test_a_fork_leaves_connections_to_the_process_that_has_them() -> None:
    """Check that `close` in a forked process leaves the parent's connections open.

    Workers of a data loader are such forked processes.
    """
    gc.collect()
    model, _ = small()
    with torch.no_grad():
        expected = loss_of(model)
        assert forked(model.close) == 0
        assert torch.equal(loss_of(model), expected)
    model.close()


# How to spread layers over a mesh, given the model, its layers on this rank, and the mesh.
SPREAD: dict[str, Callable[[nn.Module, nn.Module, DeviceMesh], object]] = {
    "sharded": lambda model, layers, mesh: fully_shard(layers, mesh=mesh),
    "replicated": lambda model, layers, mesh: replicate(model, device_mesh=mesh),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", ["replicated", pytest.param("sharded", marks=pytest.mark.slow)])
def test_over_a_mesh_it_equals_plain_layers_that_are_spread_alike(how: str) -> None:
    """Compare a pipeline over 2 x 2 ranks with plain layers that are sharded or replicated.

    The plain layers run forward on each micro-batch, and then backward in one of two ways:

    - Sharded by FSDP: one backward for each micro-batch, from the last to the first, because FSDP
      averages gradients over the replicas in each backward.
    - Replicated by `replicate`: one backward for all micro-batches, because `replicate` averages
      gradients only once, at the end.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh["dp"].get_local_rank()
    plain = training.layers()
    spread = SPREAD[how]
    spread(plain, plain, mesh["dp"])

    def plainly(x: Tensor, target: Tensor) -> Tensor:
        outputs = [plain(part) for part in x.chunk(3)]
        ends = outputs
        if how == "sharded":
            ends = [y.detach().requires_grad_() for y in outputs]
        loss = nn.functional.cross_entropy(torch.cat(ends), target)
        loss.backward()
        if how == "sharded":
            for y, end in reversed([*zip(outputs, ends, strict=True)]):
                y.backward(end.grad)
        return loss

    expected = trained(plain, adam(plain), replica, loss_of=plainly)
    over: dict[str, Any] = {"mesh": mesh["pp"], "chunks": 3}
    for checkpoint in MODES:
        model = DistributedGPipe(training.layers(), [3, 5], checkpoint=checkpoint, **over)
        spread(model, model.partition, mesh["dp"])
        assert_same(trained(model, adam(model), replica), expected)
        model.close()

    # This schedule adds up the gradients of micro-batches in another order than the plain layers
    # do, so the results are equal only up to rounding.
    model = DistributedGPipe(training.layers(), [1, 2, 2, 3], schedule="ZBVZeroBubble", **over)
    if how == "sharded":
        for partition in model.partitions:
            spread(model, partition, mesh["dp"])
    else:
        spread(model, model.partitions, mesh["dp"])
    step = partial(model.step, nn.functional.cross_entropy)
    found = trained(model, adam(model), replica, loss_of=step)
    first = {name: x for name, x in found.items() if name.startswith(("gradient 0", "loss 0"))}
    assert len(first) > 1
    for name, x in first.items():
        torch.testing.assert_close(x, expected[name])
    model.close()

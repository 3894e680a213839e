"""Test layers that call collectives, such as `all_reduce`, which need one order on all processes.

Pipelines over ranks, and the engine that runs tasks in one thread, allow such layers. The engine
with worker threads refuses them, because its tasks have no fixed order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.schedules.named import NAMED

from ...plain import TWICE
from ..layers import Lambda

# Newer versions of PyTorch deprecate `all_gather`, but layers may still call it.
DEPRECATED = "ignore:torch.distributed.nn.functional.all_gather is deprecated"
pytestmark = pytest.mark.filterwarnings(DEPRECATED)


def reduced(x: Tensor, *, later: bool = False) -> Tensor:
    """Subtract the mean over the samples of all processes, as a synchronized batch norm does."""
    mean = x.detach().mean(0)
    work = dist.all_reduce(mean, async_op=later)
    if work is not None:
        work.wait()
    return x - mean / dist.get_world_size()


def swapped(x: Tensor) -> Tensor:
    """Send `x` to the other process, receive that process's tensor, and return the sum of both."""
    other = 1 - dist.get_rank()
    received = torch.empty_like(x)
    sends = dist.P2POp(dist.isend, x.detach().contiguous(), other)
    receives = dist.P2POp(dist.irecv, received, other)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()
    return x + received


def functionally(x: Tensor) -> Tensor:
    """Call a functional collective, which `torch.compile` supports."""
    world: Any = dist.group.WORLD
    return x + functional.all_reduce(x.detach(), "sum", world)


def summed(x: Tensor) -> Tensor:
    """Apply `relu` to a DTensor of partial sums, for which the DTensor has to communicate."""
    world: Any = dist.group.WORLD
    mesh = DeviceMesh.from_group(world, "cpu")
    part: Any = DTensor.from_local(x.detach(), mesh, [Partial()])
    return x + part.relu().to_local()


COLLECTIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": reduced,
    "all_reduce, asynchronous": partial(reduced, later=True),
    "send and receive": swapped,
    "functional": functionally,
    "with gradients": lambda x: x + sum(all_gather(x)),
    "within an operator on a DTensor": summed,
}


def layers(act: Callable[[Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    first, second, last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
    return nn.Sequential(first, Lambda(act), second, Lambda(act), last)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def piped(made: nn.Sequential, engine: Any = "workers", **options: Any) -> GPipe:
    return GPipe(made, [2, 3], devices=["cpu"] * 2, chunks=4, engine=engine, **options)


def batch() -> tuple[Tensor, Tensor]:
    """Draw this process's own input and target."""
    drawn = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(8, 6, generator=drawn)
    target = torch.randn(8, 3, generator=drawn)
    return x, target


def plainly(plain: nn.Module, x: Tensor, target: Tensor, m: int = 4) -> Tensor:
    """Run a step of plain layers, with a backward after each micro-batch. Return the loss."""
    losses = []
    for part, t in zip(x.chunk(m), target.chunk(m), strict=True):
        loss = mse_loss(plain(part), t) / m
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_workers_refuse_a_collective_before_it_is_called(kind: str) -> None:
    x, target = batch()
    model = piped(layers(COLLECTIVES[kind]))
    calls: list[Callable[[], object]] = [
        lambda: model(x),
        lambda: model.step(mse_loss, x, target),
        lambda: model.evaluate(mse_loss, x, target),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="a layer of partition 0 calls a collective"):
            call()
    assert gradients(model) == [None] * 6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_one_thread_keeps_collectives_in_one_order(kind: str) -> None:
    x, target = batch()
    model = piped(layers(COLLECTIVES[kind]), engine="graph", schedule="1F1B")
    plain = layers(COLLECTIVES[kind])
    loss = model.step(mse_loss, x, target)
    torch.testing.assert_close(loss, plainly(plain, x, target))
    torch.testing.assert_close(gradients(model), gradients(plain))


@pytest.mark.ranks(2)
def test_workers_allow_what_one_thread_calls() -> None:
    """Check that a pipeline with worker threads allows collectives that only one thread calls.

    These are the collectives in the criterion and in hooks of parameters.
    """

    def contrasting(y: Tensor, target: Tensor) -> Tensor:
        samples = torch.cat(all_gather(y))
        return mse_loss(samples.mean(0), target.mean(0))

    def average(grad: Tensor) -> Tensor:
        dist.all_reduce(grad)
        return grad / 2

    found = []
    for engine in ("workers", "graph"):
        model = piped(layers(torch.tanh), engine=engine)
        for p in model.parameters():
            p.register_hook(average)
        model.step(contrasting, *batch())
        found.append(gradients(model))
    by_workers, by_one_thread = found
    torch.testing.assert_close(by_workers, by_one_thread, rtol=0, atol=0)


@pytest.mark.ranks(1)
def test_workers_allow_collectives_of_a_process_alone() -> None:
    """Check that worker threads may call a collective of a group that has only one process.

    A distributed script makes such calls if it is tried out in a single process.
    """
    model = piped(layers(reduced))
    x, target = batch()
    plain = layers(reduced)
    loss = model.step(mse_loss, x, target)
    torch.testing.assert_close(loss, plainly(plain, x, target))


class Block(nn.Module):
    """Two linear layers that tensor parallelism can split over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 8)
        self.narrow = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(self.wide(x).relu())
        return y


def parallelize(block: nn.Module, mesh: Any) -> None:
    parallelize_module(block, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})


def blocks(mesh: DeviceMesh | None = None) -> nn.Sequential:
    """Return three blocks and a last linear layer.

    If `mesh` is given, the blocks (not the last layer) are split by tensor parallelism.
    """
    torch.manual_seed(0)
    parts = [Block(), Block(), Block()]
    made = nn.Sequential(*parts, nn.Linear(6, 3))
    if mesh is not None:
        for block in parts:
            parallelize(block, mesh)
    return made


def whole(x: Any) -> Tensor:
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full.detach().clone()


def assert_trains_as_plain(model: Any, plain: nn.Module) -> None:
    """Assert that two training steps with clipped gradients equal those of the plain layers.

    They need to be equal only up to rounding.
    """
    x = torch.randn(8, 6)
    target = torch.randn(8, 3)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    expected = dict(plain.named_parameters())
    for _ in range(2):
        loss = model.step(mse_loss, x, target)
        torch.testing.assert_close(loss, plainly(plain, x, target))
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert norm > 0.1  # make sure that gradients are clipped
        torch.testing.assert_close(model.clip_grad_norm_(0.1), norm)
        for name, p in model.named_parameters():
            torch.testing.assert_close(whole(p.grad), expected[name].grad, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole(p), expected[name].detach(), msg=name)


@pytest.mark.ranks(2)
def test_tensor_parallelism_in_one_thread() -> None:
    """Check training with tensor parallelism and clipped gradients, in a single thread.

    Some of the gradients are DTensors, and others are ordinary tensors.
    """
    layers = blocks(init_device_mesh("cpu", (2,)))
    model = GPipe(layers, [2, 2], devices=["cpu"] * 2, chunks=4, schedule="1F1B", engine="graph")
    assert_trains_as_plain(model, blocks())


QUICK = ("GPipe", "1F1B", "ZBVZeroBubble")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in NAMED if name not in QUICK]


@pytest.mark.quick(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", [*QUICK, *SLOW])
def test_tensor_parallelism_on_ranks(schedule: str) -> None:
    """Check the training of two stages, each split over two ranks by tensor parallelism.

    One pipeline is made from layers that are already split. In a second pipeline, the layers are
    split after it is made.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    balance = [1] * 4 if schedule in TWICE else [2, 2]
    options: dict[str, Any] = {"mesh": mesh["pp"], "chunks": 4, "schedule": schedule}
    model = DistributedGPipe(blocks(mesh["tp"]), balance, **options)
    assert_trains_as_plain(model, blocks())
    model.close()
    model = DistributedGPipe(blocks(), balance, **options)
    for block in model.modules():
        if isinstance(block, Block):
            parallelize(block, mesh["tp"])
    assert_trains_as_plain(model, blocks())
    model.close()


def equal_layers() -> nn.Sequential:
    """Return layers that are equal on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))


def samples_of_ranks() -> list[Tensor]:
    samples = []
    for rank in range(2):
        drawn = torch.Generator().manual_seed(rank)
        samples.append(torch.rand(4, 2, generator=drawn))
    return samples


def for_steps(layers: nn.Sequential, engine: Any) -> GPipe:
    return GPipe(layers, [2, 1], devices=["cpu"] * 2, chunks=2, engine=engine, schedule="1F1B")


@pytest.mark.ranks(2)
def test_a_step_of_layers_that_fsdp_shards() -> None:
    """Check a step of layers that FSDP shards. FSDP averages gradients over processes.

    Each process has a whole pipeline of its own.
    """
    plain, layers = equal_layers(), equal_layers()
    samples = samples_of_ranks()
    for x in samples:
        (mse_loss(plain(x), x) / 2).backward()
    for layer in (layers[0], layers[2]):
        fully_shard(layer)
    x = samples[dist.get_rank()]
    with pytest.raises(RuntimeError, match="worker threads have no fixed order; use engine='gra"):
        for_steps(layers, "workers").step(mse_loss, x, x)
    for_steps(layers, "graph").step(mse_loss, x, x)
    for found, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(found.grad), expected.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [fully_shard, DistributedDataParallel])
@pytest.mark.parametrize("engine", ["workers", "graph"])
def test_a_criterion_whose_gradients_are_exchanged(engine: Any, wrap: Any) -> None:
    """Check a criterion with parameters in FSDP or DDP, which average its gradients.

    Each process has a whole pipeline of its own.
    """

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.linear = nn.Linear(2, 2)

        def forward(self, y: Tensor, target: Tensor) -> Tensor:
            return mse_loss(self.linear(y), target)

    plain = equal_layers()
    expected = Head()
    samples = samples_of_ranks()
    for x in samples:
        loss = expected(plain(x), x) / 2
        loss.backward()

    head = Head()
    x = samples[dist.get_rank()]
    model = for_steps(equal_layers(), engine)
    model.step(wrap(head), x, x)

    found = whole(head.linear.weight.grad)
    torch.testing.assert_close(found, expected.linear.weight.grad)

"""Test cases with data parallelism, where two processes have replicas or shards of a pipeline."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from examples.works_with import (
    Batches,
    loss_in_replicas,
    no_sync,
    steps,
    steps_in_replicas,
    train,
)

from ....ranks import current
from ...compare import REORDERED
from ...parts.layers import Do
from ...row import Row
from .rows import Block, Change, Use, batches, changed, then, tool, unchanged


def of_this_rank() -> Batches:
    return batches(current().index)


def replicated(
    name: str, use: Use = train, note: str = "", change: Change = unchanged, **options: Any
) -> Row:
    """Return a test case that trains a pipeline within `DistributedDataParallel`, on two ranks.

    Each rank has its own mini-batches. `options` are those of `DistributedDataParallel`.
    """

    def wrapped(run: Any, batches: Any) -> Any:
        return use(DistributedDataParallel(run, **options), batches)

    return changed(name, change, note, use=wrapped, given=of_this_rank)


def train_twice(run: nn.Module, batches: Batches) -> list[float]:
    return train(run, batches + batches)


def step_past_replicas(run: nn.Module, batches: Batches) -> None:
    replicas = DistributedDataParallel(run)
    steps(replicas.module, batches)


# Changes of layers.


def taken_branch(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.branches[self.taken](x)
    return y


def put_two_branches(layers: Any) -> None:
    """Replace a layer by a layer with two branches, of which only one runs.

    The new layer's attribute `taken` is the index of the branch that runs. The parameters of the
    other branch are unused.
    """
    branches = nn.ModuleList([Block(), Block()])
    layers[1] = Do(taken_branch, branches=branches, taken=0)


def take_the_other_branch(run: Any) -> None:
    run.module[1].taken = 1


def shard(layers: nn.Sequential) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)


class TwoLinears(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(self.wide(x).tanh())
        return y


def parallelize(layers: Any) -> None:
    mesh = init_device_mesh("cpu", (2,))
    layers[1], layers[2] = TwoLinears(), TwoLinears()
    for layer in layers[1:3]:
        parallelize_module(layer, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})


class Synchronized(nn.Module):
    """A norm that subtracts the mean over the samples of all processes, by `all_reduce`."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()


def synchronize(layers: Any) -> None:
    layers[1] = Synchronized()


COLLECTIVE = {"workers": "calls a collective"}

REPLICAS = [
    replicated(
        "`DistributedDataParallel`", note="The replicas average their gradients once in each step."
    ),
    replicated(
        "`DistributedDataParallel(static_graph=True)`",
        train_twice,
        "This works as without a pipeline.",
        static_graph=True,
    ),
    replicated(
        "`DistributedDataParallel(find_unused_parameters=True)`",
        then(take_the_other_branch),
        "A checkpointed partition counts as using all of its parameters, so PyTorch may warn "
        "that it has found no unused parameters.",
        change=put_two_branches,
        find_unused_parameters=True,
    ),
    replicated(
        "`DistributedDataParallel`, accumulating with `no_sync`",
        no_sync,
        "This works as without a pipeline.",
    ),
    tool(
        "`ddp.module.step(…)` within `DistributedDataParallel`",
        step_past_replicas,
        "The replicas would not average their gradients. Use `model.loss` or `replicate` "
        "instead, as in the next two entries.",
        given=of_this_rank,
        refused={"": "DistributedDataParallel around a pipeline does not see step"},
    ),
    tool(
        "`DistributedDataParallel` of a module that returns `model.loss(…)`",
        loss_in_replicas,
        "The replicas average their gradients once in each step.",
        given=of_this_rank,
    ),
    # A step adds up one term of the mean for each micro-batch. Plain layers compute one mean.
    tool(
        "`replicate`, and `model.step(…)`",
        steps_in_replicas,
        "The function is `torch.distributed._composable.replicate`. The replicas average their "
        "gradients once in each step.",
        given=of_this_rank,
        tolerance=REORDERED,
    ),
    # The gradients of each micro-batch are averaged over ranks.
    changed(
        "FSDP2: `fully_shard` of the layers",
        shard,
        "FSDP gathers weights and reduces gradients for each micro-batch. All processes must do "
        "this in the same order, but worker threads run in no fixed order.",
        given=of_this_rank,
        tolerance=REORDERED,
        refused={"workers": "layers that FSDP shards"},
    ),
    changed(
        "tensor parallelism: `parallelize_module` of the layers",
        parallelize,
        "A `DistributedGPipe` can be combined with tensor parallelism, too: the device mesh has "
        "one dimension for each of the two. Clip gradients with the pipeline's "
        "`clip_grad_norm_`, which takes DTensors and plain gradients together.",
        refused=COLLECTIVE,
    ),
    changed(
        "collectives in layers, as in synchronized norms",
        synchronize,
        "Layers of a `DistributedGPipe` may call collectives, too. Worker threads refuse a "
        "collective that a partition calls in its first micro-batch. They do not notice a "
        "collective that is called only in a later micro-batch or only in backward. A criterion "
        "may call collectives.",
        given=of_this_rank,
        refused=COLLECTIVE,
    ),
]

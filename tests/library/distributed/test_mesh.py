"""A pipeline over one dimension of a mesh of 2 x 2 ranks, with data parallelism over the other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchgpipe.distributed import DistributedGPipe

from .training import adam, assert_same, layers, trained

pytestmark = pytest.mark.ranks(4)
CHUNKS = 3  # of 3, 3 and 2 samples


# Functions of the model, its layers on this rank, and the mesh.
SPREAD: dict[str, Callable[[nn.Module, nn.Module, DeviceMesh], object]] = {
    "sharded": lambda model, layers, mesh: fully_shard(layers, mesh=mesh),
    "replicated": lambda model, layers, mesh: replicate(model, device_mesh=mesh),
}


@pytest.mark.parametrize("how", SPREAD)
def test_equals_plain_layers_that_are_spread_in_the_same_way(how: str) -> None:
    """They run forward on each micro-batch, and backward in the opposite order.

    FSDP adds up replicas' gradients after the backward of each micro-batch, and so the plain backward is one for each.
    `replicate` does it once in the end, and so the plain backward is one.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh["dp"].get_local_rank()
    plain, spread = layers(), SPREAD[how]
    spread(plain, plain, mesh["dp"])

    def plainly(x: Tensor, target: Tensor) -> Tensor:
        outputs = [plain(part) for part in x.chunk(CHUNKS)]
        ends = outputs if how == "replicated" else [y.detach().requires_grad_() for y in outputs]
        loss = nn.functional.cross_entropy(torch.cat(ends), target)
        loss.backward()
        if how == "sharded":
            for y, end in reversed([*zip(outputs, ends, strict=True)]):
                y.backward(end.grad)
        return loss

    expected = trained(plain, adam(plain), replica, loss_of=plainly)
    modes: tuple[Any, ...] = ("always", "except_last", "never")
    for checkpoint in modes:
        model = DistributedGPipe(layers(), [3, 5], mesh=mesh["pp"], chunks=CHUNKS, checkpoint=checkpoint)
        spread(model, model.partition, mesh["dp"])
        assert_same(trained(model, adam(model), replica), expected)
        model.close()

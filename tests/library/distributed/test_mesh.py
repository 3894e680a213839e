"""A pipeline over one dimension of a mesh of 2 x 2 ranks, with data parallelism over the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchgpipe.distributed import DistributedGPipe

WORLD = 4
pytestmark = pytest.mark.ranks(WORLD)
CHECKPOINTS: tuple[Any, ...] = ("always", "except_last", "never")
BALANCE = [3, 3]
CHUNKS = 3
BATCH = 8  # of each replica, in micro-batches of 3, 3 and 2

Spread = Callable[[nn.Module, nn.Module, DeviceMesh], object]
"""Spreads a model over replicas; given the model, its layers on this rank, and the mesh."""


def sharded(model: nn.Module, layers: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(layers, mesh=mesh)


def replicated(model: nn.Module, layers: nn.Module, mesh: DeviceMesh) -> None:
    replicate(model, device_mesh=mesh)


def layers() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4))


def pipelined(module: nn.Sequential, spread: Spread, mesh: DeviceMesh, checkpoint: Any) -> DistributedGPipe:
    model = DistributedGPipe(module, BALANCE, mesh=mesh["pp"], chunks=CHUNKS, checkpoint=checkpoint)
    spread(model, model.partition, mesh["dp"])
    return model


def whole(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def trained(model: nn.Module, step: Callable[[Tensor, Tensor], Tensor], replica: int) -> dict[str, Any]:
    """Train on data of the replica's own; return all that can be seen."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(replica)
    seen: dict[str, Any] = {}
    for k in range(3):
        seen[f"loss {k}"] = step(torch.randn(BATCH, 5, generator=data), torch.randint(4, (BATCH,), generator=data))
        clip = getattr(model, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, model.parameters()))
        seen[f"norm {k}"] = whole(clip(0.3))
        seen |= {f"gradient {k} of {name}": whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return seen | {name: whole(x.detach()) for name, x in model.state_dict().items()}


def assert_equal_to_plain(spread: Spread, *, at_once: bool) -> None:
    """Compare with the plain layers on each replica, spread over the replicas in the same way.

    They run forward on each micro-batch, and backward in the opposite order. FSDP adds up replicas' gradients after the
    backward of each micro-batch, and so the plain backward is one for each. `replicate` does it once in the end, and so
    is the plain backward `at_once`.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh["dp"].get_local_rank()
    plain = layers()
    spread(plain, plain, mesh["dp"])

    def plainly(x: Tensor, target: Tensor) -> Tensor:
        outputs = [plain(part) for part in x.chunk(CHUNKS)]
        ends = outputs if at_once else [y.detach().requires_grad_() for y in outputs]
        loss = nn.functional.cross_entropy(torch.cat(ends), target)
        loss.backward()
        if not at_once:
            for y, end in reversed([*zip(outputs, ends, strict=True)]):
                y.backward(end.grad)
        return loss.detach()

    expected = trained(plain, plainly, replica)
    for checkpoint in CHECKPOINTS:
        model = pipelined(layers(), spread, mesh, checkpoint)

        def step(x: Tensor, target: Tensor, model: DistributedGPipe = model) -> Tensor:
            loss = model.loss(nn.functional.cross_entropy, x, target)
            loss.backward()
            return loss.detach()

        for name, x in trained(model, step, replica).items():
            assert torch.equal(x, expected[name]), (checkpoint, name)
        model.close()


def test_fsdp_equals_plain_fsdp() -> None:
    assert_equal_to_plain(sharded, at_once=False)


def test_replicate_equals_plain_replicate() -> None:
    assert_equal_to_plain(replicated, at_once=True)

"""A pipeline over one dimension of a mesh of 2 x 2 ranks, with data parallelism over the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchgpipe import GPipe
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


def test_a_checkpoint_loads_anywhere() -> None:
    """Saved on 4 ranks; loaded on 2, in one process, and in the plain layers, which train on to the same numbers."""
    where: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(where)
    pp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))["pp"]
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        parts = get_state_dict(model, optimizer, options=options)
        return dict(zip(("model", "optimizer"), parts, strict=True))

    def step(model: Any, optimizer: Any, at: int) -> dict[str, Any]:
        data = torch.Generator().manual_seed(at)
        x, target = torch.randn(BATCH, 5, generator=data), torch.randint(4, (BATCH,), generator=data)
        if isinstance(model, nn.Sequential):
            loss = nn.functional.cross_entropy(torch.cat([*map(model, x.chunk(CHUNKS))]), target)
        else:
            loss = model.loss(nn.functional.cross_entropy, x, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = state(model, optimizer)
        return {**seen["model"], **seen["optimizer"], "loss": loss.detach()}

    four = DistributedGPipe(layers(), [1, 2, 1, 2], chunks=CHUNKS)
    optimizer = torch.optim.Adam(four.parameters(), lr=0.01)
    for at in range(2):
        step(four, optimizer, at)
    save(state(four, optimizer), checkpoint_id=where[0])

    parts: list[Any] = [None] * WORLD
    dist.all_gather_object(parts, step(four, optimizer, 2))
    expected = {name: x for part in parts for name, x in part.items()}
    models: tuple[Any, ...] = (
        DistributedGPipe(blank(), BALANCE, mesh=pp, chunks=CHUNKS),
        GPipe(blank(), BALANCE, devices=["cpu"] * 2, chunks=CHUNKS),
        blank(),
    )
    for model in models:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        loaded = state(model, optimizer)
        load(loaded, checkpoint_id=where[0])
        set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=options
        )
        for name, x in step(model, optimizer, 2).items():
            same = torch.equal(x, expected[name]) if isinstance(x, Tensor) else x == expected[name]
            assert same, (type(model).__name__, name)
    models[0].close()
    four.close()


def blank() -> nn.Sequential:
    module = layers()
    with torch.no_grad():
        for x in module.state_dict().values():
            x.zero_()
    return module


def whole_numbers() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 7), nn.Linear(7, 4))
    with torch.no_grad():
        for p in module.parameters():
            p.random_(-2, 3)
    return module


def test_both_equal_one_pipeline_of_all_samples() -> None:
    """With whole numbers all sums are exact, so that their order, in which the two differ, changes nothing."""

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        return (output * target).sum() / len(output)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh["dp"].get_local_rank()
    torch.manual_seed(1)
    threads = GPipe(whole_numbers(), BALANCE, devices=["cpu"] * 2, chunks=CHUNKS, engine="workers")
    x, target = torch.randint(-2, 3, (2 * BATCH, 5)).float(), torch.randint(-2, 3, (2 * BATCH, 4)).float()
    threads.loss(criterion, x, target).backward()
    expected: dict[str, Any] = {name: p.grad for name, p in threads.named_parameters()}
    for spread in (sharded, replicated):
        for checkpoint in CHECKPOINTS:
            torch.manual_seed(1)
            model = pipelined(whole_numbers(), spread, mesh, checkpoint)
            own = slice(replica * BATCH, (replica + 1) * BATCH)
            model.loss(criterion, x[own], target[own]).backward()
            for name, p in model.named_parameters():
                gradient = whole(p.grad)
                assert gradient.any() and torch.equal(gradient, expected[name]), (spread, checkpoint, name)
            model.close()

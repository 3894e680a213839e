"""A pipeline over processes equals one over threads, to the last bit, and sends no more than it has to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe

from ...parts import Pop, Stash

CHECKPOINTS: tuple[Any, ...] = ("always", "except_last", "never")
WORLD = 3
BALANCE = [3, 4, 3]
pytestmark = pytest.mark.ranks(WORLD)


def layers() -> nn.Sequential:
    """A skip over a rank, dropout, batch norm, and a layer that hands on two tensors."""
    return nn.Sequential(
        nn.Linear(5, 6), Stash(), nn.Dropout(0.3),
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), Halves(),
        Joined(), Pop(), nn.Linear(6, 4),
    )  # fmt: skip


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :3], x[:, 3:]


class Repeated(nn.Module):
    times = 3_000

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.times)


class Joined(nn.Module):
    def forward(self, halves: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(halves, 1)


def built(chunks: int, checkpoint: Any, deferred: bool, make: Callable[[], nn.Sequential] = layers) -> Any:
    """Return the pipeline over ranks, and one over threads."""
    options: dict[str, Any] = {"chunks": chunks, "checkpoint": checkpoint, "deferred_batch_norm": deferred}
    torch.manual_seed(3)
    ours = DistributedGPipe(make(), BALANCE, **options)
    torch.manual_seed(3)
    return ours, GPipe(make(), BALANCE, devices=["cpu"] * WORLD, engine="workers", **options)


def step(model: Any, size: int) -> dict[str, Any]:
    """Train a step; return all that can be seen."""
    torch.manual_seed(size)
    x, target = torch.randn(size, 5), torch.randint(4, (size,))
    model.zero_grad()
    loss = model.loss(nn.functional.cross_entropy, x, target)
    loss.backward()
    norm = model.clip_grad_norm_(0.1)
    return {
        "loss": loss.detach(),
        "norm": norm,
        "generator": torch.get_rng_state(),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "state": {name: x.clone() for name, x in model.state_dict().items()},
    }


def assert_part_of(ours: dict[str, Any], whole: dict[str, Any]) -> None:
    for key, value in ours.items():
        for name, x in value.items() if isinstance(value, dict) else [(key, value)]:
            assert torch.equal(x, whole[key][name] if isinstance(value, dict) else whole[key]), (key, name)


def test_equal_to_threads() -> None:
    for chunks, checkpoint, deferred in product((1, 2, 5), CHECKPOINTS, (False, True)):
        ours, threads = built(chunks, checkpoint, deferred)
        for size in (23, 20, 23):
            assert_part_of(step(ours, size), step(threads, size))
        ours.close()


def test_without_gradients() -> None:
    rank = dist.get_rank()
    ours, threads = built(3, "always", False)
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output, expected = ours.eval()(x), threads.eval()(x)
    assert torch.equal(output, expected) if rank == WORLD - 1 else output is None
    ours.close()


def test_a_state_of_the_model_loads() -> None:
    ours, threads = built(2, "never", False)
    with torch.no_grad():
        for p in threads.parameters():
            p.add_(1.0)
    ours.load_state_dict(threads.state_dict())
    assert_part_of({"state": ours.state_dict()}, {"state": threads.state_dict()})
    ours.close()


def test_layers_on_meta_are_filled() -> None:
    def reset(k: int, layer: nn.Module) -> None:
        for module in layer.modules():
            if isinstance(module, (nn.Linear, nn.BatchNorm1d)):
                module.reset_parameters()

    found = []
    for balance in ([3, 4, 3], [1, 1, 8]):
        torch.manual_seed(5)
        with torch.device("meta"):
            module = layers()
        ours = DistributedGPipe(module, balance, init=reset)
        parts: list[Any] = [None] * WORLD
        dist.all_gather_object(parts, {name: p.detach() for name, p in ours.named_parameters()})
        found.append({name: p for part in parts for name, p in part.items()})
    torch.manual_seed(5)
    with torch.device("meta"):
        module = layers()
    threads = GPipe(module, BALANCE, devices=["cpu"] * WORLD, init=reset)
    for name, p in threads.named_parameters():
        assert torch.equal(p, found[0][name]) and torch.equal(p, found[1][name]), name


def test_only_what_is_needed_is_sent() -> None:
    """Boundary tensors and skips, once each way."""
    rank = dist.get_rank()
    ours, _ = built(4, "always", False)
    step(ours, 20)
    before = ours._wires.sent
    step(ours, 20)
    sent = {key: count - before[key] for key, count in ours._wires.sent.items() if key[0] != "control"}
    boundary = 20 * 6 * 4
    expected: list[dict[tuple[str, int], int]] = [
        {("forward", 1): boundary, ("forward skips", 2): boundary},
        {("forward", 2): boundary, ("backward", 0): boundary},
        {("backward", 1): boundary, ("backward skips", 0): boundary},
    ]
    assert sent == expected[rank], sent
    ours.close()


def test_large_tensors_of_changing_sizes() -> None:
    """So large that they travel apart from their description, and are expected where the mini-batch before had them."""

    def wide() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(5, 6), Repeated(), Stash(),
            nn.Tanh(), nn.Dropout(0.3), nn.Tanh(), Halves(),
            Joined(), Pop(), nn.Linear(6 * Repeated.times, 4),
        )  # fmt: skip

    for checkpoint in CHECKPOINTS:
        ours, threads = built(4, checkpoint, False, wide)
        for size in (13, 13, 8, 13):
            assert_part_of(step(ours, size), step(threads, size))
        ours.close()


def test_shapes_are_described_once() -> None:
    ours, _ = built(4, "always", False)
    counts = []
    for size in (20, 20, 15, 20, 15):
        step(ours, size)
        counts.append(ours._wires.described)
    first, again, others, *later = counts
    assert first == again < others == later[0] == later[1], counts
    ours.close()


def test_one_rank_is_enough() -> None:
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("dp", "pp"))
    for checkpoint in CHECKPOINTS:
        results = []
        for make in (partial(DistributedGPipe, mesh=mesh["pp"]), partial(GPipe, devices=["cpu"], engine="workers")):
            torch.manual_seed(3)
            results.append(step(make(layers(), [10], chunks=2, checkpoint=checkpoint), 6))
        assert_part_of(*results)

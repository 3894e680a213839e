"""A pipeline over processes equals one over threads, to the last bit, and sends no more than it has to."""

from __future__ import annotations

from collections import Counter
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


def wide() -> nn.Sequential:
    """Tensors so large that they travel apart from their description, expected where the mini-batch before had them."""
    return nn.Sequential(
        nn.Linear(5, 6), Repeated(), Stash(),
        nn.Tanh(), nn.Dropout(0.3), nn.Tanh(), Halves(),
        Joined(), Pop(), nn.Linear(6 * Repeated.times, 4),
    )  # fmt: skip


def test_equal_to_threads() -> None:
    cases = [*product((1, 2, 5), CHECKPOINTS, (False, True), [layers]), *product((4,), CHECKPOINTS, (False,), [wide])]
    for chunks, checkpoint, deferred, make in cases:
        ours, threads = built(chunks, checkpoint, deferred, make)
        for size in (23, 23, 20, 23):
            assert_part_of(step(ours, size), step(threads, size))
        with torch.no_grad():
            output = ours.eval()(torch.ones(7, 5))
        assert (output is None) == (dist.get_rank() < WORLD - 1)
        ours.close()


def test_layers_on_meta_are_filled() -> None:
    def reset(k: int, layer: nn.Module) -> None:
        for module in layer.modules():
            if isinstance(module, (nn.Linear, nn.BatchNorm1d)):
                module.reset_parameters()

    def on_meta() -> nn.Sequential:
        torch.manual_seed(5)
        with torch.device("meta"):
            return layers()

    expected = dict(GPipe(on_meta(), BALANCE, devices=["cpu"] * WORLD, init=reset).named_parameters())
    for balance in (BALANCE, [1, 1, 8]):
        for name, p in DistributedGPipe(on_meta(), balance, init=reset).named_parameters():
            assert torch.equal(p, expected[name]), name


def test_only_what_is_needed_is_sent() -> None:
    """Boundary tensors and skips, once each way; and shapes are described when they are new."""
    rank = dist.get_rank()
    ours, _ = built(4, "always", False)
    described, sent = [], []
    for size in (20, 20, 15, 20, 15):
        step(ours, size)
        described.append(ours._wires.described)
        sent.append(Counter({key: count for key, count in ours._wires.sent.items() if key[0] != "control"}))
    first, again, others, *later = described
    assert first == again < others == later[0] == later[1], described
    boundary = 20 * 6 * 4
    expected: list[dict[tuple[str, int], int]] = [
        {("forward", 1): boundary, ("forward skips", 2): boundary},
        {("forward", 2): boundary, ("backward", 0): boundary},
        {("backward", 1): boundary, ("backward skips", 0): boundary},
    ]
    assert sent[1] - sent[0] == expected[rank], sent


def test_one_rank_is_enough() -> None:
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("dp", "pp"))
    for checkpoint in CHECKPOINTS:
        results = []
        for make in (partial(DistributedGPipe, mesh=mesh["pp"]), partial(GPipe, devices=["cpu"], engine="workers")):
            torch.manual_seed(3)
            results.append(step(make(layers(), [10], chunks=2, checkpoint=checkpoint), 6))
        assert_part_of(*results)

"""Normalization: running statistics see every micro-batch once, or every mini-batch once where they are deferred."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, is_recomputing


def channels(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


# Layers on inputs of shape (N, 2, 3, 3).
NORMS: dict[str, Callable[[], nn.Sequential]] = {
    "batch norm": lambda: channels(nn.BatchNorm2d(4)),
    "momentum none": lambda: channels(nn.BatchNorm2d(4, momentum=None)),
    "not affine": lambda: channels(nn.BatchNorm2d(4, affine=False)),
    "no running statistics": lambda: channels(nn.BatchNorm2d(4, track_running_stats=False)),
    "in evaluation by itself": lambda: channels(nn.BatchNorm2d(4).eval()),
    "instance norm": lambda: channels(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "instance norm, no statistics": lambda: channels(nn.InstanceNorm2d(4)),
    "group norm": lambda: channels(nn.GroupNorm(2, 4)),
    "two": lambda: channels(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4))),
    "at the end": lambda: nn.Sequential(nn.Flatten(), nn.Linear(18, 8), nn.Tanh(), nn.Linear(8, 4), nn.BatchNorm1d(4)),
    "at the start": lambda: nn.Sequential(nn.BatchNorm2d(2), *channels(nn.Tanh())[:4]),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("balance", [[5], [2, 3], [1, 1, 3]], ids=lambda b: f"n{len(b)}")
@pytest.mark.parametrize("build", NORMS.values(), ids=NORMS)
def test_norms(
    build: Callable[[], nn.Sequential],
    balance: list[int],
    training: bool,
    way: dict[str, Any],
    equals_plain: Callable[..., Any],
) -> None:
    x = torch.randn(14, 2, 3, 3).requires_grad_()

    def prepare(module: nn.Sequential) -> None:
        if not training:
            module.eval()

    outcome = equals_plain(build, x, balance, chunks=4, prepare=prepare, steps=2, **way)
    if build is NORMS["batch norm"]:
        assert outcome.buffers["1.num_batches_tracked"] == (2 * 4 if training else 0)


def test_statistics_are_there_again_after_a_failing_recomputation(way: dict[str, Any]) -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                raise ArithmeticError("the second time")
            return x

    norm = nn.BatchNorm2d(4)
    model = GPipe(nn.Sequential(nn.Conv2d(2, 4, 1), norm, Failing()), [1, 2], devices=["cpu"] * 2, chunks=4, **way)
    y = model(torch.randn(14, 2, 3, 3))
    expected = {name: b.clone() for name, b in norm.named_buffers()}
    if way["checkpoint"] != "never":
        with pytest.raises(ArithmeticError, match="the second time"):
            y.sum().backward()
    assert norm.track_running_stats
    assert norm.state_dict().keys() > expected.keys()
    assert all(torch.equal(b, expected[name]) for name, b in norm.named_buffers())


@pytest.mark.parametrize("batch, chunks", [(13, 8), (12, 4), (12, 1), (13, 20), (7, 2)])
@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1]], ids=str)
def test_deferred_statistics_are_those_of_the_mini_batch(
    balance: list[int], batch: int, chunks: int, way: dict[str, Any]
) -> None:
    module = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    whole = nn.BatchNorm2d(4)
    model = GPipe(module, balance, devices=["cpu"] * len(balance), chunks=chunks, deferred_batch_norm=True, **way)
    for step in range(1, 4):
        x = torch.randn(batch, 2, 3, 3) * step + 5
        y = model(x)
        with torch.no_grad():
            whole(module[0](x))
        for moment in ("after the forward", "after the backward"):
            buffers = dict(model[1].named_buffers())
            assert buffers["num_batches_tracked"] == whole.num_batches_tracked == step, moment
            for name, expected in whole.named_buffers():
                # Moments of parts are combined, which adds in another order than those of the whole.
                torch.testing.assert_close(buffers[name], expected, rtol=1e-5, atol=1e-6)
            if moment == "after the forward":
                y.sum().backward()


def test_deferring_changes_neither_outputs_nor_gradients(way: dict[str, Any], loss_of: Any) -> None:
    x = torch.randn(13, 2, 3, 3)
    results = []
    for deferred in (False, True):
        torch.manual_seed(1)
        module = channels(nn.BatchNorm2d(4))
        model = GPipe(module, [2, 3], devices=["cpu"] * 2, chunks=8, deferred_batch_norm=deferred, **way)
        y = model(x)
        loss_of(y).backward()
        results.append([y, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("micro_batch", range(4))
def test_a_failing_forward_leaves_no_deferred_statistics(micro_batch: int, way: dict[str, Any]) -> None:
    class Fragile(nn.Module):
        left: int | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise ArithmeticError("fragile")
            return x

    fragile = Fragile()
    layers = nn.Sequential(nn.BatchNorm1d(3), fragile, nn.BatchNorm1d(3))
    expected = copy.deepcopy(layers)
    model = GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=4, deferred_batch_norm=True, **way)
    fragile.left = micro_batch
    with pytest.raises(ArithmeticError, match="fragile"):
        model(torch.randn(8, 3))
    assert all(torch.equal(v, expected.state_dict()[k]) for k, v in model.state_dict().items())

    fragile.left = None
    good = torch.randn(8, 3)
    model(good)
    expected[0](good)
    for name, running in expected[0].named_buffers():
        # Moments of parts are combined, which adds in another order than those of the whole.
        torch.testing.assert_close(model[0].get_buffer(name), running, rtol=1e-5, atol=1e-6)

"""`convert_deferred_batch_norm`: which layers it replaces, and what the new ones share with the old."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.batchnorm import DeferredBatchNorm

from .batches import assert_same_statistics, batch, convert, run


def test_conversion_shares_everything_with_the_original() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False)))
    model[1][0].weight.requires_grad_(False)
    model[1][0].eval()
    names = list(model.state_dict())
    tensors = [*model.parameters(), *model.buffers()]
    converted = convert(model, 4)
    assert converted is model
    assert list(converted.state_dict()) == names
    assert all(a is b for a, b in zip(tensors, [*converted.parameters(), *converted.buffers()], strict=True))
    assert [type(layer) for layer in converted[1]] == [DeferredBatchNorm] * 2
    assert [layer.chunks for layer in converted[1]] == [4, 4]
    assert [layer.training for layer in converted[1]] == [False, True]
    assert [p.requires_grad for p in converted[1].parameters()] == [False, True]


def test_state_dict_of_an_unfinished_mini_batch_is_the_last_one() -> None:
    deferred = convert(nn.BatchNorm1d(3), 2)
    before = copy.deepcopy(deferred.state_dict())
    deferred(batch(8, 3))
    torch.testing.assert_close(deferred.state_dict(), before)


def test_state_dict_of_torchgpipe_0_0_7_loads() -> None:
    """It has two more buffers, the sums of an unfinished mini-batch."""
    deferred = convert(nn.Sequential(nn.BatchNorm1d(3)), 2)
    old = {"0.running_mean": torch.arange(3.0), "0.sum": torch.ones(3), "0.sum_squares": torch.ones(3)}
    deferred.load_state_dict({**deferred.state_dict(), **old})
    torch.testing.assert_close(deferred[0].running_mean, old["0.running_mean"])
    with pytest.raises(RuntimeError, match="Unexpected"):
        deferred.load_state_dict({**deferred.state_dict(), "0.total": torch.ones(3)})


def test_hooks_go_on() -> None:
    layer, seen = nn.BatchNorm1d(3), []
    layer.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    convert(nn.Sequential(layer), 2)(batch(4, 3))
    assert seen == [DeferredBatchNorm]


def test_the_original_layer_is_left_whole() -> None:
    """The replaced layer and its replacement share tensors, not the dictionaries that hold them."""
    layer = nn.BatchNorm1d(3)
    deferred = convert(layer, 2).double()
    assert layer.running_mean is not None and layer.running_mean.dtype == torch.float32
    assert deferred.running_mean.dtype == torch.float64
    assert "_tracked" not in vars(layer)


def test_layer_that_occurs_twice_stays_one() -> None:
    layer = nn.BatchNorm1d(3)
    model: Any = nn.Sequential(layer, nn.Sequential(layer))
    model[1].again = layer
    convert(model, 2)
    assert model[0] is model[1][0] is model[1].again
    assert isinstance(model[0], DeferredBatchNorm)


def without(name: str) -> nn.Module:
    layer = nn.BatchNorm1d(3)
    setattr(layer, name, None)
    return layer


LEFT_ALONE: dict[str, nn.Module] = {
    "SyncBatchNorm": nn.SyncBatchNorm(3),
    "InstanceNorm": nn.InstanceNorm1d(3),
    "no running statistics": nn.BatchNorm2d(3, track_running_stats=False),
    "running statistics switched off": without("track_running_stats"),
    "running mean taken away": without("running_mean"),
    "lazy, no running statistics": nn.LazyBatchNorm1d(track_running_stats=False),
}


@pytest.mark.parametrize("layer", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_left_alone(layer: nn.Module) -> None:
    assert convert(layer, 2) is layer
    assert convert(nn.Sequential(layer), 2)[0] is layer


def test_converting_again_changes_the_chunks() -> None:
    first = convert(nn.BatchNorm2d(3), 2)
    assert convert(first, 2) is first
    second = convert(first, 3)
    assert (first.chunks, second.chunks) == (2, 3)
    assert second.running_mean is first.running_mean
    with pytest.raises(ValueError, match="4D"):
        second(batch(8, 3))


@pytest.mark.parametrize("arguments", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}])
def test_built_directly(arguments: dict[str, Any]) -> None:
    plain, deferred = nn.BatchNorm2d(3, **arguments), DeferredBatchNorm(3, chunks=2, **arguments)
    assert list(plain.state_dict()) == list(deferred.state_dict())
    for layer in (plain, deferred):
        layer.double()
    x = batch(8, 3, 2, 2, dtype=torch.float64)
    run(deferred, x.chunk(2))
    plain(x)
    assert_same_statistics(deferred, plain)
    assert repr(deferred).startswith("DeferredBatchNorm(3, eps=1e-05") and "chunks=2" in repr(deferred)


class Activated(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


# What is done, the error, and what its one line says.
MISUSE: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: convert(nn.ReLU(), 0), ValueError, "chunks must be a positive int, or None .* got 0"),
    (lambda: DeferredBatchNorm(3, chunks=1.5), ValueError, "got 1.5"),  # type: ignore[arg-type]
    (lambda: convert(nn.LazyBatchNorm1d()), ValueError, "cannot defer LazyBatchNorm1d before its first input"),
    (lambda: convert(Activated(3)), TypeError, r"cannot defer Activated, whose forward\(\) is its own"),
    (lambda: convert(nn.BatchNorm1d(3))(batch(4, 3, 2, 2)), ValueError, "expected 2D or 3D input"),
    (lambda: convert(nn.BatchNorm2d(3))(batch(4, 3)), ValueError, "expected 4D input"),
    (lambda: DeferredBatchNorm(3)(batch(4)), ValueError, r"expected an input of shape \(N, C\) .* got \(4,\)"),
    (lambda: convert(nn.BatchNorm1d(3))(batch(1, 3)), ValueError, r"more than 1 value .* \(1, 3\): use fewer chunks"),
]


@pytest.mark.parametrize("misuse, error, message", MISUSE)
def test_misuse(misuse: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        misuse()


def test_a_module_that_cannot_be_converted_is_not_converted_by_half() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), Activated(3))
    with pytest.raises(TypeError):
        convert(model, 2)
    assert type(model[0]) is nn.BatchNorm1d

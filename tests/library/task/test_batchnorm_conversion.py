"""`convert_deferred_batch_norm`: which layers it replaces, and what the new ones share with the old."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.task.batchnorm import DeferredBatchNorm

from ..batches import assert_same_statistics, batch, convert, run


def test_conversion_shares_everything_with_the_original() -> None:
    """Also hooks and the mode, but not the dictionaries that hold the tensors. A layer that occurs twice stays one."""
    seen: list[type] = []
    first, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False)
    first.weight.requires_grad_(False)
    first.eval().register_forward_hook(lambda module, args, output: seen.append(type(module)))
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Sequential(first, other), first)
    names, tensors = list(model.state_dict()), [*model.parameters(), *model.buffers()]
    assert convert(model, 4) is model and list(model.state_dict()) == names
    assert all(a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True))
    assert [type(layer) for layer in model[1]] == [DeferredBatchNorm] * 2 and model[2] is model[1][0]
    assert [(layer.chunks, layer.training) for layer in model[1]] == [(4, False), (4, True)]
    assert [p.requires_grad for p in model[1].parameters()] == [False, True]
    model(batch(4, 3))
    assert seen == [DeferredBatchNorm] * 2
    model.double()
    assert first.running_mean is not None and first.running_mean.dtype == torch.float32
    assert model[2].running_mean.dtype == torch.float64
    assert "_tracked" not in vars(first)


def test_state_dicts() -> None:
    """That of an unfinished mini-batch is the last one. That of 0.0.7 has two more buffers, its sums."""
    deferred = convert(nn.Sequential(nn.BatchNorm1d(3)), 2)
    before = copy.deepcopy(deferred.state_dict())
    deferred(batch(8, 3))
    torch.testing.assert_close(deferred.state_dict(), before)
    old = {"0.running_mean": torch.arange(3.0), "0.sum": torch.ones(3), "0.sum_squares": torch.ones(3)}
    deferred.load_state_dict({**before, **old})
    torch.testing.assert_close(deferred[0].running_mean, old["0.running_mean"])
    with pytest.raises(RuntimeError, match="Unexpected"):
        deferred.load_state_dict({**before, "0.total": torch.ones(3)})


def without(name: str) -> nn.Module:
    layer = nn.BatchNorm1d(3)
    setattr(layer, name, None)
    return layer


LEFT_ALONE = [
    nn.SyncBatchNorm(3),
    nn.InstanceNorm1d(3),
    nn.BatchNorm2d(3, track_running_stats=False),
    without("track_running_stats"),
    without("running_mean"),
    nn.LazyBatchNorm1d(track_running_stats=False),
]


@pytest.mark.parametrize("layer", LEFT_ALONE)
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
    x = batch(8, 3, 2, 2)
    run(deferred, x.chunk(2))
    plain(x)
    assert_same_statistics(deferred, plain)
    assert "chunks=2" in repr(deferred)


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

"""Deferred batch normalization: from micro-batches, the statistics that `nn.BatchNorm` has of the whole."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.batchnorm import DeferredBatchNorm, commit
from torchgpipe.checkpoint import recomputing

from .batches import assert_same_statistics, batch, convert, run, statistics

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

# Layer, and the shape of a mini-batch.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (14, 3)),
    "1d over time": (lambda: nn.BatchNorm1d(3), (14, 3, 5)),
    "2d": (lambda: nn.BatchNorm2d(3), (14, 3, 4, 5)),
    "3d": (lambda: nn.BatchNorm3d(3), (14, 3, 2, 4, 5)),
    "cumulative average": (lambda: nn.BatchNorm2d(3, momentum=None), (14, 3, 4, 5)),
    "not affine": (lambda: nn.BatchNorm2d(3, affine=False), (14, 3, 4, 5)),
    "other eps": (lambda: nn.BatchNorm2d(3, eps=0.1), (14, 3, 4, 5)),
    "double": (lambda: nn.BatchNorm2d(3, dtype=torch.float64), (14, 3, 4, 5)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunks", [1, 2, 4, 5])
@pytest.mark.parametrize("build, shape", LAYERS.values(), ids=LAYERS)
def test_statistics_of_the_mini_batch(
    build: Callable[[], nn.Module], shape: tuple[int, ...], chunks: int, device: str
) -> None:
    plain = build().to(device)
    deferred = convert(copy.deepcopy(plain), chunks)
    dtype = next((x.dtype for x in plain.state_dict().values()), torch.float32)
    for seed in range(3):
        x = batch(*shape, seed=seed, dtype=dtype).to(device)
        parts = x.chunk(chunks)
        before = statistics(deferred)
        outputs = [deferred(part) for part in parts[:-1]]
        # Nothing moves before the last micro-batch.
        torch.testing.assert_close(statistics(deferred), before, rtol=0, atol=0)
        outputs.append(deferred(parts[-1]))
        plain(x)
        assert_same_statistics(deferred, plain)
        # A micro-batch is normalized by its own statistics.
        for part, output in zip(parts, outputs, strict=True):
            torch.testing.assert_close(output, build().to(device)(part))
    torch.testing.assert_close(deferred.eval()(x), plain.eval()(x))


@given(
    splits=st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=6), min_size=1, max_size=3),
    momentum=st.sampled_from([0.1, 0.0, 1.0, None]),
    mean=st.sampled_from([0.0, -50.0, 1e4]),
)
def test_any_split(splits: list[list[int]], momentum: float | None, mean: float) -> None:
    plain = nn.BatchNorm1d(2, momentum=momentum).double()
    deferred = convert(copy.deepcopy(plain), None)
    for seed, sizes in enumerate(splits):
        x = batch(sum(sizes), 2, mean=mean, seed=seed, dtype=torch.float64)
        run(deferred, x.split(sizes))
        deferred.commit()
        plain(x)
        assert_same_statistics(deferred, plain, rtol=1e-9, atol=1e-9)


# Of layers that end a mini-batch together: momentum, type, whether they count batches, and the sizes of micro-batches.
TOGETHER = [*product([0.1, None, 0.7], [torch.float, torch.double], [True, False], [(4, 4), (3, 2, 5), (9, 9), ()])]


def test_layers_commit_together() -> None:
    plain = [nn.BatchNorm1d(1 + k % 4, momentum=m, dtype=dtype) for k, (m, dtype, *_) in enumerate(TOGETHER)]
    for layer, (*_, counts, _) in zip(plain, TOGETHER, strict=True):
        layer.num_batches_tracked = layer.num_batches_tracked if counts else None
    deferred = [convert(copy.deepcopy(layer), None) for layer in plain]
    for step in range(3):
        for k, (_, dtype, _, sizes) in enumerate(TOGETHER):
            if sizes:
                x = batch(sum(sizes), 1 + k % 4, *[3] * (k % 3 == 0), mean=k % 5 + 1.0, seed=step, dtype=dtype)
                plain[k](x)
                run(deferred[k], x.split(sizes))
        commit(deferred)
        for one, other, (_, dtype, *_) in zip(deferred, plain, TOGETHER, strict=True):
            # A layer in double precision keeps it, whatever stands beside it.
            tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.double else {}
            assert_same_statistics(one, other, **tolerance)


def test_mean_far_from_zero_costs_no_digits() -> None:
    """In float32 a sum of squares near 1e8 would be off by more than the variance, 1."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1e4
    deferred = convert(nn.BatchNorm1d(4, momentum=1.0), 8)
    run(deferred, x.float().chunk(8))
    torch.testing.assert_close(deferred.running_var.double(), x.float().double().var(0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("chunks", [2, 7, 100, None])
def test_commit_ends_a_mini_batch_once(chunks: int | None) -> None:
    """Fourteen samples in eight chunks make seven micro-batches."""
    plain = nn.BatchNorm1d(3, momentum=None)
    deferred = convert(copy.deepcopy(plain), chunks)
    commit([])
    deferred.commit()  # of nothing
    for seed in range(3):
        x = batch(14, 3, seed=seed)
        run(deferred, x.chunk(2 if chunks == 2 else 8))
        plain(x)
        for _ in range(3):
            deferred.commit()
            assert_same_statistics(deferred, plain)


def test_recomputation_tracks_nothing() -> None:
    plain, x = nn.BatchNorm1d(3), batch(9, 3)
    deferred = convert(copy.deepcopy(plain), 3)
    run(deferred, x.chunk(3))
    with recomputing():
        run(deferred, x.chunk(3)[::-1])
    plain(x)
    assert_same_statistics(deferred, plain)


QUIET: dict[str, Callable[[Any], object]] = {
    "evaluation": lambda layer: layer.eval(),
    "switched off later": lambda layer: setattr(layer, "track_running_stats", False),
}


@pytest.mark.parametrize("change", QUIET.values(), ids=QUIET)
def test_nothing_is_tracked(change: Callable[[Any], object]) -> None:
    plain, x = nn.BatchNorm1d(3), batch(9, 3)
    deferred = convert(copy.deepcopy(plain), 1)
    change(plain)
    change(deferred)
    torch.testing.assert_close(deferred(x), plain(x))
    deferred.commit()
    assert_same_statistics(deferred, plain)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_training_mode_without_gradients_tracks(context: Callable[[], AbstractContextManager[None]]) -> None:
    plain, x = nn.BatchNorm1d(3), batch(8, 3)
    deferred = convert(copy.deepcopy(plain), None)
    with context():
        run(deferred, x.chunk(4))
    deferred.commit()
    plain(x)
    assert_same_statistics(deferred, plain)
    assert not any(buffer.is_inference() for buffer in deferred.buffers())


@pytest.mark.parametrize("momentum", [0.1, None])
def test_layers_that_share_running_statistics_update_them_in_turn(momentum: float | None) -> None:
    plain = [nn.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(3, momentum=momentum)]
    for name, buffer in plain[0].named_buffers():
        setattr(plain[1], name, buffer)
    deferred = [convert(layer, None) for layer in copy.deepcopy(plain)]
    for index in range(2):
        x = batch(8, 3, seed=index)
        plain[index](x)
        run(deferred[index], x.chunk(4))
    commit(deferred)
    assert_same_statistics(deferred[0], plain[0])


class Launches(TorchDispatchMode):
    """Count the operators that are given to the device: all but those that only make views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "arguments, most",
    [({}, 25), ({"momentum": None}, 30), ({"dtype": torch.half}, 28), ({"track_running_stats": False}, 0)],
)
def test_number_of_launches_does_not_grow_with_layers(arguments: dict[str, Any], most: int) -> None:
    counts = []
    for number in (1, 10, 100):
        layers = [DeferredBatchNorm(3, chunks=None, **arguments) for _ in range(number)]
        for index, layer in enumerate(layers):
            run(layer, batch(16, 3, 1 + index % 3, dtype=arguments.get("dtype", torch.float)).chunk(8))
        with Launches() as launches:
            commit(layers)
        counts.append(launches.count)
    assert counts == counts[:1] * 3
    assert counts[0] <= most


@pytest.mark.parametrize("device", ["meta", *DEVICES[1:]])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_commit_does_not_wait_for_the_device(momentum: float | None, device: str) -> None:
    """A tensor on `meta` has no value that could be read; CUDA raises at what would wait."""
    layers = [DeferredBatchNorm(c, momentum=momentum, chunks=None, device=device) for c in (3, 4)]
    for layer in layers:
        run(layer, torch.empty(8, layer.num_features, 2, device=device).chunk(4))
    buffers = [buffer for layer in layers for buffer in layer.buffers()]
    versions = [buffer._version for buffer in buffers]
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        commit(layers)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    # Every buffer was written in place, once.
    assert [buffer._version for buffer in buffers] == [version + 1 for version in versions]
    assert all(a is b for a, b in zip(buffers, (b for layer in layers for b in layer.buffers()), strict=True))


def test_default_device_does_not_matter() -> None:
    plain, x = nn.BatchNorm1d(3), batch(8, 3)
    deferred = convert(copy.deepcopy(plain), None)
    with torch.device("meta"):
        run(deferred, x.chunk(4))
        commit([deferred])
    plain(x)
    assert_same_statistics(deferred, plain)


@pytest.mark.parametrize(
    "move, back, tolerance",
    [
        (lambda m: m.half(), torch.half, 1e-3),
        (lambda m: m.bfloat16(), torch.bfloat16, 1e-2),
        (lambda m: m.double(), torch.double, 1e-6),
        (copy.deepcopy, torch.float32, 1e-6),
        (lambda m: pickle.loads(pickle.dumps(m)), torch.float32, 1e-6),
    ],
    ids=["half", "bfloat16", "double", "deepcopy", "pickle"],
)
def test_what_was_tracked_survives_a_move(move: Callable[[Any], Any], back: torch.dtype, tolerance: float) -> None:
    """A sum over 60,000 squares of 2 would overflow in half precision; the variance does not."""
    plain, x = nn.BatchNorm2d(2), batch(6, 2, 100, 100)
    deferred = convert(copy.deepcopy(plain), None)
    first, second = x.chunk(2)
    deferred(first)
    deferred = move(deferred)
    deferred(second.to(back))
    deferred.commit()
    plain(x)
    assert_same_statistics(deferred, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("outlier", [0.0, 300.0])
def test_half_precision_from_the_start(outlier: float) -> None:
    """One micro-batch may be so far off that the square of its distance overflows, while the variance does not."""
    plain, x = nn.BatchNorm2d(2), batch(8, 2, 50, 50)
    x[0] += outlier
    deferred = convert(copy.deepcopy(plain).half(), 8)
    run(deferred, x.half().chunk(8))
    plain(x)
    assert_same_statistics(deferred, plain, rtol=2e-3, atol=2e-3)


def test_empty_micro_batch_changes_nothing() -> None:
    deferred = convert(nn.BatchNorm1d(3), 1)
    assert deferred(torch.empty(0, 3)).shape == (0, 3)
    deferred.commit()
    assert_same_statistics(deferred, nn.BatchNorm1d(3))

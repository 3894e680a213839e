"""Deferred batch normalization: from micro-batches, the statistics that `nn.BatchNorm` has of the whole."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.batchnorm import DeferredBatchNorm, commit
from torchgpipe.checkpoint import checkpointing, recomputing

from .batches import assert_same_statistics, batch, convert, run, statistics, without

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

# Layer, and the shape of a mini-batch.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (14, 3)),
    "1d over time": (lambda: nn.BatchNorm1d(3), (14, 3, 5)),
    "2d": (lambda: nn.BatchNorm2d(3), (14, 3, 4, 5)),
    "3d": (lambda: nn.BatchNorm3d(3), (14, 3, 2, 4, 5)),
    "high momentum": (lambda: nn.BatchNorm2d(3, momentum=0.9), (14, 3, 4, 5)),
    "momentum 0": (lambda: nn.BatchNorm2d(3, momentum=0.0), (14, 3, 4, 5)),
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


@pytest.mark.parametrize("build, shape", LAYERS.values(), ids=LAYERS)
def test_gradients_are_those_of_micro_batches_apart(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    plain = build().double()
    deferred = convert(copy.deepcopy(plain), 3)
    inputs = []
    for layer in (plain, deferred):
        x = batch(*shape, dtype=torch.float64).requires_grad_()
        run(layer, x.chunk(3)).pow(3).sum().backward()
        inputs.append(x)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for a, b in zip(plain.parameters(), deferred.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@given(
    splits=st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=6), min_size=1, max_size=3),
    momentum=st.sampled_from([0.1, 0.5, None]),
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


def test_mean_far_from_zero_costs_no_digits() -> None:
    """In float32 a sum of squares near 1e8 would be off by more than the variance, 1."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1e4
    deferred = convert(nn.BatchNorm1d(4, momentum=1.0), 8)
    run(deferred, x.float().chunk(8))
    torch.testing.assert_close(deferred.running_var.double(), x.float().double().var(0), rtol=1e-3, atol=0)


# when a mini-batch ends


@pytest.mark.parametrize("chunks", [2, 8, 100, None])
def test_commit_ends_a_mini_batch_once(chunks: int | None) -> None:
    """Thirteen samples in eight chunks make seven micro-batches."""
    plain = nn.BatchNorm1d(3, momentum=None)
    deferred = convert(copy.deepcopy(plain), chunks)
    for seed in range(3):
        x = batch(14, 3, seed=seed)
        parts = x.chunk(8 if chunks != 2 else 2)
        run(deferred, parts)
        plain(x)
        for _ in range(3):
            deferred.commit()
            assert_same_statistics(deferred, plain)
            assert deferred.num_batches_tracked == seed + 1


def test_commit_with_nothing_tracked_does_nothing() -> None:
    for tracks in (True, False):
        deferred = DeferredBatchNorm(3, chunks=4, track_running_stats=tracks)
        deferred.commit()
        assert_same_statistics(deferred, nn.BatchNorm1d(3, track_running_stats=tracks))
    commit([])


def test_discard_drops_a_failed_mini_batch() -> None:
    plain = nn.BatchNorm1d(3)
    deferred = convert(copy.deepcopy(plain), 3)
    run(deferred, [batch(4, 3, mean=100.0)] * 2)
    deferred.discard()
    deferred.commit()
    assert_same_statistics(deferred, plain)
    x = batch(9, 3)
    run(deferred, x.chunk(3))
    plain(x)
    assert_same_statistics(deferred, plain)


def test_called_twice_in_a_micro_batch_commits_once() -> None:
    plain, x = nn.BatchNorm1d(3), batch(12, 3)
    deferred = convert(copy.deepcopy(plain), None)
    for part in x.chunk(3):
        deferred(part)
        deferred(part + 1)
    deferred.commit()
    plain(torch.cat([x, x + 1]))
    assert_same_statistics(deferred, plain)


@pytest.mark.parametrize("chunks", [1, 3])
def test_recomputation_tracks_nothing(chunks: int) -> None:
    plain, x = nn.BatchNorm1d(3), batch(9, 3)
    deferred = convert(copy.deepcopy(plain), chunks)
    parts = x.chunk(chunks)
    for part in parts:
        with torch.no_grad(), checkpointing():
            first = deferred(part)
    for part in reversed(parts):
        with recomputing():
            second = deferred(part)
    plain(x)
    assert_same_statistics(deferred, plain)
    torch.testing.assert_close(deferred(parts[-1]), first)
    assert second.shape == first.shape


def test_evaluation_tracks_nothing_and_uses_the_running_statistics() -> None:
    plain = nn.BatchNorm1d(3)
    plain(batch(9, 3))
    deferred = convert(copy.deepcopy(plain), 2).eval()
    for _ in range(2):
        torch.testing.assert_close(deferred(batch(9, 3, seed=1)), plain.eval()(batch(9, 3, seed=1)))
    deferred.commit()
    assert_same_statistics(deferred, plain)


def test_statistics_switched_off_later_stay() -> None:
    """`nn.BatchNorm` asks `track_running_stats` at every forward."""
    plain = nn.BatchNorm1d(3)
    deferred = convert(copy.deepcopy(plain), 1)
    for layer in (plain, deferred):
        layer.track_running_stats = False
        layer(batch(9, 3))
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


# many layers at once


# Layers that end one mini-batch together, each with the shape of its mini-batch and its number of micro-batches.
TOGETHER: dict[str, list[tuple[Callable[[], nn.Module], tuple[int, ...], int]]] = {
    "alike": [(lambda: nn.BatchNorm1d(3), (14, 3), 4)] * 3,
    "channels": [(lambda c=c: nn.BatchNorm1d(c), (14, c), 4) for c in (1, 5, 2)],
    "values per channel": [(lambda: nn.BatchNorm2d(3), (14, 3, n, n), 4) for n in (1, 8, 3)],
    "micro-batches": [(lambda: nn.BatchNorm1d(3), (14, 3), n) for n in (4, 1, 5, 4)],
    "momenta": [(lambda m=m: nn.BatchNorm1d(3, momentum=m), (14, 3), 4) for m in (0.1, None, 0.0, 1.0, None, 0.7)],
    "dtypes": [(lambda t=t: nn.BatchNorm1d(3, dtype=t), (14, 3), 4) for t in (torch.float, torch.double, torch.float)],
    "batches not counted": [
        *[(lambda m=m: without("num_batches_tracked", momentum=m), (14, 3), 4) for m in (0.1, None)],
        (lambda: nn.BatchNorm1d(3, momentum=None), (14, 3), 4),
    ],
    "all": [
        (lambda: nn.BatchNorm1d(2, momentum=None, dtype=torch.double), (14, 2, 3), 5),
        (lambda: nn.BatchNorm2d(7, momentum=0.5), (14, 7, 2, 2), 4),
        (lambda: nn.BatchNorm1d(4, momentum=None), (14, 4), 4),
        (lambda: nn.BatchNorm1d(2, momentum=None, dtype=torch.double), (14, 2), 5),
    ],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cases", TOGETHER.values(), ids=TOGETHER)
def test_layers_commit_together(cases: list[tuple[Callable[[], nn.Module], tuple[int, ...], int]], device: str) -> None:
    plain = [build().to(device) for build, _, _ in cases]
    deferred = [convert(copy.deepcopy(layer), None) for layer in plain]
    for step in range(3):
        for index, (_, shape, chunks) in enumerate(cases):
            x = batch(*shape, mean=index + 1.0, seed=step, dtype=plain[index].running_mean.dtype).to(device)
            plain[index](x)
            run(deferred[index], x.chunk(chunks))
        commit(deferred)
        for one, other in zip(deferred, plain, strict=True):
            # A layer in double precision keeps it, whatever stands beside it.
            tolerance = {"rtol": 1e-9, "atol": 1e-9} if one.running_mean.dtype == torch.double else {}
            assert_same_statistics(one, other, **tolerance)


def test_layer_without_a_new_mini_batch_stays_while_others_commit() -> None:
    plain = nn.BatchNorm1d(3)
    idle, busy = convert(copy.deepcopy(plain), None), convert(copy.deepcopy(plain), None)
    run(busy, batch(8, 3).chunk(4))
    commit([idle, busy, busy])
    assert_same_statistics(idle, plain)
    plain(batch(8, 3))
    assert_same_statistics(busy, plain)


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


# moves


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


def test_autocast() -> None:
    plain, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), batch(12, 4)
    deferred = convert(copy.deepcopy(plain), 3)
    with torch.autocast("cpu", torch.bfloat16):
        run(deferred, x.chunk(3))
        plain(x)
    assert_same_statistics(deferred, plain, rtol=1e-2, atol=1e-3)


def test_meta() -> None:
    deferred = convert(nn.BatchNorm2d(3, device="meta"), 2)
    outputs = [deferred(torch.empty(4, 3, 2, 2, device="meta")) for _ in range(2)]
    assert [output.shape for output in outputs] == [(4, 3, 2, 2)] * 2


def test_empty_micro_batch_changes_nothing() -> None:
    deferred = convert(nn.BatchNorm1d(3), 1)
    assert deferred(torch.empty(0, 3)).shape == (0, 3)
    deferred.commit()
    assert_same_statistics(deferred, nn.BatchNorm1d(3))

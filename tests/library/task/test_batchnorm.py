"""Deferred batch normalization: from micro-batches, the statistics that `nn.BatchNorm` has of the whole mini-batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.task.batchnorm import DeferredBatchNorm, commit
from torchgpipe.tensors.checkpoint import recomputing

from ..batches import assert_same_statistics, batch, convert, run, statistics

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

# Layer, and the shape of a mini-batch.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (14, 3)),
    "1d over time": (lambda: nn.BatchNorm1d(3), (14, 3, 5)),
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
    """A layer in double precision keeps it, whatever stands beside it."""
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
            assert_same_statistics(one, other, **({"rtol": 1e-9, "atol": 1e-9} if dtype == torch.double else {}))


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


X = batch(6, 2, 100, 100)


def rest(layer: Any, context: AbstractContextManager[Any] | None = None, dtype: torch.dtype = torch.float32) -> Any:
    with context or nullcontext():
        run(layer, X.to(dtype).chunk(6)[1:])
    return layer


# What happens to a layer after its first micro-batch, up to its last, and how exact its statistics are in the end.
BETWEEN: dict[str, tuple[Callable[[Any], Any], float]] = {
    "recomputation": (lambda layer: rest(rest(layer), recomputing()), 1e-6),
    "no gradients": (lambda layer: rest(layer, torch.no_grad()), 1e-6),
    "inference": (lambda layer: rest(layer, torch.inference_mode()), 1e-6),
    "another default device": (lambda layer: rest(layer, torch.device("meta")), 1e-6),
    # A sum over 60,000 squares of 2 would overflow in half precision; the variance does not.
    "half": (lambda layer: rest(layer.half(), dtype=torch.half), 1e-3),
    "bfloat16": (lambda layer: rest(layer.bfloat16(), dtype=torch.bfloat16), 1e-2),
    "double": (lambda layer: rest(layer.double(), dtype=torch.double), 1e-6),
    "deepcopy": (lambda layer: rest(copy.deepcopy(layer)), 1e-6),
    "pickle": (lambda layer: rest(pickle.loads(pickle.dumps(layer))), 1e-6),
}


@pytest.mark.parametrize("between, tolerance", BETWEEN.values(), ids=BETWEEN)
def test_what_was_tracked_stays_and_nothing_twice(between: Callable[[Any], Any], tolerance: float) -> None:
    plain = nn.BatchNorm2d(2)
    deferred = convert(copy.deepcopy(plain), None)
    deferred(X.chunk(6)[0])
    deferred = between(deferred)
    deferred.commit()
    plain(X)
    assert_same_statistics(deferred, plain, rtol=tolerance, atol=tolerance)
    assert not any(buffer.is_inference() for buffer in deferred.buffers())


WIDE = batch(8, 2, 2500)
FAR = torch.randn(64, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1e4


@pytest.mark.parametrize(
    "x, dtype, tolerance",
    [
        (WIDE, torch.half, 2e-3),
        # One micro-batch is so far off that the square of its distance overflows, while the variance does not.
        (torch.cat([WIDE[:1] + 300, WIDE[1:]]), torch.half, 2e-3),
        (FAR, torch.float, 1e-3),  # a sum of squares near 1e8 would be off by more than the variance, 1
    ],
)
def test_precision(x: torch.Tensor, dtype: torch.dtype, tolerance: float) -> None:
    plain = nn.BatchNorm1d(2)
    deferred = convert(copy.deepcopy(plain).to(dtype), 8)
    run(deferred, x.to(dtype).chunk(8))
    plain.double()(x.to(dtype).double())
    assert_same_statistics(deferred, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunks", [2, 7, 100, None])
def test_commit_ends_a_mini_batch_once(chunks: int | None) -> None:
    """Fourteen samples in eight chunks make seven micro-batches."""
    plain = nn.BatchNorm1d(3, momentum=None)
    deferred = convert(copy.deepcopy(plain), chunks)
    commit([])
    deferred(torch.empty(0, 3))  # an empty micro-batch is none
    deferred.commit()  # of nothing
    assert_same_statistics(deferred, plain)
    for seed in range(3):
        x = batch(14, 3, seed=seed)
        run(deferred, x.chunk(2 if chunks == 2 else 8))
        plain(x)
        for _ in range(3):
            deferred.commit()
            assert_same_statistics(deferred, plain)


@pytest.mark.parametrize("change", [lambda layer: layer.eval(), lambda x: setattr(x, "track_running_stats", False)])
def test_nothing_is_tracked(change: Callable[[Any], object]) -> None:
    """In evaluation, or where it is switched off later."""
    plain, x = nn.BatchNorm1d(3), batch(9, 3)
    nn.init.normal_(plain.weight)
    deferred = convert(copy.deepcopy(plain), 1)
    change(plain)
    change(deferred)
    torch.testing.assert_close(deferred(x), plain(x))
    deferred.commit()
    assert_same_statistics(deferred, plain)


class Launches(TorchDispatchMode):
    """Count the operators that are given to the device: all but those that only make views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        return func(*args, **(kwargs or {}))


@contextmanager
def never_waiting(device: str) -> Iterator[None]:
    """Raise at what would wait for CUDA; a tensor on `meta` has no value that could be read anyway."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    yield
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", ["meta", *DEVICES[1:]])
@pytest.mark.parametrize(
    "arguments, most",
    [({}, 25), ({"momentum": None}, 30), ({"dtype": torch.half}, 28), ({"track_running_stats": False}, 0)],
)
def test_commit_launches_as_much_for_many_layers_and_waits_for_none(
    arguments: dict[str, Any], most: int, device: str
) -> None:
    counts = []
    for number in (1, 10, 100):
        layers = [DeferredBatchNorm(3 + k % 2, chunks=None, device=device, **arguments) for k in range(number)]
        buffers = [buffer for layer in layers for buffer in layer.buffers()]
        for launches in (Launches(), nullcontext()):  # a mode keeps versions from rising
            for k, layer in enumerate(layers):
                x = torch.ones(16, layer.num_features, 1 + k % 3, device=device, dtype=arguments.get("dtype"))
                run(layer, x.chunk(8))
            versions = [buffer._version for buffer in buffers]
            with launches, never_waiting(device):
                commit(layers)
            counts += [launches.count] if isinstance(launches, Launches) else []
        assert [each._version for each in buffers] == [version + 1 for version in versions], "written in place, once"
        assert all(a is b for a, b in zip(buffers, (b for layer in layers for b in layer.buffers()), strict=True))
    assert counts == counts[:1] * 3
    assert counts[0] <= most

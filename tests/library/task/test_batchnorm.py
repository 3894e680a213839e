"""Test deferred batch norm, whose running statistics must be those of whole mini-batches."""

import copy
import pickle
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import BatchNorm1d, BatchNorm2d, Module, Sequential
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.task.batchnorm import DeferredBatchNorm, commit
from torchgpipe.tensors.checkpoint import CheckpointPhase

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
EXACT = {"rtol": 1e-9, "atol": 1e-9}

convert: Callable[..., Any] = DeferredBatchNorm.convert_deferred_batch_norm


def batch(
    *shape: int, mean: float = 3.0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw a mini-batch of growing numbers, so that its micro-batches have different means."""
    generator = torch.Generator().manual_seed(seed)
    samples, *others = shape
    drift = torch.linspace(0.5, 2, samples, dtype=torch.float64)
    drift = drift.reshape(samples, *[1] * len(others))
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    return ((noise + mean) * drift).to(dtype)


def statistics(layer: Module) -> list[Tensor]:
    return [x.double() for x in layer.buffers()]


def assert_same_statistics(deferred: Module, plain: Module, **tolerance: Any) -> None:
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    assert_close(statistics(deferred), statistics(plain), **tolerance)


def run(layer: Module, parts: Iterable[Tensor]) -> Tensor:
    outputs = [layer(part) for part in parts]
    return torch.cat(outputs)


# Each row has a type of layer, the shape of one channel of a sample, and options.
LAYERS: list[tuple[type[Module], tuple[int, ...], dict[str, Any]]] = [
    (BatchNorm1d, (), {}),
    (BatchNorm1d, (5,), {"momentum": 0.0}),
    (BatchNorm2d, (4, 5), {"momentum": None}),
    (BatchNorm2d, (2, 1), {"momentum": 1.0, "affine": False}),
    (nn.BatchNorm3d, (2, 1, 3), {"eps": 0.1}),
]

SPLIT = st.lists(st.integers(2, 9), min_size=1, max_size=6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind, shape, options", LAYERS)
@settings(max_examples=20)
@given(
    splits=st.lists(SPLIT, min_size=1, max_size=3),
    mean=st.sampled_from([0.0, -50.0, 1e4]),
)
def test_statistics_of_the_mini_batch(
    kind: Any,
    shape: tuple[int, ...],
    options: dict[str, Any],
    device: str,
    splits: list[list[int]],
    mean: float,
) -> None:
    """Compare deferred with plain batch norm, also for means whose squares lose precision."""
    plain = kind(3, dtype=torch.double, device=device, **options)
    for p in plain.parameters():
        nn.init.normal_(p)
    fresh = copy.deepcopy(plain)
    deferred = convert(copy.deepcopy(plain), None)
    for seed, sizes in enumerate(splits):
        x = batch(sum(sizes), 3, *shape, mean=mean, seed=seed, dtype=torch.double).to(device)
        before = statistics(deferred)
        for part in x.split(sizes):
            # In training mode, the layer normalizes each micro-batch by its own mean and variance.
            # Its running statistics change only in `commit`.
            assert_close(deferred(part), fresh(part))
            with CheckpointPhase(recomputing=True):
                assert_close(deferred(part), fresh(part))
            assert_close(statistics(deferred), before, rtol=0, atol=0)
        deferred.commit()
        plain(x)
        assert_same_statistics(deferred, plain, **EXACT)
    assert_close(deferred.eval()(x), plain.eval()(x))


# Each item of `TOGETHER` describes a layer: its momentum, its dtype, whether it has the buffer
# `num_batches_tracked`, and the sizes of its micro-batches.
SIZES: list[tuple[int, ...]] = [(4, 4), (3, 2, 5), (9, 9), ()]
DTYPES = [torch.float, torch.double]
TOGETHER = list(product([0.1, None, 0.7], DTYPES, [True, False], SIZES))


def test_layers_commit_together() -> None:
    """Check that one `commit` updates the statistics of many layers, each in its own precision."""
    plain = []
    for k, (momentum, dtype, counts, _) in enumerate(TOGETHER):
        layer = BatchNorm1d(1 + k % 2, momentum=momentum, dtype=dtype)
        if not counts:
            layer.num_batches_tracked = None
        plain.append(layer)
    plain[0]._buffers = plain[2]._buffers
    plain[16]._buffers = plain[18]._buffers
    deferred = [convert(layer, None) for layer in copy.deepcopy(plain)]
    for step in range(3):
        for k, (_, dtype, _, sizes) in enumerate(TOGETHER):
            if not sizes:
                continue
            shape = [sum(sizes), 1 + k % 2]
            if k % 3 == 0:
                shape.append(3)
            x = batch(*shape, mean=k % 5 + 1.0, seed=step, dtype=dtype)
            plain[k](x)
            run(deferred[k], x.split(sizes))
        commit(deferred)
        for one, other, (_, dtype, *_) in zip(deferred, plain, TOGETHER, strict=True):
            tolerance = EXACT if dtype == torch.double else {}
            assert_same_statistics(one, other, **tolerance)


X = batch(6, 2, 100, 100)
FIRST, *REST = X.chunk(6)


def rest(
    layer: Any,
    context: AbstractContextManager[Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Run a layer on `REST`, the test's micro-batches except the first one. Return the layer."""
    with context or nullcontext():
        run(layer, [part.to(dtype) for part in REST])
    return layer


def evaluated(layer: Any) -> Any:
    """Run a batch norm in eval mode, and then in training mode, on the same micro-batches."""
    rest(layer.eval())
    return rest(layer.train())


def switched_off(layer: Any) -> Any:
    """Run a batch norm without and then with `track_running_stats`, on the same micro-batches."""
    layer.track_running_stats = False
    rest(layer)
    layer.track_running_stats = True
    return rest(layer)


# Each value has two parts: a function that runs a batch norm in an unusual way on all micro-batches
# but the first, and the tolerance for the comparison of its running statistics afterwards.
BETWEEN: dict[str, tuple[Callable[[Any], Any], float]] = {
    "evaluation": (evaluated, 1e-6),
    "tracking switched off": (switched_off, 1e-6),
    "inference": (lambda layer: rest(layer, torch.inference_mode()), 1e-6),
    "another default device": (lambda layer: rest(layer, torch.device("meta")), 1e-6),
    # A sum of 60,000 squares would overflow in half precision, but the variance does not.
    "half": (lambda layer: rest(layer.half(), dtype=torch.half), 1e-3),
    "double": (lambda layer: rest(layer.double(), dtype=torch.double), 1e-6),
    "pickle": (lambda layer: rest(pickle.loads(pickle.dumps(layer))), 1e-6),
}


@pytest.mark.parametrize("between, tolerance", BETWEEN.values(), ids=BETWEEN)
def test_what_was_tracked_stays_and_nothing_twice(
    between: Callable[[Any], Any], tolerance: float
) -> None:
    plain = BatchNorm2d(2)
    deferred = convert(copy.deepcopy(plain), None)
    deferred(FIRST)
    deferred = between(deferred)
    deferred.commit()
    plain(X)
    assert_same_statistics(deferred, plain, rtol=tolerance, atol=tolerance)
    for buffer in deferred.buffers():
        assert not buffer.is_inference()


@pytest.mark.parametrize("chunks", [2, 7, 100, None])
def test_commit_ends_a_mini_batch_once(chunks: int | None) -> None:
    plain = BatchNorm1d(3, momentum=None)
    deferred = convert(copy.deepcopy(plain), chunks)
    commit([])
    deferred(torch.empty(0, 3))
    deferred.commit()  # changes nothing, because only an empty micro-batch has run
    assert_same_statistics(deferred, plain)
    for seed in range(3):
        x = batch(14, 3, seed=seed)
        run(deferred, x.chunk(2 if chunks == 2 else 8))  # `chunk(8)` makes 7 parts of 2 samples
        plain(x)
        for again in range(3):
            if again or chunks not in (2, 7):  # otherwise the last chunk has committed
                deferred.commit()
            assert_same_statistics(deferred, plain)


class Launches(TorchDispatchMode):
    """Counts launches of kernels: each operator counts as one, unless it only makes a view."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        makes_a_view = any(r.alias_info and not r.alias_info.is_write for r in returns)
        if not makes_a_view:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.quick(1)
@pytest.mark.parametrize("device", ["meta", *DEVICES[1:]])
@pytest.mark.parametrize("arguments", [{}, {"momentum": None}, {"dtype": torch.half}])
def test_commit_launches_as_much_for_many_layers_and_waits_for_none(
    arguments: dict[str, Any], device: str
) -> None:
    """Check that `commit` launches as many kernels for 100 layers as for one layer.

    The test would raise an error if `commit` waited for the device: on `meta` this is impossible,
    and for CUDA the sync debug mode is on.
    """
    dtype = arguments.get("dtype")
    counts = []
    for number in (1, 10, 100):
        layers = []
        for k in range(number):
            layer = DeferredBatchNorm(3 + k % 2, chunks=None, device=device, **arguments)
            x = torch.ones(16, layer.num_features, 1 + k % 3, device=device, dtype=dtype)
            run(layer, x.chunk(8))
            layers.append(layer)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            with Launches() as launches:
                commit(layers)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        counts.append(launches.count)
    for_one, for_ten, for_a_hundred = counts
    assert for_one == for_ten == for_a_hundred


def test_conversion_shares_everything_with_the_original() -> None:
    """Check that a converted layer has the tensors, the hooks and the mode of its original."""
    seen: list[type] = []
    first, other = BatchNorm1d(3), BatchNorm1d(3, affine=False)
    first.weight.requires_grad_(False)
    first.eval()
    first.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    model: Any = Sequential(nn.Linear(3, 3), Sequential(first, other), first)
    names = list(model.state_dict())
    tensors = [*model.parameters(), *model.buffers()]

    converted = convert(model, 4)

    assert converted is model
    assert list(model.state_dict()) == names
    for tensor, before in zip([*model.parameters(), *model.buffers()], tensors, strict=True):
        assert tensor is before
    of_first, of_other = model[1]
    assert type(of_first) is DeferredBatchNorm
    assert type(of_other) is DeferredBatchNorm
    assert model[2] is of_first
    assert (of_first.chunks, of_first.training) == (4, False)
    assert (of_other.chunks, of_other.training) == (4, True)
    assert [p.requires_grad for p in model[1].parameters()] == [False, True]
    model(batch(4, 3))
    assert seen == [DeferredBatchNorm] * 2
    model.double()
    assert first.get_buffer("running_mean").dtype == torch.float
    assert of_first.running_mean.dtype == torch.double
    assert "_tracked" not in vars(first)


def test_a_state_of_0_0_7_has_two_more_buffers() -> None:
    deferred = DeferredBatchNorm(3, chunks=2)
    state = BatchNorm1d(3).state_dict()
    state["running_mean"] = torch.arange(3.0)
    ones = torch.ones(3)
    deferred.load_state_dict({**state, "sum": ones, "sum_squares": ones})
    assert_close(dict(deferred.state_dict()), dict(state))
    with pytest.raises(RuntimeError, match="Unexpected"):
        deferred.load_state_dict({**state, "total": ones})


def test_left_alone() -> None:
    without_mean = BatchNorm1d(3)
    without_mean.running_mean = None
    untracked = BatchNorm2d(3, track_running_stats=False)
    lazy = nn.LazyBatchNorm1d(track_running_stats=False)
    for layer in (nn.SyncBatchNorm(3), without_mean, untracked, lazy):
        assert convert(Sequential(layer), 2)[0] is layer


def test_converting_again_changes_the_chunks() -> None:
    first = convert(BatchNorm2d(3), 2)
    assert convert(first, 2) is first
    second = convert(first, 3)
    assert (first.chunks, second.chunks) == (2, 3)
    assert second.running_mean is first.running_mean
    assert "chunks=3" in repr(second)
    with pytest.raises(ValueError, match="4D"):
        second(batch(8, 3))


class Activated(BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


PAIR = Sequential(BatchNorm1d(3), Activated(3))
FOUR_DIMENSIONS = batch(4, 3, 2, 2)
ONE_SAMPLE = batch(1, 3)
LAZY = "cannot convert LazyBatchNorm1d to a deferred batch norm before its first input"
ONE_VALUE = r"more than 1 value .* \(1, 3\): use fewer chunks"
ONE_DIMENSION = r"expected an input of shape \(N, C\) .* got \(4,\)"

# A call, the error's type, and a part of its message.
MISUSE: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: convert(nn.ReLU(), 0), ValueError, "chunks must be a positive int, or None .* got 0"),
    (lambda: convert(nn.LazyBatchNorm1d()), ValueError, LAZY),
    (lambda: convert(PAIR), TypeError, r"cannot convert Activated .* overrides forward\(\)"),
    (lambda: convert(BatchNorm1d(3))(FOUR_DIMENSIONS), ValueError, "expected 2D or 3D input"),
    (lambda: DeferredBatchNorm(3)(batch(4)), ValueError, ONE_DIMENSION),
    (lambda: convert(BatchNorm1d(3))(ONE_SAMPLE), ValueError, ONE_VALUE),
]


@pytest.mark.parametrize("misuse, error, message", MISUSE)
def test_misuse(misuse: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        misuse()
    assert type(PAIR[0]) is BatchNorm1d, "half of a module was converted"

"""`GPipe` as a module: how it is made, what it refuses and why, what it has, and where it runs.

That it computes what its layers do is in tests/transparency; errors while it runs are in tests/test_errors.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.skip import skippable

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def made(*arguments: Any, **options: Any) -> GPipe:
    """Make a pipeline of two layers, with a good value for whatever is not given."""
    module, balance = (*arguments, *[linears(2), [1, 1]][len(arguments) :])
    return GPipe(module, balance, **{"devices": ["cpu"] * 2, **options})


@skippable(stash=["a"])
class Stash(nn.Module):
    pass


AUTOMATIC = "balance = balance_by_time(partitions, model, sample)"

# How it is made, the error, and what it says: what was given, and what to do.
MISUSE: dict[str, tuple[Callable[[], object], type[Exception], list[str]]] = {
    "a layer": (lambda: made(nn.Linear(2, 2)), TypeError, ["wraps an nn.Sequential, but got Linear"]),
    "skips that do not match": (
        lambda: made(nn.Sequential(Stash(), nn.ReLU())),
        TypeError,
        ["layer '0' stashes 'a', which no later layer pops"],
    ),
    "no balance": (lambda: GPipe(linears(2)), ValueError, ["balance is required", AUTOMATIC]),
    "chunks 0": (lambda: made(chunks=0), ValueError, ["chunks must be a whole number of at least 1, but got 0"]),
    "chunks 1.5": (lambda: made(chunks=1.5), ValueError, ["a whole number of at least 1, but got 1.5"]),
    "chunks as text": (lambda: made(chunks="8"), ValueError, ["a whole number of at least 1, but got '8'"]),
    "checkpoint": (
        lambda: made(checkpoint="sometimes"),
        ValueError,
        ["checkpoint must be one of 'always', 'except_last', 'never', but got 'sometimes'"],
    ),
    "checkpoint True": (lambda: made(checkpoint=True), ValueError, ["'always', 'except_last', 'never', but got True"]),
    "an engine": (
        lambda: made(engine="inline"),
        ValueError,
        ["engine must be one of 'auto', 'graph', 'workers', but got 'inline'"],
    ),
    "workers off the CPU": (
        lambda: made(engine="workers", devices=["cpu", "meta"]),
        ValueError,
        ["engine='workers' is for CPU devices, but got ['cpu', 'meta']"],
    ),
    "options by position": (lambda: GPipe(linears(2), [1, 1], ["cpu"] * 2), TypeError, ["positional argument"]),  # type: ignore[misc]
}


@pytest.mark.parametrize(("make", "error", "messages"), MISUSE.values(), ids=MISUSE.keys())
def test_misuse(make: Callable[[], object], error: type[Exception], messages: list[str]) -> None:
    with pytest.raises(error) as caught:
        make()

    assert type(caught.value) is error
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([torch.rand(2, 2)], TypeError, "input must be a tensor or a tuple of tensors, but got list"),
        (torch.tensor(1.0), ValueError, "needs a batch dimension, but tensor 0 is a scalar"),
    ],
)
def test_inputs_that_are_refused(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(chunks=2)(value)


MOVES: dict[str, Callable[[GPipe], object]] = {
    "cuda()": lambda model: model.cuda(),
    "cuda(0)": lambda model: model.cuda(0),
    "cuda(device)": lambda model: model.cuda(device=torch.device("cuda", 1)),
    "cpu()": lambda model: model.cpu(),
    "to('cpu')": lambda model: model.to("cpu"),
    "to('cuda:0')": lambda model: model.to("cuda:0"),
    "to(device)": lambda model: model.to(torch.device("meta")),
    "to(device=)": lambda model: model.to(device="cpu"),
    "to(device, dtype)": lambda model: model.to("cpu", torch.float64),
    "to(tensor)": lambda model: model.to(torch.rand(1)),
    "to(tensor=)": lambda model: model.to(tensor=torch.rand(1)),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_it_is_not_moved(move: Callable[[GPipe], object]) -> None:
    model = made()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(TypeError, match=r"cannot be moved; name the devices .*GPipe\(module, balance, devices="):
        move(model)
    for name, p in model.named_parameters():
        assert (p.device, p.dtype) == (CPU, torch.float32)
        assert torch.equal(p, before[name])


CONVERSIONS: dict[str, tuple[Callable[[GPipe], GPipe], torch.dtype]] = {
    "to(float64)": (lambda model: model.to(torch.float64), torch.float64),
    "to(dtype=float64)": (lambda model: model.to(dtype=torch.float64), torch.float64),
    "to(float64, non_blocking=True)": (lambda model: model.to(torch.float64, non_blocking=True), torch.float64),
    "double()": (lambda model: model.double(), torch.float64),
    "half()": (lambda model: model.half(), torch.float16),
    "bfloat16()": (lambda model: model.bfloat16(), torch.bfloat16),
    "float()": (lambda model: model.double().float(), torch.float32),
    "type(float64)": (lambda model: model.type(torch.float64), torch.float64),
    "to(memory_format=)": (lambda model: model.to(memory_format=torch.channels_last), torch.float32),
}


@pytest.mark.parametrize("engine", ["graph", "workers"])
@pytest.mark.parametrize(("convert", "dtype"), CONVERSIONS.values(), ids=CONVERSIONS.keys())
def test_its_type_is_changed(convert: Callable[[GPipe], GPipe], dtype: torch.dtype, engine: str) -> None:
    model = made(engine=engine, chunks=2)

    assert convert(model) is model

    assert {p.dtype for p in model.parameters()} == {dtype}
    assert {p.dtype for partition in model.partitions for p in partition.parameters()} == {dtype}
    assert model(torch.rand(4, 2, dtype=dtype)).dtype == dtype


class TestAttributes:
    def test_what_was_given(self) -> None:
        model = GPipe(linears(3), iter([2, 1]), devices=iter(["cpu", "meta"]), chunks=4, checkpoint="never")

        assert model.balance == [2, 1]
        assert model.devices == [CPU, META]
        assert (model.chunks, model.checkpoint) == (4, "never")
        assert [[p.device for p in partition.parameters()] for partition in model.partitions] == [[CPU] * 4, [META] * 2]
        assert model.observer is None

    def test_defaults(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        model = GPipe(linears(3), [2, 1])

        assert model.devices == [CPU, CPU]
        assert (model.chunks, model.checkpoint) == (1, "except_last")

    def test_partitions_are_the_layers(self) -> None:
        module = linears(5)
        layers = list(module)
        model = GPipe(module, [2, 1, 2], devices=["cpu"] * 3)

        assert [list(partition) for partition in model.partitions] == [layers[:2], layers[2:3], layers[3:]]
        assert all(isinstance(partition, nn.Sequential) for partition in model.partitions)

    @pytest.mark.parametrize("training", [True, False])
    def test_the_mode(self, training: bool) -> None:
        model = made(linears(2).train(training))
        assert model.training == training

        assert model.train(not training) is model
        assert {m.training for partition in model.partitions for m in partition.modules()} == {not training}
        assert model.eval() is model
        assert not any(m.training for partition in model.partitions for m in partition.modules())

    @pytest.mark.parametrize("deferred", [True, False])
    def test_batch_norm_is_deferred_if_asked_for(self, deferred: bool) -> None:
        model = made(nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()), deferred_batch_norm=deferred)
        assert isinstance(model[0], DeferredBatchNorm) == deferred


class TestSequence:
    @pytest.fixture
    def module(self) -> nn.Sequential:
        return nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.ReLU(), c=nn.Tanh(), d=nn.Linear(2, 3)))

    @pytest.fixture
    def model(self, module: nn.Sequential) -> GPipe:
        return GPipe(module, [1, 2, 1], devices=["cpu"] * 3)

    def test_length_and_iteration(self, model: GPipe, module: nn.Sequential) -> None:
        assert len(model) == 4
        assert list(model) == list(module)

    @pytest.mark.parametrize("index", [0, 1, 3, -1, -4])
    def test_index(self, model: GPipe, module: nn.Sequential, index: int) -> None:
        assert model[index] is module[index]

    @pytest.mark.parametrize("index", [4, -5, 100])
    def test_index_out_of_range(self, model: GPipe, index: int) -> None:
        with pytest.raises(IndexError):
            model[index]

    @pytest.mark.parametrize("part", [slice(None), slice(1, 3), slice(-2, None), slice(0, 4, 2), slice(4, 9)], ids=str)
    def test_slice(self, model: GPipe, module: nn.Sequential, part: slice) -> None:
        found = model[part]
        assert isinstance(found, nn.Sequential)
        assert list(found.named_children()) == list(module[part].named_children())

    def test_a_layer_is_reached_by_its_name(self, model: GPipe, module: nn.Sequential) -> None:
        assert model.get_submodule("d") is module.d
        assert [name for name, _ in model.named_children()] == ["a", "b", "c", "d"]

    def test_it_shows_its_layers(self, model: GPipe, module: nn.Sequential) -> None:
        assert repr(model) == repr(module).replace("Sequential(", "GPipe(", 1)


class TestEmpty:
    @pytest.fixture
    def model(self) -> GPipe:
        return GPipe(nn.Sequential(), [], devices=[])

    def test_it_is_the_identity(self, model: GPipe) -> None:
        x = torch.rand(3, 2)
        assert model(x) is x
        assert model((x, x)) == (x, x)

    def test_it_has_nothing(self, model: GPipe) -> None:
        assert (len(model), list(model), model.balance, model.devices) == (0, [], [], [])


class Convolve(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3, stride=2)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, label = pair
        return self.convolution(x), label


def shapes(value: Any) -> list[torch.Size]:
    return [x.shape for x in (value if isinstance(value, tuple) else (value,))]


# Layers, input shapes, output shapes.
ON_META: dict[str, tuple[Callable[[], nn.Sequential], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), [(13, 6)], [(13, 2)]),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1)),
        [(13, 3, 32, 32)],
        [(13, 8, 1, 1)],
    ),
    "tuple": (lambda: nn.Sequential(Convolve(), nn.Identity()), [(13, 3, 9, 9), (13,)], [(13, 5, 4, 4), (13,)]),
}


class TestDevices:
    @pytest.mark.parametrize("given", ["cpu", "meta"])
    @pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
    @pytest.mark.parametrize(("layers", "inputs", "outputs"), ON_META.values(), ids=ON_META.keys())
    def test_meta_gives_shapes(
        self,
        layers: Callable[[], nn.Sequential],
        inputs: list[tuple[int, ...]],
        outputs: list[tuple[int, ...]],
        checkpoint: Any,
        given: str,
    ) -> None:
        module = layers()
        n = len(module)
        model = GPipe(module, [1] * n, devices=["meta"] * n, chunks=4, checkpoint=checkpoint)
        value = tuple(torch.empty(shape, device=given) for shape in inputs)

        found = model(value if len(value) > 1 else value[0])

        assert shapes(found) == [torch.Size(shape) for shape in outputs]
        first = found[0] if isinstance(found, tuple) else found
        assert first.device == META
        first.sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert (parameter.grad.device, parameter.grad.shape) == (META, parameter.shape)

    def test_from_cpu_to_meta(self) -> None:
        model = GPipe(linears(2), [1, 1], devices=["cpu", "meta"], chunks=2)
        with torch.no_grad():
            y = model(torch.rand(4, 2))
        assert (y.device, y.shape) == (META, (4, 2))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("chunks", 0, "chunks must be a whole number of at least 1, but got 0"),
        ("chunks", True, "chunks must be a whole number of at least 1, but got True"),
        ("checkpoint", "sometimes", "checkpoint must be one of 'always', 'except_last', 'never', but got 'sometimes'"),
    ],
)
def test_settings_changed_later_are_checked(name: str, value: Any, message: str) -> None:
    model = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"])
    setattr(model, name, value)
    with pytest.raises(ValueError, match=message):
        model(torch.ones(1, 2))


@pytest.mark.parametrize("where", ["pipeline", "partition"])
def test_a_layer_replaced_after_wrapping_is_noticed(where: str) -> None:
    model = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=["cpu", "cpu"])
    if where == "pipeline":
        setattr(model, "1", nn.Linear(2, 2))
    else:
        model.partitions[1][0] = nn.Linear(2, 2)  # type: ignore[index]
    with pytest.raises(RuntimeError, match=r"replaced after the pipeline was made.*wrap them"):
        model(torch.ones(1, 2))


def test_a_balance_that_is_no_list() -> None:
    with pytest.raises(TypeError, match="balance must be a list, the layers of each partition, but got 2"):
        GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)  # type: ignore[arg-type]

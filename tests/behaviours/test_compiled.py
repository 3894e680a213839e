"""Tests that a pipeline of compiled layers computes what the layers compute without a pipeline.

The tests use `model(x)` and `model.step`, on every engine, in every mode of checkpointing.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss

from torchgpipe import sequential
from torchgpipe.layers.compiled import compile_layer
from torchgpipe.schedules.named import NAMED
from torchgpipe.tensors._autograd import is_compiled

from ..library.layers import compiled_around, compiled_in_place
from ..library.traced import Residual, rows
from ..plain import Plain, piped
from .compare import REORDERED, differences

# torch.compile gives this warning with plain layers, too, because it reads all tensor attributes.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

CHUNKS = 4


class Counting(nn.Module):
    """A layer that counts its calls in a buffer.

    Its output depends on this count, and on whether the layer is in training mode.
    """

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = self.linear(x) + self.count
        return y.tanh() if self.training else y


def by_call(run: Any, x: Tensor, target: Tensor) -> None:
    loss = mse_loss(run(x), target)
    run.eval()  # a recomputation still runs in training mode
    loss.backward()
    run.train()


def within_autocast(run: Any, x: Tensor, target: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = mse_loss(run(x), target)
    loss.backward()


def by_step(run: Any, x: Tensor, target: Tensor) -> None:
    if isinstance(run, Plain):
        mse_loss(run(x), target).backward()
    else:
        run.step(mse_loss, x, target)


@pytest.mark.quick(2)
@pytest.mark.parametrize("train", [by_call, by_step])
@pytest.mark.parametrize("compiled", [compiled_in_place, compiled_around])
def test_compiled_layers(
    compiled: Callable[[nn.Module], nn.Module],
    train: Callable[[Any, Tensor, Tensor], None],
    engine: str,
    checkpoint: str,
) -> None:
    torch.compiler.reset()
    plain = nn.Sequential(Counting(), Counting(), Counting(), Counting())
    own = copy.deepcopy(plain)
    layers = nn.Sequential(*[compiled(layer) for layer in own])
    schedule = "1F1B" if train is by_step else "GPipe"
    model = piped(layers, [2, 2], CHUNKS, engine=engine, checkpoint=checkpoint, schedule=schedule)
    # Workers that compile a layer at the same time compile it more than once.
    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(2):
            x, target = torch.randn(2, 8, 6)
            train(model, x, target)
            train(Plain(plain, chunks=CHUNKS), x, target)
    assert differences(own, plain, REORDERED) == []


@pytest.mark.quick(2)
@pytest.mark.parametrize("compiled", [compiled_in_place, compiled_around])
def test_a_compiled_batch_norm(
    compiled: Callable[[nn.Module], nn.Module], engine: str, checkpoint: str
) -> None:
    """Check that a compiled batch norm has the running statistics of a plain batch norm.

    Compiled code updates running statistics also in a recomputation. So a recomputation has to run
    on copies of them.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.BatchNorm1d(6), nn.Tanh()))
    plain = Plain(copy.deepcopy(layers), chunks=CHUNKS)
    layers[1] = compiled(layers[1])
    model = piped(layers, [1, 1], CHUNKS, engine=engine, checkpoint=checkpoint)
    x = torch.randn(8, 6)
    model(x).sum().backward()
    plain(x).sum().backward()
    assert differences(held(model), held(plain), REORDERED) == []


class Counted:
    """A backend of `torch.compile` that compiles nothing, and counts how often it is called."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: object) -> Any:
        self.count += 1
        return graph


def train_and_evaluate(
    run: Any, train: Callable[[Any, Tensor, Tensor], None], x: Tensor
) -> list[Any]:
    """Train and evaluate with mini-batches of two sizes. Return the outputs of the evaluations."""
    outputs = []
    for size in (8, 12):
        train(run, x[:size], torch.ones(size, 6))
        run.eval()
        with torch.no_grad():
            outputs.append(run(x[:size]))
        run.train()
    return outputs


def residual() -> nn.Sequential:
    return sequential(Residual(), rows())


def of_several_kinds() -> nn.Sequential:
    return nn.Sequential(Counting(), nn.Tanh(), nn.Linear(6, 6))


@pytest.mark.quick(2)
@pytest.mark.parametrize("train", [by_call, by_step])
@pytest.mark.parametrize("make", [residual, of_several_kinds])
def test_layers_are_compiled_at_most_once_more_than_without_a_pipeline(
    make: Callable[[], nn.Sequential],
    train: Callable[[Any, Tensor, Tensor], None],
    engine: str,
    checkpoint: str,
) -> None:
    check_counts(make, train, engine, checkpoint)


def test_compilations_under_autocast() -> None:
    check_counts(of_several_kinds, within_autocast, "graph", "except_last")


def four() -> nn.Sequential:
    return nn.Sequential(Counting(), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6))


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore:the schedule .* splits backwards")
@pytest.mark.parametrize("schedule", NAMED)
def test_compilations_with_each_schedule(schedule: str, engine: str) -> None:
    check_counts(four, by_step, engine, "except_last", schedule)


def check_counts(
    make: Callable[[], nn.Sequential],
    train: Callable[[Any, Tensor, Tensor], None],
    engine: str,
    checkpoint: str,
    schedule: str | None = None,
) -> None:
    """Check that this process's layers are compiled as often as without a pipeline, or once more.

    A layer is compiled once more for first passes, which need no autograd graph. The test also
    fails if a layer reaches PyTorch's limit of recompilations. By default, PyTorch would then run
    the layer uncompiled.
    """
    torch.compiler.reset()
    own = make()
    plain = copy.deepcopy(own)
    if schedule is None:
        schedule = "1F1B" if train is by_step else "GPipe"
    twice = schedule in ("Interleaved1F1B", "ZBVZeroBubble")  # two stages on each device
    balance = [1, 1, 1, 1] if twice else [2, len(own) - 2]
    options: dict[str, Any] = {"engine": engine, "checkpoint": checkpoint, "schedule": schedule}
    model = piped(own, balance, CHUNKS, v=2 if twice else 1, **options)
    ours, theirs = Counted(), Counted()
    model.compile(backend=ours)
    here = [k for k, layer in enumerate(own) if is_compiled(layer)]
    for k, layer in enumerate(plain):
        compile_layer(layer, backend=theirs if k in here else Counted())
    x = torch.randn(12, 6)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        found = train_and_evaluate(model, train, x)
        expected = train_and_evaluate(Plain(plain, chunks=CHUNKS), train, x)
    first_passes = 0 if checkpoint == "never" else len(here)
    assert 0 < ours.count <= theirs.count + first_passes
    assert differences((found, own), (expected, plain), REORDERED) == []


class Scaled(nn.Module):
    """A layer that multiplies its input by a weight, and drops half of the products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6) + 1)
        self.drops = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * x
        return dropout(y) if self.drops else y


class OtherMaskWithoutGraph:
    """A backend of `torch.compile` whose code draws another dropout mask if it makes no graph.

    It compiles nothing. In `with_graph`, it records for each compilation whether gradients were on.
    """

    def __init__(self) -> None:
        self.with_graph: list[bool] = []

    def __call__(self, graph: Any, inputs: object) -> Any:
        with_graph = torch.is_grad_enabled()
        self.with_graph.append(with_graph)
        draws = any("dropout" in str(node.target) for node in graph.graph.nodes)

        def run(*args: Any) -> Any:
            if draws and not with_graph:
                torch.rand(1)
            return graph(*args)

        return run


@pytest.mark.quick(2)
def test_first_passes_of_compiled_layers_make_no_graph(engine: str) -> None:
    torch.compiler.reset()
    backend = OtherMaskWithoutGraph()
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = piped(layers, [1, 1], CHUNKS, engine=engine, checkpoint="always")
    model.compile(backend=backend)
    of_other_size = torch.randn(12, 6)
    for x in (torch.randn(8, 6), of_other_size):
        model(x).sum().backward()
    # Each process of a pipeline over ranks has one of the two layers.
    here = 1 if engine == "ranks" else 2
    assert backend.with_graph.count(False) == here


def scaled(engine: str, *, drops: bool) -> tuple[Any, Scaled, Scaled]:
    """Return a pipeline, and its two layers, which draw random numbers if `drops` is true."""
    torch.compiler.reset()
    first, second = Scaled(), Scaled()
    first.drops = second.drops = drops
    model = piped(nn.Sequential(first, second), [1, 1], CHUNKS, engine=engine, checkpoint="always")
    return model, first, second


@pytest.mark.quick(2)
def test_first_passes_of_compiled_layers_that_draw_make_a_graph(engine: str) -> None:
    """Check that a dropout mask is the same in forward and backward, whatever the compiler does."""
    model, *layers = scaled(engine, drops=True)
    model.compile(backend=OtherMaskWithoutGraph())
    check_masks(model, layers)


@pytest.mark.quick(2)
def test_compiled_layers_that_draw_later(engine: str) -> None:
    """Check that there is an error if compiled layers first draw in a pass without a graph.

    The next mini-batch is right.
    """
    model, *layers = scaled(engine, drops=False)
    model.compile(backend=OtherMaskWithoutGraph())
    check_masks(model, layers)
    layers[1].drops = True
    with pytest.raises(RuntimeError, match="compiled layers of this stage drew random numbers"):
        model(torch.ones(8, 6))
    check_masks(model, layers)


@pytest.mark.quick(2)
def test_compiled_layers_that_draw_for_other_sizes_first(engine: str) -> None:
    model, *layers = scaled(engine, drops=False)
    model.compile(backend=OtherMaskWithoutGraph())
    check_masks(model, layers)
    layers[1].drops = True
    check_masks(model, layers, size=12)
    check_masks(model, layers)


@pytest.mark.quick(2)
def test_layers_that_draw_and_are_compiled_later(engine: str) -> None:
    model, *layers = scaled(engine, drops=True)
    check_masks(model, layers)
    model.compile(backend=OtherMaskWithoutGraph())
    check_masks(model, layers)


@pytest.mark.parametrize("inner_engine", ["graph", "workers"])
def test_a_compiled_pipeline_that_draws_within_a_pipeline(inner_engine: str) -> None:
    inner, *layers = scaled(inner_engine, drops=True)
    inner.compile(backend=OtherMaskWithoutGraph())
    layers.append(Scaled())
    outer = nn.Sequential(inner, layers[-1])
    model = piped(outer, [1, 1], 2, engine="workers", checkpoint="never")
    for _ in range(2):
        check_masks(model, layers)


class Chooses(nn.Module):
    """A layer that multiplies by another factor if a tensor in it does not require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * 3 if y.requires_grad else y * 4


@pytest.mark.quick(2)
def test_a_layer_that_is_not_compiled_may_ask_what_requires_grad(engine: str) -> None:
    torch.compiler.reset()
    own = nn.Sequential(nn.Linear(6, 6), Chooses(), nn.Linear(6, 6))
    plain = copy.deepcopy(own)
    compile_layer(own[0], backend=Counted())
    compile_layer(own[2], backend=Counted())
    model = piped(own, [2, 1], CHUNKS, engine=engine, checkpoint="always")
    for _ in range(2):
        x, target = torch.randn(2, 8, 6)
        by_call(model, x, target)
        by_call(Plain(plain, chunks=CHUNKS), x, target)
    assert differences(own, plain, REORDERED) == []


def check_masks(model: Any, layers: list[Scaled], size: int = 8) -> None:
    """Check that gradients of layers `Scaled` belong to the masks that the output shows."""
    model.zero_grad()
    y = model(torch.ones(size, 6))
    y.sum().backward()
    for layer in layers:
        assert layer.weight.grad is not None
        # The sum is linear in each weight.
        torch.testing.assert_close((layer.weight.grad * layer.weight).sum(), y.sum())


def held(model: nn.Module) -> dict[str, Any]:
    """Return gradients and buffers by name, without the prefix `_orig_mod` of compiled layers."""
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        found[f"gradient of {name}".replace("_orig_mod.", "")] = p.grad
    for name, x in model.named_buffers():
        found[name.replace("_orig_mod.", "")] = x
    return found

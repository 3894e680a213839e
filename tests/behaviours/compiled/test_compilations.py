"""Tests of how often layers are compiled in a pipeline, compared with layers without a pipeline."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from torchgpipe import sequential
from torchgpipe.layers.compiled import compile_layer
from torchgpipe.schedules.named import NAMED
from torchgpipe.tensors._autograd import is_compiled

from ...conftest import PYTORCH_2_11
from ...library.trace.texts import text
from ...library.traced import Residual, rows
from ...plain import TWICE, Plain, piped
from ..compare import REORDERED, differences
from ..rows.tools.traced import language_model
from .made import CHUNKS, Counted, Counting, by_call, by_step

# torch.compile gives this warning with plain layers, too, because it reads all tensor attributes.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def within_autocast(run: Any, x: Tensor, target: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = mse_loss(run(x), target)
    loss.backward()


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


@pytest.mark.quick(1)
def test_compilations_under_autocast(engine: str) -> None:
    check_counts(of_several_kinds, within_autocast, engine, "except_last")


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
    balance, v = ([1, 1, 1, 1], 2) if schedule in TWICE else ([2, len(own) - 2], 1)
    options: dict[str, Any] = {"engine": engine, "checkpoint": checkpoint, "schedule": schedule}
    model = piped(own, balance, CHUNKS, v=v, **options)
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


@pytest.mark.quick(3)
@pytest.mark.parametrize("dynamic", [None, True])
def test_other_lengths_add_no_compilations(dynamic: bool | None, engine: str) -> None:
    """Check the number of compilations for texts of three lengths, with and without gradients.

    By default, the first length is compiled, and a second code serves all others. With
    `dynamic=True`, the first code serves all lengths. (PyTorch would compile once more if the first
    length were 8, the width of this model, because it takes equal sizes for the same size.)

    In PyTorch 2.11, `dynamic=True` sets a variable that all threads share. So when one thread has
    finished a layer, another one may compile its first code for one length only.
    """
    torch.compiler.reset()
    layers = language_model()
    plain = copy.deepcopy(layers)
    model = piped(layers, [1, len(layers) - 1], 3, engine=engine, checkpoint="always")
    ours, theirs = Counted(), Counted()
    model.compile(backend=ours, dynamic=dynamic)
    here = [k for k, layer in enumerate(layers) if is_compiled(layer)]
    for k, layer in enumerate(plain):
        compile_layer(layer, backend=theirs if k in here else Counted(), dynamic=dynamic)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for run in (model, Plain(plain, chunks=3)):
            for length in (7, 5, 9):
                run(text(6, length)).sum().backward()
    threads_interfere = dynamic and engine == "workers" and PYTORCH_2_11
    limit = theirs.count + len(here) * (2 if threads_interfere else 1)
    assert 0 < ours.count <= limit
    if dynamic:
        assert theirs.count == len(here), "one code serves all lengths"


def train_in_phases(run: Any, layers: nn.Sequential) -> None:
    """Train all parameters, then only biases, then only weights, and then all again."""
    for of_weights, of_biases in ((True, True), (False, True), (True, False), (True, True)):
        for name, parameter in layers.named_parameters():
            parameter.requires_grad_(of_weights if "weight" in name else of_biases)
        run(torch.rand(8, 6)).sum().backward()


@pytest.mark.parametrize("engine", ["graph", "workers"])
def test_frozen_parameters_add_no_compilations(engine: str) -> None:
    """Check that a layer is compiled once for each set of trained parameters, and once more.

    Without a pipeline, it is compiled once for each set, too. (PyTorch 2.11 then compiles it for
    the first set only.)
    """
    torch.compiler.reset()
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = piped(layers, [1, 1], CHUNKS, engine=engine, checkpoint="always")
    ours, theirs = Counted(), Counted()
    model.compile(backend=ours)
    train_in_phases(model, layers)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in plain:
        compile_layer(layer, backend=theirs)
    train_in_phases(Plain(plain, chunks=CHUNKS), plain)
    sets = 3
    assert theirs.count == len(plain) * (1 if PYTORCH_2_11 else sets)
    assert ours.count == len(plain) * (sets + 1), "one for first passes of each layer"

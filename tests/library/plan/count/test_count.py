"""Test that the counted operators of layers are those of real steps, for several batch sizes.

The tests also check that a layer that cannot be counted raises an error of one line, which names
the layer.
"""

import warnings
import weakref
from collections import Counter as Tally
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import (
    BatchNorm1d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Embedding,
    Flatten,
    GroupNorm,
    Linear,
    MaxPool2d,
    Module,
    ReLU,
    Sequential,
    Tanh,
    TransformerEncoderLayer,
    Upsample,
)

from reproduce.models.built import amoebanetd, resnet101, unet
from torchgpipe import GPipe, sequential
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.counter import Counter
from torchgpipe.plan.hardware.operators import Operator

from ....behaviours.parts.kinds import KINDS
from ...layers import Lambda


@pytest.mark.parametrize("size", [1, 3, 16])
def test_the_line_through_two_sizes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    convolution = [Conv2d(3, 8, 3), BatchNorm2d(8), ReLU()]
    model = Sequential(*convolution, Flatten(), Linear(8 * 36, 5))
    x = torch.empty(1, 3, 8, 8)
    line = count(model, x).at(size)
    monkeypatch.setattr("torchgpipe.plan.count.count.SIZES", (size, size + 1))
    assert line == count(model, x).at(size)


def of(*kinds: str) -> Callable[[], Sequential]:
    """Return a function that builds a model with layers of the given kinds.

    The first and the last layer of the model are linear layers.
    """

    def build() -> Sequential:
        layers = [KINDS[kind](None) for kind in kinds]
        return Sequential(Linear(4, 4), *layers, Flatten(), Linear(4, 4))

    return build


@pytest.mark.parametrize(
    ("build", "shape", "more"),
    [
        (resnet101, (3, 64, 64), 0),
        (lambda: unet(3, 2, 8), (3, 32, 32), 0),
        # The count assumes that each output of a layer is used. The last layer of AmoebaNet-D
        # ignores one of its two inputs, so a real step runs one operator less than is counted.
        (lambda: amoebanetd(3, 32, 10), (3, 224, 224), 1),
        (of("and its input", "swap", "sum", "and a view", "sum", "identity"), (4,), 0),
        (of("checkpointed, reentrant"), (4,), 0),
        (of("relu in place"), (4,), 0),
    ],
    ids=["ResNet-101", "U-Net", "AmoebaNet-D", "pairs", "checkpointed", "in place"],
)
def test_counted_layer_by_layer_as_in_a_step_of_gpipe(
    build: Callable[[], Sequential], shape: tuple[int, ...], more: int
) -> None:
    """Check that the operators that are counted for layers are those that a step of GPipe runs.

    The order of operators in backward is not compared. PyTorch does not specify when autograd adds
    up the gradients of a tensor that is used twice.
    """
    with torch.device("meta"):
        model = build()
        x = torch.empty(2, *shape)

    layers = count(model, x).at(2)

    gpipe = GPipe(model, [len(model)], devices=["meta"], checkpoint="never")
    with Counter() as forward:
        output = gpipe(x)
    gradient = torch.empty_like(output)
    with Counter() as backward:
        output.backward(gradient)
    in_forward: list[Operator] = []
    in_backward: Tally[Operator] = Tally()
    for layer in layers:
        in_forward += layer.forward
        in_backward.update(layer.backward)
    assert in_forward == forward.operators
    real = Tally(backward.operators)
    assert not real - in_backward
    assert (in_backward - real).total() == more


def broken(x: Tensor) -> Tensor:
    raise KeyError


def no_way_back(x: Tensor) -> Tensor:
    y = x.clone()
    y.register_hook(broken)
    return y


def compiled() -> Module:
    layer = Linear(8, 4)
    layer.compile()
    return layer


class CompiledForward(Module):
    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


FAILS = r"^layer 1 \('odd', {}\) fails on \(2, 8\) float32: .*{}.*; check the sample's .* no values"
DO_FAILS = FAILS.format("Do", "")
KEY_ERROR = FAILS.format("Do", "KeyError")
COMPILED = r"layer 'odd' is compiled by torch\.compile"
OTHER_OPERATORS = "layer 'odd' runs different operators"


def unlike_for_two(x: Tensor) -> Tensor:
    return x + 1 if len(x) == 2 else x * 2 + 1


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: Linear(9, 4), FAILS.format("Linear", "9")),
        (lambda: Lambda(lambda x: x.view(7, -1)), FAILS.format("Do", "shape '.*' is invalid")),
        (lambda: Lambda(lambda x: x * x.sum().item()), DO_FAILS),
        (lambda: Lambda(lambda x: x if x.sum() > 0 else -x), DO_FAILS),
        (lambda: Lambda(lambda x: x[x > 0]), DO_FAILS),
        (lambda: Lambda(broken), KEY_ERROR),
        (lambda: Lambda(no_way_back), KEY_ERROR),
        (lambda: torch.compile(Linear(8, 4)), COMPILED),
        (lambda: Sequential(compiled()), COMPILED),
        (CompiledForward, COMPILED),
        (lambda: Lambda(unlike_for_two), OTHER_OPERATORS),
    ],
)
def test_refused(layer: Callable[[], Module], message: str) -> None:
    model = Sequential(Linear(4, 8))
    model.add_module("odd", layer())

    with pytest.raises(ValueError, match=message) as raised:
        count(model, torch.empty(3, 4))

    error = raised.value
    assert "\n" not in str(error)
    assert (error.__cause__ is not None) == ("fails" in message)
    freed = weakref.ref(model)
    del model, raised, error
    if message != COMPILED:
        assert freed() is None, "what the error's frames hold waits for the garbage collector"


MIX = Lambda(lambda x: torch.softmax(x @ x.T, dim=1) @ x)  # each sample attends to all samples
DISTANCES = Lambda(lambda x: x * (x[:, None] - x[None]).abs().sum(1))
OF_IMAGES = [Conv2d(3, 8, 3), BatchNorm2d(8), MaxPool2d(2), Upsample(scale_factor=2)]


@pytest.mark.parametrize(
    ("layers", "shape", "named"),
    [
        ([Linear(8, 8), MIX], (1, 8), "'1':"),
        ([Linear(8, 8), DISTANCES], (1, 8), "'1':"),
        ([Linear(8, 8), MIX, Tanh(), DISTANCES], (1, 8), "'1' and 1 more:"),
        ([TransformerEncoderLayer(8, 2, 16, batch_first=True)], (1, 5, 8), None),
        ([Embedding(10, 8), Linear(8, 8), Dropout()], (1, 5), None),
        (OF_IMAGES, (1, 3, 9, 9), None),
        ([Linear(64, 64), BatchNorm1d(64), GroupNorm(4, 64)], (1, 64), None),
    ],
)
def test_warns_of_layers_that_cost_more_with_every_sample(
    layers: Sequence[Any], shape: Any, named: str | None
) -> None:
    of_words = isinstance(layers[0], Embedding)
    sample = torch.zeros(shape, dtype=torch.long if of_words else torch.float)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        count(Sequential(*layers), sample)

    if named is None:
        assert len(warned) == 0
        return
    (warning,) = warned
    assert warning.filename == __file__
    message = str(warning.message)
    assert "\n" not in message
    assert message.startswith(f"layer {named} every further sample costs more")


class Masked(Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * mask.sum(0)
        return y


def test_an_input_without_a_batch_dimension_counts_once() -> None:
    x, mask = torch.ones(2, 4), torch.ones(5, 4)
    layers = sequential(Masked(), (x, mask), shared=["mask"])
    counts = count(layers, (x, mask))
    assert counts.inputs(3) == 3 * 4 * 4 + 5 * 4 * 4

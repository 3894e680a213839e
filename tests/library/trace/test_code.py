"""Test the generated Python code of traced layers: whether it is readable, copies and compiles."""

import copy
import pickle
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from torchgpipe import sequential
from torchgpipe.trace.code.sizes import Size, corners, fitted
from torchgpipe.trace.parts import tensors_in

from ...behaviours.test_any_model import called
from .. import traced
from ..traced import CASES, WIDTH, rows

HEADS = """\
def layer_1_a(self, inputs):
    (x3,) = inputs
    inputs.clear()
    batch = x3.shape[0]
    x4 = self.a(x3)
    x5 = x4.view(batch, 4, 2, -1)
    del x4
    x6 = x5.transpose(1, 2)
    del x5
    x7 = x6.reshape(2 * batch, 4, -1)
    del x6
    return x3, x7
"""


class Reading(nn.Module):
    """A module with expressions that the generated code must keep, such as `x[0]` and `x.T`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            largest, _ = self.blocks[0](x).max(1)
        y = self.blocks[1](x)[:, 1:].clone()
        y[:, 0] = largest
        return (y.T.T * self.scale[1:]).to(torch.float64) + torch.tensor(0.5, device=x.device)


READING = """\
def layer_0_blocks_0(self, inputs):
    (x0,) = inputs
    inputs.clear()
    with torch.no_grad():
        x1 = self.blocks._modules['0'](x0)
        (x2, x3) = x1.max(1)
        del x1, x3
    return x0, x2

def layer_1_blocks_1(self, inputs):
    x0, x2 = inputs
    inputs.clear()
    x4 = self.blocks._modules['1'](x0)
    del x0
    x5 = x4[:, 1:]
    del x4
    x6 = x5.clone()
    del x5
    x6[:, 0] = x2
    del x2
    x7 = x6.T
"""


def test_it_reads_like_the_module() -> None:
    layers: Any = sequential(Reading(), rows())
    code = "\n".join([layer.code for layer in layers])
    assert code.startswith(READING)
    assert "x8 = x7.T\n" in code
    assert "= torch.tensor(0.5, device=device)\n" in code
    assert ".to(torch.float64)\n" in code
    layers = sequential(CASES["attention by hand"].make(), rows(3, WIDTH))
    assert layers[1].code == HEADS


def test_an_error_shows_the_line_of_the_code() -> None:
    layers = sequential(traced.Residual(), rows())
    with pytest.raises(RuntimeError) as caught:
        layers[0](rows(7))
    lines = [frame.line for frame in traceback.extract_tb(caught.tb)]
    assert "x1 = self.a(x0)" in lines


# torch.compile reads all attributes of a layer's input, even `.grad`, which causes this warning,
# with or without a pipeline.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["residual", "a dataclass", "attention by hand"])
def test_it_copies_and_compiles(name: str) -> None:
    torch.compiler.reset()
    case = CASES[name]
    module, sample = case.make(), case.sample()
    layers: Any = sequential(module, sample)
    for each in layers:
        each.compile(backend="eager", fullgraph=True)
    for other in (layers, copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        assert [each.code for each in other] == [each.code for each in layers]
        found, expected = called(other, sample), called(module, sample)
        assert_close([*tensors_in(found)], [*tensors_in(expected)], rtol=0, atol=0)


POINTS = corners([(2, 3, 5), (16, 12, 8), (7, 6, 5)])


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (lambda b, s, t: 7, "7"),
        (lambda b, s, t: 4 * b - 1, "4 * batch - 1"),
        (lambda b, s, t: b * s + 2 * t, "batch * s + 2 * t"),
        (lambda b, s, t: b * s * t - s, "batch * s * t - 1 * s"),
        (lambda b, s, t: b * (s // 4), "(batch * s) // 4"),
    ],
)
def test_numbers_that_follow_from_sizes(formula: Any, text: str) -> None:
    size = fitted([formula(*point) for point in POINTS], POINTS)
    assert isinstance(size, Size)
    names = ["batch", "s", "t"]
    for point in [*POINTS, (9, 20, 11)]:
        assert size.at(point) == formula(*point)
        assert eval(size.text(names), dict(zip(names, point, strict=True))) == formula(*point)
    assert size.text(names) == text


def test_other_numbers_have_no_formula() -> None:
    assert fitted([b * b for b, _, _ in POINTS], POINTS) is None
    assert len(POINTS) == 9


class Columns(nn.Module):
    """A layer that takes its tensors as keyword arguments, and returns a list of Python numbers.

    The list has a number for each sample.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, **columns: Tensor) -> tuple[Tensor, list[int]]:
        x = columns["class"] + columns["age-group"]
        return self.linear(x), [0] * len(x)


class OfColumns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = Columns()  # a layer has an attribute of this name
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        columns = {"class": x, "age-group": x.sin()}
        y, _ = self.sizes(**columns)
        result: Tensor = self.last(y)
        return result


def test_names_that_python_does_not_take() -> None:
    module, x = OfColumns(), torch.randn(4, WIDTH)
    layers = sequential(module, x, whole=[Columns])
    assert_close(layers(x), module(x))
    assert_close(layers(x[:3]), module(x[:3]))

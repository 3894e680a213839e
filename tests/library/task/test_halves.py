"""Test that a backward in two halves gives the same bits as a whole backward.

The first half computes the gradients of inputs, and the second half those of weights. Between the
halves, a task must keep only what the second half needs. The tests also check the text by which a
stage describes what it leaves to the second half.
"""

import copy
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import (
    GELU,
    GLU,
    LSTM,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    Embedding,
    GroupNorm,
    LayerNorm,
    Linear,
    Module,
    MultiheadAttention,
    Parameter,
    ReLU,
    Sequential,
    Sigmoid,
    TransformerEncoderLayer,
)
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from torchgpipe.task import halves, sides
from torchgpipe.task.guards.modes import AmbientModes
from torchgpipe.task.guards.randomness import Randomness
from torchgpipe.task.guards.stand_ins import StandInsForTask
from torchgpipe.task.stage import Stage
from torchgpipe.task.stage_guards import StageGuards
from torchgpipe.task.task import TaskGraph
from torchgpipe.tensors.item import Item
from torchgpipe.tensors.observe import Kind

from ...behaviours.parts.layers import Do
from ..ledger import Ledger

CPU = torch.device("cpu")
LATER = "weight gradients of {} matrix products are computed later"
WHOLE = "backward is not split: {}"


def linear() -> Linear:
    return Linear(16, 16)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        grad_w = (g * x).sum((0, 1))
        if w.dim() == 0:  # with a 0-dimensional w, x gets no gradient
            return None, grad_w
        return g * w, grad_w


def rand(*size: int) -> Parameter:
    return Parameter(torch.randn(size))


VECTORS = torch.randn(4, 5, 16)
IMAGES = torch.randn(2, 4, 6, 6)
WORDS = torch.tensor([[1, 2, 1, 0]])
COMPLEX = torch.randn(4, 5, 16, dtype=torch.cfloat)
BLOCK = TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
CHAIN = Sequential(linear(), GELU(), LayerNorm(16), Linear(16, 8, bias=False))
UNEVEN = Sequential(
    Conv2d(4, 8, 3, 2, 1, groups=2), BatchNorm2d(8), ReLU(), ConvTranspose2d(8, 4, 2, 2)
)
TIED = linear()
FROZEN = linear().requires_grad_(False)
NO_WEIGHT = linear()
NO_WEIGHT.weight.requires_grad_(False)
OLD = linear()
OLD.register_backward_hook(lambda *_: None)
TIES = "; '0.bias' is used more than once; '0.weight' is used more than once"
TIED_BIAS = WHOLE.format("'a.bias' is used more than once")
SCALE = Do(lambda m, x: Scale.apply(x, m.w), w=rand(16))
TWICE = Do(lambda m, x: Scale.apply(Scale.apply(x, m.w), m.v), w=rand(16), v=rand(16))
CUSTOM = "; '1.w' has its gradient from a custom Function (ScaleBackward)"
CUSTOMS = (
    "; 2 parameters, such as '1.v', have their gradients from a custom Function (ScaleBackward)"
)

PACKED = WHOLE.format(sides.PACKED)
NOTHING_LATER = WHOLE.format(halves.NOTHING_LATER)


def with_a_tensor_hook(module: Any, x: Tensor) -> Tensor:
    y = module.a(x)
    y.register_hook(lambda grad: grad / 3)
    return y


def with_hooks_of_saved_tensors(module: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(Tensor.clone, Tensor.clone):
        return module.a(x)


def imaginary_products(module: Any, x: Tensor) -> Tensor:
    y = x[0] @ (module.w * 1j)
    return y @ (module.w2 * 1j).mT


def low_rank_product(module: Any, x: Tensor) -> Tensor:
    return x @ (module.w + module.a @ module.b)


def two_outputs(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return module.a(x), module.b(x), x.argmax()


def scaled(module: Any, x: Tensor) -> Tensor:
    return torch.addmm(module.b, x[0], module.w, beta=2, alpha=3)


def checkpointed(module: Any, x: Tensor) -> Any:
    return checkpoint(module.a, x, use_reentrant=False)


BY_CHANNEL = [Conv2d(4, 8, 3, groups=4), GroupNorm(2, 8), Conv2d(8, 4, 1, bias=False)]
GATES = [Conv1d(5, 8, 3, dilation=2), GLU(1), Conv1d(4, 4, 1)]

# Each value has the layers, their input, and the text by which the stage must describe what it
# leaves to the second half of a backward. A number k stands for the usual text, which names k
# matrix products of weights.
ROWS: dict[str, tuple[Module, Tensor, int | str]] = {
    "linear": (CHAIN, VECTORS, 2),
    "float64": (copy.deepcopy(CHAIN).double(), VECTORS.double(), 2),
    "bfloat16": (copy.deepcopy(CHAIN).bfloat16(), VECTORS.bfloat16(), 2),
    "complex": (
        Do(imaginary_products, w=rand(16, 5), w2=rand(9, 5)),
        COMPLEX,
        2,
    ),
    "a transformer's block": (BLOCK, VECTORS, 4),
    "attention": (
        Do(lambda m, x: m.layer(x, x, x)[0], layer=MultiheadAttention(16, 2)),
        VECTORS,
        2,
    ),
    "words": (Sequential(Embedding(3, 16), LayerNorm(16), linear(), BLOCK), WORDS, 5),
    "convolutions": (UNEVEN, IMAGES, 2),
    "convolutions in float64": (copy.deepcopy(UNEVEN).double(), IMAGES.double(), 2),
    "by channel": (Sequential(*BY_CHANNEL), IMAGES, 2),
    "gates": (Sequential(*GATES), VECTORS, 2),
    "scaled": (Do(scaled, w=rand(16, 4), b=rand(4)), VECTORS, 1),
    "in batches": (
        Do(lambda m, x: torch.baddbmm(m.b, x, m.w), w=rand(4, 16, 3), b=rand(4, 5, 3)),
        VECTORS,
        1,
    ),
    "weight first": (Do(lambda m, x: torch.mm(m.w, x[0].mT).mT, w=rand(8, 16)), VECTORS, 1),
    "hook": (Do(with_a_tensor_hook, a=linear()), VECTORS, 1),
    "parametrized": (Sequential(weight_norm(linear()), spectral_norm(linear())), VECTORS, 2),
    "computed": (
        Do(low_rank_product, w=rand(16, 16), a=rand(16, 2), b=rand(2, 16)),
        VECTORS,
        1,
    ),
    "buffer": (Do(lambda m, x: x @ m.w, w=torch.randn(16, 8).requires_grad_()), VECTORS, 1),
    "two outputs": (Do(two_outputs, a=linear(), b=linear()), VECTORS, 2),
    "frozen": (Sequential(linear(), FROZEN, LayerNorm(16)), VECTORS, 1),
    "frozen weight": (NO_WEIGHT, VECTORS, NOTHING_LATER),
    "no parameters": (ReLU(), VECTORS, NOTHING_LATER),
    "recurrent": (
        Do(lambda m, x: m.layer(x)[0], layer=LSTM(16, 16)),
        VECTORS,
        NOTHING_LATER,
    ),
    "tied": (Sequential(TIED, ReLU(), linear(), TIED), VECTORS, LATER.format(1) + TIES),
    "custom": (Sequential(linear(), SCALE), VECTORS, LATER.format(1) + CUSTOM),
    "several custom": (Sequential(linear(), TWICE), VECTORS, LATER.format(1) + CUSTOMS),
    "no gradient": (
        Sequential(linear(), Do(SCALE.function, w=rand())),
        VECTORS,
        LATER.format(1) + CUSTOM,
    ),
    "tied bias": (
        Do(lambda m, x: m.a(x) + m.a.bias.sum(), a=Conv2d(4, 4, 1)),
        IMAGES,
        TIED_BIAS,
    ),
    "packed": (Do(checkpointed, a=CHAIN), VECTORS, PACKED),
    "kept elsewhere": (Do(with_hooks_of_saved_tensors, a=linear()), VECTORS, PACKED),
    "old hook": (OLD, VECTORS, WHOLE.format(halves.OLD_HOOK)),
}


class Tasks:
    """A stage with a copy of some layers, and two of its tasks, whose forward has already run."""

    def __init__(
        self,
        layers: Module,
        x: Tensor,
        *,
        again: bool = False,
        casts: bool = False,
        observer: Any = None,
    ):
        self.stage = Stage(0, copy.deepcopy(layers), CPU)
        self.stage.look()
        self.stage.connect([])
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            ambient = AmbientModes([CPU])
        guards = StageGuards(self.stage, ambient, recomputes=again)
        guards.add(StandInsForTask(guards.parameters.swaps))
        self.stand_ins = guards.parameters
        self.each: list[tuple[TaskGraph, tuple[Tensor | None, ...]]] = []
        for i in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                task = TaskGraph(Randomness(), self.stage, guards, i, observer, again)
                torch.manual_seed(i)
                given = x.roll(i).requires_grad_(x.dtype != torch.long)
                outputs, _ = task.forward(Item((given,), Tensor, (False,)))
            grads: list[Tensor | None] = []
            for k, y in enumerate(outputs):
                # The second micro-batch has a gradient only for its first output.
                without = i > 0 and k > 0
                if y is None or not y.requires_grad or without:
                    grads.append(None)
                else:
                    grads.append(torch.randn_like(y))
            self.each.append((task, tuple(grads)))

    def backward(self, *, split: bool, keep: bool = False) -> list[Tensor | None]:
        """Run the backward of both micro-batches. Return gradients of inputs, then of parameters.

        With `split`, each backward runs in two halves. With `keep`, its graph is kept.
        """
        kind: Kind = "backward_inputs" if split else "backward"
        found: list[Tensor | None] = []
        for task, grads in self.each:
            found += task.backward(grads, keep=keep, kind=kind)
        if split:
            for task, _ in self.each:
                task.backward_weights()
        return found + self.stand_ins.take()


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    """Return whether two lists of gradients are equal, bit for bit and with the same strides."""
    for x, y in zip(found, expected, strict=True):
        if x is None or y is None:
            if x is not y:
                return False
        elif not torch.equal(x, y) or x.stride() != y.stride():
            return False
    return True


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore:.*non-full backward hook")
def test_halves_equal_a_whole(name: str) -> None:
    layers, x, says = ROWS[name]
    message = LATER.format(says) if isinstance(says, int) else says
    for again, casts in product((False, True), (False, x.dtype != torch.cfloat)):
        whole = Tasks(layers, x, again=again, casts=casts)
        split = Tasks(layers, x, again=again, casts=casts)
        for keep in (True, False):
            expected = whole.backward(split=False, keep=keep)
            found = split.backward(split=True, keep=keep)
            assert any(grad is not None for grad in expected)
            assert same(found, expected)
        if not casts:
            assert str(split.stage.halves) == message


@pytest.mark.parametrize("again", [False, True])
def test_only_inputs_and_gradients_of_products_are_kept_between_the_halves(again: bool) -> None:
    ledger = Ledger()
    layers = Sequential(linear(), GELU(), LayerNorm(16), linear(), Sigmoid())
    tasks = Tasks(layers, torch.randn(50, 16), again=again, observer=ledger)
    task, grads = tasks.each.pop()
    tasks.each.clear()
    vector_bytes = 16 * 4
    norm_grads = 2 * vector_bytes
    linear_grads = (16 + 1) * vector_bytes

    task.backward(grads, kind="backward_inputs")
    # The task keeps the input of the second linear layer, the gradients of both linear layers'
    # outputs, and the finished gradients of the norm's two parameters.
    ledger.assert_comes_to(3 * 50 * vector_bytes + norm_grads)

    task.backward_weights()
    ledger.assert_comes_to(2 * linear_grads + norm_grads)


def once_or_twice(module: Any, x: Tensor) -> Tensor:
    """Apply a layer twice if the first number of the input is not 0, and else only once.

    In these tests, only the second micro-batch begins with such a number.
    """
    if x[0, 0] != 0:
        x = module.a(x)
    return module.a(x)


def test_each_structure_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = Mock(wraps=sides.find_split)
    monkeypatch.setattr(halves, "find_split", splits)
    x = torch.arange(64.0).view(4, 16)
    layers = Do(once_or_twice, a=linear())
    whole = Tasks(layers, x)
    split = Tasks(layers, x)
    for keep in (True, False):
        expected = whole.backward(split=False, keep=keep)
        assert same(expected, split.backward(split=True, keep=keep))
    assert splits.call_count == 2


def test_a_change_between_the_halves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    task, grads = Tasks(linear(), VECTORS).each[0]
    task.backward(grads, kind="backward_inputs")
    for grad in grads:
        if grad is not None:
            grad.zero_()
    refusal = "changed in place between the backward of inputs and the backward of weights"
    with pytest.raises(RuntimeError, match=refusal):
        task.backward_weights()

    # A layer that averages gradients needs the gradients of all its parameters at once.
    monkeypatch.setattr(halves, "averages_gradients", lambda modules: True)
    stage = Tasks(linear(), VECTORS).stage
    assert str(stage.halves) == WHOLE.format(halves.EXCHANGES)

"""A backward in two halves equals a whole one to the bit, keeps what its second half needs, and says what it splits."""

import copy
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from torchgpipe.task import halves, sides
from torchgpipe.task.guards.in_place import InPlaceForTask
from torchgpipe.task.guards.modes import AmbientModes
from torchgpipe.task.guards.randomness import Randomness
from torchgpipe.task.stage import Stage
from torchgpipe.task.stage_guards import StageGuards
from torchgpipe.task.task import TaskGraph
from torchgpipe.tensors.observe import Kind

from ...behaviours.parts.layers import Do
from ..ledger import Ledger

CPU, linear = torch.device("cpu"), partial(nn.Linear, 16, 16)
Conv, Sequential, Norm, LATER, WHOLE = (
    nn.Conv2d,
    nn.Sequential,
    nn.LayerNorm,
    "weights of {} products later",
    "whole: {}",
)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w if w.dim() else None, (g * x).sum(
            (0, 1)
        )  # a number has no gradient to hand on


def rand(*size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(size))


VECTORS, IMAGES, WORDS = (
    torch.randn(4, 5, 16),
    torch.randn(2, 4, 6, 6),
    torch.tensor([[1, 2, 1, 0]]),
)
COMPLEX = torch.randn(4, 5, 16, dtype=torch.cfloat)
BLOCK = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
CHAIN = Sequential(linear(), nn.GELU(), Norm(16), nn.Linear(16, 8, bias=False))
UNEVEN = Sequential(
    Conv(4, 8, 3, 2, 1, groups=2), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2)
)
TIED, FROZEN, NO_WEIGHT, OLD = linear(), linear().requires_grad_(False), linear(), linear()
NO_WEIGHT.weight.requires_grad_(False)
OLD.register_backward_hook(lambda *_: None)
TIES = "; '0.bias' is used more than once; '0.weight' is used more than once"
SCALE, TIED_BIAS = (
    Do(lambda m, x: Scale.apply(x, m.w), w=rand(16)),
    "'a.bias' is used more than once",
)
CUSTOM = "; '1.w' has its gradient from a custom Function (ScaleBackward)"

PACKED = WHOLE.format(sides.PACKED)
KEEP: Any = saved_tensors_hooks(Tensor.clone, Tensor.clone)

# The layers, their input, and what the stage then says; a number is how many products have weights for later.
ROWS: dict[str, tuple[nn.Module, Tensor, int | str]] = {
    "linear": (CHAIN, VECTORS, 2),
    "float64": (copy.deepcopy(CHAIN).double(), VECTORS.double(), 2),
    "bfloat16": (copy.deepcopy(CHAIN).bfloat16(), VECTORS.bfloat16(), 2),
    "complex": (
        Do(lambda m, x: x[0] @ (m.w * 1j) @ (m.w2 * 1j).mT, w=rand(16, 5), w2=rand(9, 5)),
        COMPLEX,
        2,
    ),
    "a transformer's block": (BLOCK, VECTORS, 4),
    "attention": (
        Do(lambda m, x: m.layer(x, x, x)[0], layer=nn.MultiheadAttention(16, 2)),
        VECTORS,
        2,
    ),
    "words": (Sequential(nn.Embedding(3, 16), Norm(16), linear(), BLOCK), WORDS, 5),
    "convolutions": (UNEVEN, IMAGES, 2),
    "convolutions in float64": (copy.deepcopy(UNEVEN).double(), IMAGES.double(), 2),
    "by channel": (
        Sequential(Conv(4, 8, 3, groups=4), nn.GroupNorm(2, 8), Conv(8, 4, 1, bias=False)),
        IMAGES,
        2,
    ),
    "gates": (
        Sequential(nn.Conv1d(5, 8, 3, dilation=2), nn.GLU(1), nn.Conv1d(4, 4, 1)),
        VECTORS,
        2,
    ),
    "scaled": (
        Do(lambda m, x: torch.addmm(m.b, x[0], m.w, beta=2, alpha=3), w=rand(16, 4), b=rand(4)),
        VECTORS,
        1,
    ),
    "in batches": (
        Do(lambda m, x: torch.baddbmm(m.b, x, m.w), w=rand(4, 16, 3), b=rand(4, 5, 3)),
        VECTORS,
        1,
    ),
    "weight first": (Do(lambda m, x: torch.mm(m.w, x[0].mT).mT, w=rand(8, 16)), VECTORS, 1),
    "hook": (
        Do(lambda m, x: [y := m.a(x), y.register_hook(lambda g: g / 3)][0], a=linear()),
        VECTORS,
        1,
    ),
    "parametrized": (Sequential(weight_norm(linear()), spectral_norm(linear())), VECTORS, 2),
    "computed": (
        Do(lambda m, x: x @ (m.w + m.a @ m.b), w=rand(16, 16), a=rand(16, 2), b=rand(2, 16)),
        VECTORS,
        1,
    ),
    "buffer": (Do(lambda m, x: x @ m.w, w=torch.randn(16, 8).requires_grad_()), VECTORS, 1),
    "two outputs": (
        Do(lambda m, x: (m.a(x), m.b(x), x.argmax()), a=linear(), b=linear()),
        VECTORS,
        2,
    ),
    "frozen": (Sequential(linear(), FROZEN, Norm(16)), VECTORS, 1),
    "frozen weight": (NO_WEIGHT, VECTORS, WHOLE.format(halves.NOTHING_LATER)),
    "no parameters": (nn.ReLU(), VECTORS, WHOLE.format(halves.NOTHING_LATER)),
    "recurrent": (
        Do(lambda m, x: m.layer(x)[0], layer=nn.LSTM(16, 16)),
        VECTORS,
        WHOLE.format(halves.NOTHING_LATER),
    ),
    "tied": (Sequential(TIED, nn.ReLU(), linear(), TIED), VECTORS, LATER.format(1) + TIES),
    "custom": (Sequential(linear(), SCALE), VECTORS, LATER.format(1) + CUSTOM),
    "no gradient": (
        Sequential(linear(), Do(SCALE.function, w=rand())),
        VECTORS,
        LATER.format(1) + CUSTOM,
    ),
    "tied bias": (
        Do(lambda m, x: m.a(x) + m.a.bias.sum(), a=Conv(4, 4, 1)),
        IMAGES,
        WHOLE.format(TIED_BIAS),
    ),
    "packed": (Do(lambda m, x: checkpoint(m.a, x, use_reentrant=False), a=CHAIN), VECTORS, PACKED),
    "kept elsewhere": (
        Do(lambda m, x: [KEEP.__enter__(), m.a(x), KEEP.__exit__()][1], a=linear()),
        VECTORS,
        PACKED,
    ),
    "old hook": (OLD, VECTORS, WHOLE.format(halves.OLD_HOOK)),
}


class Tasks:
    """The tasks of two micro-batches on one stage, of a copy of the layers."""

    def __init__(
        self,
        layers: nn.Module,
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
        guards = StageGuards(self.stage, ambient, recomputed=again)
        guards.add(InPlaceForTask(guards.parameters.changes))
        self.stand_ins, self.each = guards.parameters, []
        for i in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                task = TaskGraph(Randomness(), self.stage, guards, i, observer, again)
                torch.manual_seed(i)
                outputs, _ = task.forward(
                    (x.roll(i).requires_grad_(x.dtype != torch.long),), Tensor, ()
                )
            # Of several outputs of the second micro-batch, only the first has a gradient.
            needs = [
                y is not None and y.requires_grad and not (i and k) for k, y in enumerate(outputs)
            ]
            grads = [
                torch.randn_like(y) if y is not None and n else None
                for y, n in zip(outputs, needs, strict=True)
            ]
            self.each.append((task, tuple(grads)))

    def backward(self, *, split: bool, keep: bool = False) -> list[Tensor | None]:
        """Return all gradients, of the inputs and then of the parameters."""
        kind: Kind = "backward_inputs" if split else "backward"
        found = [g for task, grads in self.each for g in task.backward(grads, keep=keep, kind=kind)]
        for task, _ in self.each if split else ():
            task.backward_weights()
        return found + self.stand_ins.take()


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(
        [
            x is y if x is None or y is None else torch.equal(x, y) and x.stride() == y.stride()
            for x, y in pairs
        ]
    )


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore:.*non-full backward hook")
def test_halves_equal_a_whole(name: str) -> None:
    layers, x, says = ROWS[name]
    for again, casts in product((False, True), (False, x.dtype != torch.cfloat)):
        whole, split = [Tasks(layers, x, again=again, casts=casts) for _ in range(2)]
        for keep in (True, False):
            expected, found = (
                whole.backward(split=False, keep=keep),
                split.backward(split=True, keep=keep),
            )
            assert any(g is not None for g in expected)
            assert same(found, expected)
        assert casts or str(split.stage.halves) == (
            LATER.format(says) if isinstance(says, int) else says
        )


@pytest.mark.parametrize("again", [False, True])
def test_only_inputs_and_gradients_of_products_are_kept_between_the_halves(again: bool) -> None:
    ledger = Ledger()
    layers = Sequential(linear(), nn.GELU(), Norm(16), linear(), nn.Sigmoid())
    tasks = Tasks(layers, torch.randn(50, 16), again=again, observer=ledger)
    task, grads = tasks.each.pop()
    del tasks.each[:]
    task.backward(grads, kind="backward_inputs")
    ledger.assert_comes_to(
        3 * 50 * 16 * 4 + 2 * 16 * 4
    )  # one input was made here, and two gradients; the norm's
    task.backward_weights()
    ledger.assert_comes_to(2 * (16 + 1) * 16 * 4 + 2 * 16 * 4)


def test_each_structure_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Mock(wraps=halves.plan)
    monkeypatch.setattr(halves, "plan", plans)
    x, layers = (
        torch.arange(64.0).view(4, 16),
        Do(lambda m, x: m.a(m.a(x) if x[0, 0] else x), a=linear()),
    )
    whole, split = Tasks(layers, x), Tasks(layers, x)
    for keep in (True, False):  # the second micro-batch uses the layer twice
        assert same(whole.backward(split=False, keep=keep), split.backward(split=True, keep=keep))
    assert plans.call_count == 2


def test_a_change_between_the_halves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    task, grads = Tasks(linear(), VECTORS).each[0]
    task.backward(grads, kind="backward_inputs")
    [g.zero_() for g in grads if g is not None]
    with pytest.raises(
        RuntimeError, match="changed in place between the backward of inputs and that of weights"
    ):
        task.backward_weights()
    monkeypatch.setattr(
        halves, "averages_gradients", lambda modules: True
    )  # their gradients must come at once
    assert str(Tasks(linear(), VECTORS).stage.halves) == WHOLE.format(halves.EXCHANGES)
